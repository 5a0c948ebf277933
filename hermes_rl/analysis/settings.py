"""Compare the settings of two runs, and decide if the runs are comparable.

Scores under another grading have another meaning, so such runs are refused. Any other setting may be the subject of the
comparison, so it is reported. The model is expected to differ, and so are the tokens' seeds: neither is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_rl.analysis.record import RunRecord
from hermes_rl.errors import UserError
from hermes_rl.runs.record_check import problem_of_spec
from hermes_rl.spec.nodes import SourceText, to_builtins
from hermes_rl.spec.reader import read_text
from hermes_rl.spec.renamed import renamed

EXPECTED_DIFFERENCES = frozenset({"servers", "seed", "solution", "distill"})
"""Parts of the rollout definition that may differ without a warning: the policy and the random seed."""
SECTIONS: Mapping[str, tuple[str, ...]] = {"agent": ("agent", "evaluate.agent"), "play": ("schedule",)}
"""Section of the spec that holds a part, unless it has the name of the part."""
LONGEST = 40
"""Maximum characters of a setting; of a longer one only the name is shown."""


@dataclass(frozen=True, slots=True)
class SettingsDifference:
    """Differences between the settings of two runs: `refusals` make their scores incomparable, `warnings` do not."""

    refusals: tuple[str, ...]
    warnings: tuple[str, ...]


def spec_of(record: RunRecord) -> dict[str, Any]:
    """Return the resolved spec of a run, with variables not expanded; raises UserError if it cannot be read."""
    node, problems = read_text(record.spec_text, SourceText(str(record.path / "spec.yaml"), Path(record.path)))
    spec = to_builtins(renamed(node)[0]) if node is not None and not problems else None
    if (problem := problem_of_spec(spec)) is not None:
        raise UserError(f"{record.path / 'spec.yaml'} cannot be read: {problems[0] if problems else f'it {problem}'}")
    assert isinstance(spec, dict)
    return spec


def model_of(run_info: Mapping[str, Any]) -> str:
    """Return the policy, by the `run.json` of a run: the model, or the type of a server without a model name."""
    names = [str(server.get("model") or server.get("type")) for server in run_info.get("policy") or () if server]
    return ", ".join(dict.fromkeys(names)) or "?"


def success_of(spec: Mapping[str, Any]) -> float:
    """Return the score from which a rollout passes."""
    return float((spec.get("evaluate") or {}).get("success_threshold", 1.0))


def success_in(record: RunRecord) -> float:
    """Return the score from which a rollout of this run passes, even if its spec cannot be read."""
    try:
        return success_of(spec_of(record))
    except (UserError, ValueError, TypeError):
        return success_of({})


def scoring_of(run_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that turn rewards' values into a score, by the `run.json` of a run."""
    return (run_info.get("grading") or {}).get("scoring") or {}


def clamp_of(run_info: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the bounds to which scores are clamped, or None if there are none."""
    bounds = scoring_of(run_info).get("clamp")
    return (float(bounds[0]), float(bounds[1])) if bounds else None


def span_of(run_info: Mapping[str, Any]) -> tuple[float, float]:
    """Return the lowest and the highest score that a run can give, if it contains them."""
    return clamp_of(run_info) or (0.0, 1.0)


def weights_of(run_info: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the weight of each reward in the score; None for a gate."""
    weightings = scoring_of(run_info).get("weightings") or ()
    return {each["name"]: None if each.get("gate") else each.get("weight") for each in weightings}


def contrast(a: RunRecord, b: RunRecord) -> SettingsDifference:
    """Compare the settings of two runs by their `run.json` and `spec.yaml`."""
    before, after, specs = a.run_info, b.run_info, (spec_of(a), spec_of(b))
    refusals, warnings = _other_grading(before, after)
    for name in ("mode", "demo"):
        if before.get(name) != after.get(name):
            warnings.append(f"{name} is {before.get(name)} in A and {after.get(name)} in B")
    warnings += [*_other_sampling(before, after), *_other_parts(before, after, *specs)]
    if success_of(specs[0]) != success_of(specs[1]):
        warnings.append(
            f"evaluate.success_threshold is {success_of(specs[0]):g} in A and {success_of(specs[1]):g} in B"
        )
    return SettingsDifference(tuple(refusals), tuple(warnings))


def _other_grading(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the differences that change the scores of the same rollouts, and the differences that only affect
    metrics.
    """
    scores: list[str] = []
    metrics: list[str] = []
    weights, weights_b = (
        {name: "gate" if weight is None else f"{weight:g}" for name, weight in weights_of(run).items() if weight != 0}
        for run in (a, b)
    )
    gradings = [run.get("grading") or {} for run in (a, b)]
    before, after = (each.get("rewards") or {} for each in gradings)
    any_size, any_size_b = (each.get("any_size") or {} for each in gradings)
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) == after.get(name) or any_size.get(name, "A") == any_size_b.get(name, "B"):
            continue
        how = "has other code, arguments, or another judge"
        if name not in before or name not in after:
            how = f"is only in {'A' if name in before else 'B'}"
        if name in weights or name in weights_b:
            scores.append(f"rewards.{name} {how}")
        else:
            metrics.append(f"rewards.{name} {how}, which counts for nothing")
    for name, weight in weights.items():
        if weight != weights_b.get(name, weight):
            scores.append(f"rewards.{name} has weight {weight} in A and {weights_b[name]} in B")
    before, after = scoring_of(a), scoring_of(b)
    for name, key in (("score.clamp", "clamp"), ("score.combine", "combine"), ("on_stop", "on_stop")):
        if before.get(key) != after.get(key):
            scores.append(_describe_difference(name, before.get(key), after.get(key)))
    return scores, metrics


def _other_sampling(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences in the parameters sent to the first server of each run, the temperature first."""
    before, after = (((run.get("policy") or [{}])[0] or {}).get("sampling") or {} for run in (a, b))
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if before.get(name) != after.get(name) and (name == "temperature" or (name in before and name in after)):
            yield _describe_difference(f"the {name}", before.get(name), after.get(name))


def _other_parts(
    a: Mapping[str, Any], b: Mapping[str, Any], spec_a: Mapping[str, Any], spec_b: Mapping[str, Any]
) -> Iterator[str]:
    before, after = a.get("parts") or {}, b.get("parts") or {}
    for part in dict.fromkeys([*before, *after]):
        if part in EXPECTED_DIFFERENCES or before.get(part) == after.get(part):
            continue
        differing = [
            value
            for section in SECTIONS.get(part, (part,))
            for value in _other_values(section, _look_up(spec_a, section), _look_up(spec_b, section))
            if value[0].rpartition(".")[2] not in ("temperature", "top_p")  # they are in the sent parameters already
        ]
        if differing:
            for name, value_a, right in differing[:3]:
                yield _describe_difference(name, value_a, right)
            if len(differing) > 3:
                yield f"{len(differing) - 3} more keys of {part} differ"
        elif part != "agent" or not list(_other_sampling(a, b)):
            yield f"{part} differs: a file or code that it names has other content"


def _look_up(spec: Any, path: str) -> Any:
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


def _describe_difference(name: str, a: Any, b: Any) -> str:
    text_a, right = ("not set" if value is None else " ".join(str(value).split()) for value in (a, b))
    if max(len(text_a), len(right)) > LONGEST:
        return f"{name} differs"
    return f"{name} is {text_a} in A and {right} in B"
