"""Form of a record of `rollouts.jsonl`, of `run.json` and of `spec.yaml`: runs write them, other programs may change
them.

Each reader calls these checks once, to make sure that the data has the types on which all readers rely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from hermes_rl.rollouts.rollout import Baseline
from hermes_rl.spec.new_names import DESCRIPTION, FIELDS, RECORD, REWARDS, STATES, STOP_REASONS
from hermes_rl.values import LARGEST_COUNT, is_number, too_deep

Check = Callable[[Any], bool]


COMPLETE_KEYS = (
    "id",
    "row_key",
    "group",
    "index",
    "state",
    "rewards",
    "score",
    "messages",
    "usage",
    "timings",
    "tool_calls",
)
"""Keys that every complete record has."""


def current_record(line: Any) -> Any:
    """Return a record, or a part of it, with the names of this version; `RECORD` maps the names of earlier versions."""
    if not isinstance(line, dict) or not line.keys() & RECORD.keys():
        return line
    line = _rename_keys(line, RECORD)
    for field, names in (("state", STATES), ("stop_reason", STOP_REASONS), ("first_stop_reason", STOP_REASONS)):
        if isinstance(line.get(field), str):
            line[field] = names.get(line[field], line[field])
    for field, names in (("program", FIELDS), ("provenance", FIELDS), ("rewards", REWARDS)):
        if field in line:
            line[field] = _rename_keys(line[field], names)
    calls = line["program"].get("calls") if isinstance(line.get("program"), dict) else None
    if isinstance(calls, list):
        line["program"]["calls"] = [_rename_keys(call, FIELDS) for call in calls]
    if isinstance(line.get("others"), list):
        line["others"] = [*map(current_record, line["others"])]
    return line


def current_description(run_info: Any) -> Any:
    """Return the value of a `run.json` with the names of this version."""
    run_info = _rename_keys(run_info, DESCRIPTION)
    if isinstance(run_info, dict) and isinstance(run_info.get("grading"), dict):
        run_info["grading"] = grading = dict(run_info["grading"])
        for field in grading.keys() & {"rewards", "any_size"}:
            grading[field] = _rename_keys(grading[field], REWARDS)
        scoring = grading.get("scoring")
        if isinstance(scoring, dict) and isinstance(scoring.get("endings"), dict):
            grading["scoring"] = scoring = dict(scoring)
            scoring["on_stop"] = _rename_keys(scoring.pop("endings"), STOP_REASONS)
    return run_info


def _rename_keys(value: Any, names: Mapping[str, str]) -> Any:
    """Return a mapping with the new names of its keys; another value, which the checks refuse, unchanged."""
    return {names.get(name, name): part for name, part in value.items()} if isinstance(value, dict) else value


def problem_of(line: object, keys: Sequence[str] = ()) -> str | None:
    """Return what is wrong with a record, or with these keys of it, as a phrase such as `is not a JSON object`; None if
    it has the form that runs write.
    """
    if not isinstance(line, dict):
        return "is not a JSON object"
    for name in keys:
        if name not in line:
            return f"has no {name!r}"
    return _form_problem(line, _FORM)


def problem_of_description(run_info: object) -> str | None:
    """Return what is wrong with the value of a `run.json`, as `problem_of` does; None if nothing is."""
    if not isinstance(run_info, dict):
        return "is not a JSON object"
    return "is nested too deeply" if too_deep(run_info) else _form_problem(run_info, _DESCRIPTION)


def problem_of_spec(spec: object) -> str | None:
    """Return as a predicate how the spec of a run differs from the form that readers of runs expect; else None."""
    if not isinstance(spec, dict):
        return "is not a mapping"
    return _form_problem(spec, _SPEC)


def _form_problem(value: Mapping[str, Any], form: Mapping[str, Check]) -> str | None:
    wrong = next((name for name, part in value.items() if name in form and not form[name](part)), None)
    return None if wrong is None else f"has {wrong!r} in a form that no run writes"


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_COUNT


def _is_index(value: Any) -> bool:
    return _count(value) and value < 2**31


def _usage(value: Any) -> bool:
    return _counts(value) and all(_count(value.get(name, 0)) for name in ("prompt_tokens", "completion_tokens"))


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _each(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _mapping_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _with(must: Mapping[str, Check], may: Mapping[str, Check] | None = None) -> Check:
    """Return a check for an object that has all keys of `must` and may have the keys of `may`."""
    checks = {**(may or {}), **must}
    return lambda value: (
        isinstance(value, dict)
        and value.keys() >= must.keys()
        and all(check(value[name]) for name, check in checks.items() if name in value)
    )


_counts = _mapping_of(is_number)
_calls = _each(_with({"function": _with({"name": _text, "arguments": _text})}, {"id": _maybe(_text)}))
_content = _maybe(lambda value: _text(value) or _each(_object)(value))
_message = _with({"role": _text}, {"content": _content, "tool_calls": _maybe(_calls), "tool_call_id": _maybe(_text)})
_reward = _with(
    {"value": _maybe(is_number)},
    {
        "reason": _maybe(_text),
        "metrics": _mapping_of(_maybe(is_number)),
        "per_turn": _maybe(_each(_maybe(is_number))),
        "overrides": _object,
        "started_at": is_number,
        "seconds": is_number,
    },
)
_packed = _with({"ids": _text, "logprobs": _maybe(_text), "spans": _each(_each(_count))})
_program = _with(
    {"output": _text, "requests": _count, "refused": _count, "calls": _each(_object), "excluded": _counts},
    {"exit_code": _maybe(lambda value: type(value) is int), "refusal": _text},
)
_FORM: Mapping[str, Check] = {
    # A state or a stop reason may come from another version; it is shown unchanged.
    **dict.fromkeys(("id", "row_key", "group", "row_digest", "state", "stop_reason"), _text),
    **dict.fromkeys(("epoch", "index", "attempt", "turns", "prompt_length"), _is_index),
    "first_stop_reason": _maybe(_text),
    "seat": _with(
        {"name": _text, "of": _text, "role": _text, "trained": lambda value: isinstance(value, bool)},
        {"baseline": lambda value: value in get_args(Baseline)},
    ),
    "score": _maybe(is_number),
    "started_at": _maybe(is_number),
    "sandbox_start": _maybe(_with({"started_at": is_number, "seconds": is_number})),
    "model_calls": _each(_with({"started_at": is_number, "seconds": is_number}, {"turn": _count})),
    "error": _maybe(_text),
    "rewards": _mapping_of(_reward),
    "messages": _each(_message),
    "usage": _usage,
    "roles": _mapping_of(_counts),
    "timings": _mapping_of(is_number),
    "policy": _maybe(_with({}, {"model": _maybe(_text), "type": _maybe(_text)})),
    "tool_calls": _each(
        _with(
            {"turn": _count, "id": _text, "name": _text},
            {"seconds": is_number, "started_at": is_number, "error": _maybe(_text)},
        )
    ),
    "tool_errors": _each(_with({"turn": _count, "tool_name": _text, "error": _text})),
    "tools": _maybe(_each(_with({"function": _with({"name": _text})}))),
    "row": _maybe(_object),
    "sequences": _maybe(_each(_packed)),
    "sampled": _each(lambda value: isinstance(value, list) and len(value) == 6),
    "artifacts": _mapping_of(_object),
    "image": _maybe(_text),
    "environment_rewards": _each(
        lambda value: isinstance(value, list) and len(value) == 2 and all(map(is_number, value))
    ),
    "steps": _each(_with({"turns": _count, "rewards": _mapping_of(_reward)})),
    "program": _program,
    "trained_share": is_number,
}
_flag: Check = lambda value: isinstance(value, bool)  # noqa: E731 - as its neighbours, a check
_texts = _mapping_of(_text)
_weighting = _with({"name": _text}, {"weight": _maybe(is_number), "gate": _flag})
_clamp = _maybe(lambda value: _each(is_number)(value) and len(value) == 2)
_DESCRIPTION: Mapping[str, Check] = {
    **dict.fromkeys(
        ("name", "fingerprint", "mode", "hermes_rl", "python", "started", "resumed", "ended", "spec"), _maybe(_text)
    ),
    "seconds_before": is_number,
    **dict.fromkeys(("format", "seed"), _maybe(lambda value: type(value) is int)),
    "group_size": _maybe(lambda value: _count(value) and value > 0),
    "demo": _maybe(_flag),
    "packages": _maybe(_texts),
    "dataset": _maybe(_object),
    "policy": _maybe(
        _each(_maybe(_with({}, {"type": _maybe(_text), "model": _maybe(_text), "sampling": _maybe(_object)})))
    ),
    "tokenizer": _maybe(_with({}, {"name": _maybe(_text), "ids": _maybe(_text), "template": _maybe(_text)})),
    "code": _maybe(_object),
    "parts": _maybe(_texts),
    "grading": _maybe(
        _with(
            {},
            {
                "rewards": _maybe(_texts),
                "any_size": _maybe(_texts),
                "scoring": _maybe(_with({}, {"weightings": _maybe(_each(_weighting)), "clamp": _clamp})),
            },
        )
    ),
    "images": _maybe(_mapping_of(_each(_text))),
    "usage": _maybe(_mapping_of(_counts)),
    "uncounted": _maybe(_each(_text)),
    "findings": _maybe(_each(_object)),
    "score": _maybe(_object),
    "failure_rates": _maybe(_object),
    "retried": _maybe(_object),
    "failed": _maybe(_object),
}
_SPEC: Mapping[str, Check] = {
    "evaluate": _maybe(_with({}, {"success_threshold": _maybe(is_number), "agent": _maybe(_object)})),
    **dict.fromkeys(("on_stop", "rewards", "agent", "process", "serve", "servers", "dataset"), _maybe(_object)),
}
