"""What two runs were made with, and whether that allows to compare them.

Another grading makes scores mean something else, so such runs are refused. Any other setting may be what the user wants
to compare, so it is named. The model is expected to differ, and so are the tokens' seeds: neither is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.reading.record import RunRecord
from hermes_rl.spec.nodes import SourceText, plain
from hermes_rl.spec.reader import read_text

EXPECTED = frozenset({"servers", "seed", "solution", "distill"})
"""Parts of what defines a rollout that may differ without a word: who plays, and by which chance."""
SECTIONS: Mapping[str, tuple[str, ...]] = {"agent": ("agent", "evaluate.agent")}
"""Where the spec holds a part, unless its name says it."""
LONGEST = 40
"""Characters of a setting; of a longer one only the name is told."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """What differs between the settings of two runs: `refusals` make their scores incomparable, `warnings` do not."""

    refusals: tuple[str, ...]
    warnings: tuple[str, ...]


def spec_of(record: RunRecord) -> dict[str, Any]:
    """Return the resolved spec of a run as plain values; variables stay as they were written.

    Raises:
        UserError: spec.yaml cannot be read.
    """
    node, problems = read_text(record.spec_text, SourceText(str(record.path / "spec.yaml"), Path(record.path)))
    spec = plain(node) if node is not None and not problems else None
    if not isinstance(spec, dict):
        raise UserError(f"{record.path / 'spec.yaml'} is no spec: {problems[0] if problems else 'it has no keys'}")
    return spec


def model_of(described: Mapping[str, Any]) -> str:
    """Return who played, by the `run.json` of a run: the model, or the type of a server that names none."""
    names = [str(one.get("model") or one.get("type")) for one in described.get("policy") or () if one]
    return ", ".join(dict.fromkeys(names)) or "?"


def success_of(spec: Mapping[str, Any]) -> float:
    """Return the score from which a rollout passes."""
    return float((spec.get("evaluate") or {}).get("success", 1.0))


def contrast(a: RunRecord, b: RunRecord) -> Contrast:
    """Compare the settings of two runs by their `run.json` and `spec.yaml`."""
    before, after = a.described, b.described
    grading = (before.get("grading") or {}), (after.get("grading") or {})
    rewards, metrics = _other_rewards(*grading)
    refusals = [*rewards, *_other_scoring(*grading)]
    specs = spec_of(a), spec_of(b)
    warnings = [f"{name}, which counts for nothing" for name in metrics]
    for name in ("mode", "demo"):
        if before.get(name) != after.get(name):
            warnings.append(f"{name} is {before.get(name)} in A and {after.get(name)} in B")
    warnings += _other_sampling(before, after)
    warnings += _other_parts(before, after, *specs)
    if success_of(specs[0]) != success_of(specs[1]):
        warnings.append(f"evaluate.success is {success_of(specs[0]):g} in A and {success_of(specs[1]):g} in B")
    return Contrast(tuple(refusals), tuple(warnings))


def _other_rewards(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the rewards that give other values, those that count first; the others are metrics."""
    before, after = a.get("rewards") or {}, b.get("rewards") or {}
    counting = {
        one["name"]
        for grading in (a, b)
        for one in (grading.get("scoring") or {}).get("weightings") or ()
        if one.get("weight") or one.get("gate")
    }
    counted: list[str] = []
    metrics: list[str] = []
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) == after.get(name):
            continue
        if name not in before or name not in after:
            text = f"rewards.{name} is only in {'A' if name in before else 'B'}"
        else:
            text = f"rewards.{name} has other code, arguments, or another judge"
        (counted if name in counting else metrics).append(text)
    return counted, metrics


def _other_scoring(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Yield what makes another score of the same values."""
    before, after = a.get("scoring") or {}, b.get("scoring") or {}
    weights = [
        {
            one["name"]: "gate" if one.get("gate") else f"{one.get('weight'):g}"
            for one in scoring.get("weightings") or ()
            if one.get("weight") or one.get("gate")
        }
        for scoring in (before, after)
    ]
    for name in dict.fromkeys([*weights[0], *weights[1]]):
        left, right = weights[0].get(name), weights[1].get(name)
        if left != right and left is not None and right is not None:
            yield f"rewards.{name} has weight {left} in A and {right} in B"
    for name, key in (("score.clamp", "clamp"), ("endings", "endings")):
        if before.get(key) != after.get(key):
            yield _told(name, before.get(key), after.get(key))


def _other_sampling(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the first server of each run was asked otherwise, the temperature above all."""
    before, after = (((one.get("policy") or [{}])[0] or {}).get("sampling") or {} for one in (a, b))
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if before.get(name) != after.get(name) and (name == "temperature" or (name in before and name in after)):
            yield _told(f"the {name}", before.get(name), after.get(name))


def _other_parts(
    a: Mapping[str, Any], b: Mapping[str, Any], spec_a: Mapping[str, Any], spec_b: Mapping[str, Any]
) -> Iterator[str]:
    before, after = a.get("parts") or {}, b.get("parts") or {}
    for part in dict.fromkeys([*before, *after]):
        if part in EXPECTED or before.get(part) == after.get(part):
            continue
        differing = [
            value
            for section in SECTIONS.get(part, (part,))
            for value in _other_values(section, _at(spec_a, section), _at(spec_b, section))
            if value[0].rpartition(".")[2] not in ("temperature", "top_p")  # as they were sent, they are told already
        ]
        if differing:
            for name, left, right in differing[:3]:
                yield _told(name, left, right)
            if len(differing) > 3:
                yield f"{len(differing) - 3} more keys of {part} differ"
        elif part != "agent" or not list(_other_sampling(a, b)):
            yield f"{part} differs: a file or code that it names has other content"


def _at(spec: Any, path: str) -> Any:
    for name in path.split("."):
        spec = spec.get(name) if isinstance(spec, Mapping) else None
    return spec


def _other_values(name: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield name and values of every key that differs."""
    if isinstance(a, Mapping | None) and isinstance(b, Mapping | None) and (a or b):
        a, b = a or {}, b or {}
        for key in dict.fromkeys([*a, *b]):
            yield from _other_values(f"{name}.{key}", a.get(key), b.get(key))
    elif a != b:
        yield name, a, b


def _told(name: str, a: Any, b: Any) -> str:
    left, right = _shown(a), _shown(b)
    if max(len(left), len(right)) > LONGEST:
        return f"{name} differs"
    return f"{name} is {left} in A and {right} in B"


def _shown(value: Any) -> str:
    return "not set" if value is None else " ".join(str(value).split())
