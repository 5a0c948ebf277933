"""A rollout for a page: JSON whose texts are safe to display, and bounded.

Everything that an agent, a model, a reward or a dataset wrote passes through `Screen`, which escapes control characters
of terminals and of writing direction, and cuts texts that are too long for a page, with a note.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any

from hermes_rl.agent.result import reasoning_of
from hermes_rl.analysis.findings import Scoring, reason_of
from hermes_rl.analysis.record import ANSWER_COLUMNS, RolloutSummary, RunRecord, beginning, prompt_of, text_of
from hermes_rl.errors import UserError
from hermes_rl.stop_reasons import stop_reason_named
from hermes_rl.terminal_text import escape_controls
from hermes_rl.tokens.transcript import unpacked

NUMBER = 24
"""Maximum bytes of a number, except for few."""
MAX_VALUE_DEPTH = 40
"""Levels of a recorded value that are shown as such; deeper levels are shown as text."""
LOOKED_AT = 20_000
"""Maximum number of files and directories of an artifact that are read."""
MAX_FILES_LISTED = 200
"""Files of an artifact that are listed."""
BEFORE = 100
"""Tokens of the prompt that are shown before the first sampled one."""
PREVIEW = 160
"""Characters of a question, and of an answer, in a row of a table."""


@dataclass
class Screen:
    """Makes recorded values safe to display on a page.

    Attributes:
        longest: characters of one text that are shown.
        room: remaining bytes of JSON for everything.
        cut: entries of lists that found no room.
    """

    longest: int = 200_000
    room: int = 16_000_000
    cut: int = 0

    def text(self, text: str) -> str:
        """Return a text without control characters, cut if it is too long."""
        beginning = text[: max(min(self.longest, self.room), 0)]
        visible_text, cut = escape_controls(beginning), len(text) - len(beginning)
        self.room -= len(encode_basestring_ascii(visible_text))  # as in a page, where three more characters are escaped
        self.room -= 5 * (visible_text.count("<") + visible_text.count(">") + visible_text.count("&"))
        return visible_text + (f"\n[… {cut:,} more characters are in rollouts.jsonl]" if cut else "")

    def value(self, value: Any, depth: int = 0) -> Any:
        """Return any JSON value with safe texts and keys; numbers that JSON does not have become texts."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if depth >= MAX_VALUE_DEPTH and isinstance(value, (dict, list)):
            return self.text(json.dumps(value, ensure_ascii=False, default=str))
        if isinstance(value, (dict, Mapping)):
            return {self.text(str(key)): self.value(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return list(self._entries(value, depth + 1))
        self.room -= NUMBER
        return value

    def _entries(self, entries: Sequence[Any], depth: int) -> Iterator[Any]:
        for index, entry in enumerate(entries):
            if self.room <= 0:
                self.cut += len(entries) - index
                return
            yield self.value(entry, depth)


SUMMARY_FIELDS = (
    "id", "row_key", "group", "epoch", "index", "attempt", "state", "score", "stop_reason", "turns", "prompt_tokens",
    "completion_tokens", "calls", "call_errors", "tools", "seat", "cost",
)  # fmt: skip
"""Fields of a `RolloutSummary` that a row of a table shows unchanged."""


def shown_summary(rollout: RolloutSummary, scoring: Scoring) -> dict[str, Any]:
    """Return a rollout as a row of a table."""
    return {
        **{name: getattr(rollout, name) for name in SUMMARY_FIELDS},
        "rewards": dict(rollout.rewards),
        "passed": scoring.passes(rollout),
        "reason": reason_of(rollout, scoring),
        "error": (rollout.error or "")[:500] or None,
        "seconds": rollout.seconds.get("total"),
    }


def shown_previews(record: RunRecord, rollouts: Sequence[RolloutSummary]) -> list[dict[str, Any]]:
    """Return rollouts as rows of a table, each with its row's name and the start of its answer."""
    rows, scoring = record.previews({rollout.row_key for rollout in rollouts}, PREVIEW), Scoring.of(record)
    lines = []
    for rollout in rollouts:
        messages = [message for message in record.messages(rollout.id) if isinstance(message, dict)]
        # The record with the row may not be written yet; the prompt is available.
        label = rows[rollout.row_key]["label"] or prompt_of(messages)
        answer = _last_reply(messages) if rollout.turns else ""
        previews = {"label": beginning(label, PREVIEW), "answer": beginning(answer, PREVIEW)}
        lines.append({**shown_summary(rollout, scoring), **previews})
    return lines


def _last_reply(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the last message of a model, or the tool that it called in a message without text."""
    empty: Mapping[str, Any] = {}
    last = next((message for message in reversed(messages) if message.get("role") == "assistant"), empty)
    functions = [call.get("function") or {} for call in last.get("tool_calls") or () if isinstance(call, dict)]
    calls = (f"{function.get('name')} {text_of(function.get('arguments'))}" for function in functions)
    return text_of(last.get("content")).strip() or " ".join(calls)


def shown_rollout(record: RunRecord, rollout: str, screen: Screen) -> dict[str, Any]:
    """Return a rollout without its tokens; raises UserError if it does not exist, or its record cannot be read."""
    try:
        view: dict[str, Any] = screen.value(_rollout_entry(record, rollout))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the line of rollout {rollout} cannot be shown ({type(error).__name__}: {error})") from error
    return {**view, "cut": screen.cut}


def _rollout_entry(record: RunRecord, rollout: str) -> dict[str, Any]:
    line = record.line_of_group(rollout)
    summary, scoring = record.summary(rollout), Scoring.of(record)
    label = record.previews([summary.row_key], PREVIEW)[summary.row_key]
    stop_reason = stop_reason_named(summary.stop_reason)
    row, sequences = line.get("row"), [unpacked(packed) for packed in line.get("sequences") or ()]
    return {
        **shown_summary(summary, scoring),
        "label": label["label"],
        "stop": "" if stop_reason is None else stop_reason.rule.description.replace("`", ""),
        "natural": stop_reason is not None and stop_reason.finished_naturally,
        "started_at": line.get("started_at"),
        "sandbox_start": line.get("sandbox_start"),
        "model_calls": line.get("model_calls") or [],
        "error": line.get("error"),
        "timings": line.get("timings") or {},
        "usage": line.get("usage") or {},
        "policy": line.get("policy"),
        "image": line.get("image"),
        "rewards": [{"name": name, **reward} for name, reward in line["rewards"].items()],
        "messages": conversation(line),
        "program": program(line),
        "row": row,
        "expected": [name for name in row or {} if name.lower() in ANSWER_COLUMNS],
        "artifacts": [
            _artifact_entry(record.path, name, artifact) for name, artifact in (line.get("artifacts") or {}).items()
        ],
        "tools": line.get("tools"),
        "sequences": [
            {
                "tokens": len(sequence),
                "trained": sequence.trained_length,
                "start": max(sequence.spans[0].start - BEFORE, 0) if sequence.spans else 0,
            }
            for sequence in sequences
        ],
        "members": [shown_summary(member, scoring) for member in record.members(summary.group)],
        "seats": [shown_summary(seat, scoring) for seat in record.seats(summary)],
        "attempts": [
            {"id": rollout.id, "attempt": rollout.attempt, "state": rollout.state, "stop_reason": rollout.stop_reason}
            for rollout in record.rollouts
            if rollout.group == summary.group and rollout.index == summary.index
        ],
    }


def conversation(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a rollout; tool results and tool errors are attached to the calls."""
    call_records = {(call["turn"], call["id"]): call for call in line.get("tool_calls") or ()}
    # A call with unreadable arguments is an error without a call.
    errors = {(error["turn"], error["tool_name"]): error["error"] for error in line.get("tool_errors") or ()}
    messages: list[dict[str, Any]] = []
    calls: dict[str, dict[str, Any]] = {}
    turn = 0
    for index, message in enumerate(line["messages"]):
        prompt = index < line.get("prompt_length", 0)
        if message["role"] == "tool" and message.get("tool_call_id") in calls:
            # An id may occur again in a later turn, and then refers to the call of that turn.
            calls.pop(message["tool_call_id"])["result"] = text_of(message.get("content"))
            continue
        sampled = message["role"] == "assistant" and not prompt
        turn += sampled
        shown_calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            name = str(function.get("name"))
            record = call_records.get((turn, call.get("id")), {"error": errors.get((turn, name))})
            entry = {"name": name, "arguments": text_of(function.get("arguments")), "result": None}
            # A program does not report the duration of its tools.
            entry |= {name: record.get(name) or None for name in ("seconds", "started_at")}
            shown_calls.append(entry | {"error": record.get("error")})
            calls[str(call.get("id"))] = shown_calls[-1]
        messages.append(
            {
                "role": str(message["role"]),
                "text": text_of(message.get("content")),
                "reasoning": reasoning_of(message),
                "calls": shown_calls,
                "prompt": prompt,
                "turn": turn if sampled else None,
            }
        )
    return messages


def program(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the data of the agent program of a rollout, its calls as `program_lines`, or None if no program ran.

    The mapping `sampling` is replaced by a text.
    """
    program_record = line.get("program")
    if program_record is None:
        return None
    rest = {name: program_record[name] for name in ("exit_code", "output", "requests", "refused", "excluded")}
    rest["refusal"] = program_record.get("refusal", "")
    settings = ", ".join(f"{name} {value}" for name, value in program_record["sampling"].items())
    return {**rest, "sampling": settings, "lines": list(program_lines(program_record["calls"]))}


def program_lines(calls: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the calls of a program as a tree, from its top: consecutive calls of one kind are an entry.

    An entry has its `kind`, its `depth`, the `turns` of its calls as text, from 1, the turn that it continues `from` if
    it branches off, the number of sampled tokens (`tokens`) and of `trained` ones, and its `calls`, each with its
    `turn`. Conversations other than the main one are below it.
    """
    continuations: dict[int | None, list[int]] = {}
    for index, call in enumerate(calls):
        before = call["continues"]
        continuations.setdefault(before if before is not None and before < index else None, []).append(index)
    roots = sorted(continuations.get(None, ()), key=lambda number: (calls[number]["kind"] != "main", number))
    waiting = [(index, int(calls[index]["kind"] != "main")) for index in reversed(roots)]
    while waiting:
        first, depth = waiting.pop()
        line, branches = [first], list[int]()
        while line[-1] in continuations:
            following = continuations[line[-1]]
            same_kind = [index for index in following if calls[index]["kind"] == calls[first]["kind"]]
            branches += [index for index in following if index not in same_kind[:1]]
            if not same_kind:
                break
            line.append(same_kind[0])
        waiting += [(index, depth + 1) for index in reversed(branches)]
        before = calls[first]["continues"]
        yield {
            "kind": calls[first]["kind"],
            "depth": depth,
            "turns": _format_ranges([index + 1 for index in line]),
            "from": None if before is None else before + 1,
            "tokens": sum(calls[index]["tokens"] for index in line),
            "trained": sum(calls[index]["tokens"] for index in line if calls[index]["trained"]),
            "calls": [{**calls[index], "turn": index + 1} for index in line],
        }


def _format_ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers as text; consecutive numbers become a range."""
    ranges: list[list[int]] = []
    for value in numbers:
        if ranges and value == ranges[-1][-1] + 1:
            ranges[-1][1:] = [value]
        else:
            ranges.append([value])
    return ", ".join("–".join(map(str, ends)) for ends in ranges)


def _artifact_entry(run: Path, name: str, artifact: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of an artifact, with its files by their paths in the run directory."""
    if "path" not in artifact:
        return {"name": name, **artifact, "files": []}
    artifact_path = run / str(artifact["path"])
    paths = (path for path in islice(_files(run, artifact_path), LOOKED_AT) if artifact_file(run, path) is not None)
    files = sorted(str(path.relative_to(run)) for path in islice(paths, MAX_FILES_LISTED))
    return {"name": name, **artifact, "files_count": artifact.get("files"), "files": files}


def _files(run: Path, root: Path) -> Iterator[Path]:
    """Yield the files at and below a path among the artifacts of a run; nothing if the path leads elsewhere."""
    if root.resolve().is_relative_to((run / "artifacts").resolve()):
        yield root
        yield from root.rglob("*")


def artifact_file(run: Path, path: Path) -> Path | None:
    """Return the path of an artifact's file, or None if it is not a file, or is outside the artifacts of the run."""
    resolved_path = path.resolve()
    return (
        resolved_path
        if resolved_path.is_relative_to((run / "artifacts").resolve()) and resolved_path.is_file()
        else None
    )
