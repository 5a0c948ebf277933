"""What a run shows as a whole, which of its rollouts somebody asks for, and why one of them failed.

Everything is over the rollouts that count, of each place one (`RunRecord.counting`); attempts that infrastructure
failed and that were played again are told apart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from hermes_rl.endings import RULES, Ending
from hermes_rl.reading.compare import by_row
from hermes_rl.reading.record import RolloutSummary, RunRecord
from hermes_rl.reading.settings import model_of, spec_of, success_of
from hermes_rl.reading.statistics import Interval
from hermes_rl.rollouts.rollout import RolloutState
from hermes_rl.runs.statistics import mean

PHASES = ("queue", "sandbox", "generation", "tools", "rewards", "total")
"""Of a rollout's time, in their order."""
Sort = Literal["number", "score", "turns", "tokens", "seconds", "errors"]
SORTS: tuple[Sort, ...] = get_args(Sort)


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity over the rollouts that have it."""

    mean: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return None where no rollout has it."""
        known = [value for value in values if value is not None]
        return cls(mean(known), min(known), max(known), len(known)) if known else None


@dataclass(frozen=True, slots=True)
class FailureCause:
    """What kept rollouts from being graded: how they ended, how often, and what the first of them said."""

    ending: str
    count: int
    error: str | None
    id: str


@dataclass(frozen=True, slots=True)
class RowSummary:
    """A row with the mean of its scores, None where it has none, and the mean of its seconds."""

    row_key: str
    score: float | None
    passed: int
    graded: int
    ungraded: int
    seconds: float
    shown: str
    """The id of its worst rollout."""


@dataclass(frozen=True)
class RunSummary:
    """A run as a whole.

    Attributes:
        path: of the run directory.
        name: of the spec.
        mode: in which it was played.
        demo: whether the scripted policy played without model, network and containers.
        model: who played.
        started: when, as `run.json` says.
        success: score from which a rollout passes.
        rows: how many rows were begun.
        groups: how many groups were begun.
        rollouts: how many places were played.
        graded: how many of them have a score.
        passed: how many of these pass.
        left_out: how many the spec's `endings` leave out.
        waiting: how many wait for a reward that compares them with their group.
        score: mean, lowest and highest score; None where nothing is graded.
        interval: of the mean, 95 %, as `hermes_rl.reading.statistics.Interval` has it.
        endings: how many ended how.
        failures: why others have no score, the most frequent first.
        again: attempts that infrastructure failed and that were played again, by ending.
        rewards: each by its name.
        counts: turns, tokens, cost where servers tell it, tool calls and their errors, per rollout.
        seconds: by phase, per rollout.
        worst: the rows with the lowest score.
        slowest: the rows that took longest.
        unreadable: lines of the record that cannot be read.
        unasked: rollouts beyond those that the last start asked for of each row; they count for nothing.
    """

    path: str
    name: str
    mode: str
    demo: bool
    model: str
    started: str
    success: float
    rows: int
    groups: int
    rollouts: int
    graded: int
    passed: int
    left_out: int
    waiting: int
    score: Spread | None
    interval: Interval
    endings: Mapping[str, int]
    failures: tuple[FailureCause, ...]
    again: Mapping[str, int]
    rewards: Mapping[str, Spread]
    counts: Mapping[str, Spread]
    seconds: Mapping[str, Spread]
    worst: tuple[RowSummary, ...]
    slowest: tuple[RowSummary, ...]
    unreadable: int
    unasked: int

    def record(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def summarise(record: RunRecord, listed: int = 5) -> RunSummary:
    """Sum up a run that was read; `listed` rows are named at most as worst and as slowest.

    Raises:
        UserError: run.json or spec.yaml cannot be read.
    """
    described, success = record.described, success_of(spec_of(record))
    size = record.group_size
    counting = list(record.counting(size=size))
    graded = [rollout for rollout in counting if rollout.score is not None]
    rows = by_row(counting)
    summaries = [_row(key, found, success) for key, found in rows.items()]
    failed, places = [rollout for rollout in counting if _has_failed(rollout)], {rollout.id for rollout in counting}
    names = dict.fromkeys(name for rollout in graded for name in rollout.rewards)
    counts: dict[str, Callable[[RolloutSummary], float | None]] = {
        "turns": lambda one: one.turns,
        "prompt tokens": lambda one: one.prompt_tokens,
        "completion tokens": lambda one: one.completion_tokens,
        "cost in $": lambda one: one.cost,
        "tool calls": lambda one: one.calls,
        "tool errors": lambda one: one.call_errors,
    }
    return RunSummary(
        path=str(record.path),
        name=str(described.get("name") or "?"),
        mode=str(described.get("mode") or "?"),
        demo=bool(described.get("demo")),
        model=model_of(described),
        started=str(described.get("started") or "?"),
        success=success,
        rows=len(rows),
        groups=len({rollout.group for rollout in counting}),
        rollouts=len(counting),
        graded=len(graded),
        passed=sum(has_passed(rollout, success) for rollout in graded),
        left_out=sum(rollout.state == RolloutState.LEFT_OUT for rollout in counting),
        score=Spread.of(rollout.score for rollout in graded),
        interval=Interval.of(graded),
        endings=dict(Counter(rollout.ending for rollout in counting).most_common()),
        failures=tuple(_failures(failed)),
        waiting=sum(rollout.state == RolloutState.WAITING for rollout in counting),
        again=dict(
            Counter(rollout.ending for rollout in record.rollouts if rollout.id not in places and _has_failed(rollout))
        ),
        rewards=_spreads({name: [rollout.rewards.get(name) for rollout in graded] for name in names}),
        counts=_spreads({name: [of(rollout) for rollout in graded] for name, of in counts.items()}),
        seconds=_spreads({phase: [rollout.seconds.get(phase) for rollout in graded] for phase in PHASES}),
        worst=tuple(sorted((summary for summary in summaries if _is_bad(summary)), key=_badness)[:listed]),
        slowest=tuple(sorted(summaries, key=lambda one: -one.seconds)[:listed]),
        unreadable=record.torn,
        unasked=sum(rollout.index >= size for rollout in record.rollouts),
    )


def has_passed(rollout: RolloutSummary, success: float) -> bool:
    """Say whether a rollout is solved; one without a score is not."""
    return rollout.score is not None and rollout.score >= success


def chosen(
    record: RunRecord,
    success: float,
    *,
    failed: bool = False,
    ending: str | None = None,
    tool: str | None = None,
    sort: Sort = "number",
) -> list[RolloutSummary]:
    """Return the rollouts that are asked for, attempts that were played again included where they are failures.

    Args:
        record: the run.
        success: score from which a rollout passes.
        failed: only those that do not pass, or have no score; those that nobody graded first, then the lowest scores.
        ending: only those that ended so.
        tool: only those that called this tool.
        sort: by what; where `failed`, by score unless another is asked for.
    """
    rollouts_chosen = [
        rollout
        for rollout in record.rollouts
        if (not failed or (not has_passed(rollout, success) and rollout.state != RolloutState.LEFT_OUT))
        and ending in (None, rollout.ending)
        and (tool is None or any(tool == name for name, _, _ in rollout.tools))
    ]
    keys: dict[Sort, Callable[[RolloutSummary], float]] = {
        "score": lambda one: -1e300 if one.score is None else one.score,
        "turns": lambda one: -one.turns,
        "tokens": lambda one: -one.completion_tokens,
        "seconds": lambda one: -one.seconds.get("total", 0.0),
        "errors": lambda one: -one.call_errors,
    }
    wanted: Sort = "score" if failed and sort == "number" else sort
    return rollouts_chosen if wanted == "number" else sorted(rollouts_chosen, key=keys[wanted])


def weights_of(described: Mapping[str, Any]) -> dict[str, float | None]:
    """Return what each reward counts in the score, by the `run.json` of a run; None for a gate."""
    scoring = (described.get("grading") or {}).get("scoring") or {}
    return {one["name"]: None if one.get("gate") else one.get("weight") for one in scoring.get("weightings") or ()}


def why(line: Mapping[str, Any], weights: Mapping[str, float | None], success: float) -> Iterator[str]:
    """Yield why a rollout did not pass, the most likely reason first; nothing where it did."""
    ending = Ending(line["ending"])
    if line["score"] is None:
        whose = "the policy's doing" if ending.graded else "not the policy's doing, so it is no 0"
        yield f"it has no score: {ending.rule.what} ({ending}; {whose})"
        if line["error"]:
            yield str(line["error"])
        return
    if line["score"] >= success:
        return
    for name, value in line["rewards"].items():
        weight = weights.get(name, 1.0)
        if weight == 0 or value["value"] is None or value["value"] >= 1.0 or (weight is not None and weight < 0):
            continue
        reason = f": {value['reason']}" if value.get("reason") else ""
        yield f"{name} gave {value['value']:.4g}{reason}"
    if not ending.finished_naturally:
        yield f"it ended before it was done: {ending.rule.what} ({ending})"
    if line["tool_errors"]:
        last = line["tool_errors"][-1]
        calls = len(line["tool_calls"])
        yield f"{len(line['tool_errors'])} of {calls} tool calls failed, the last: {last['tool_name']}: {last['error']}"


def looked_at(spec: Mapping[str, Any], columns: Iterable[str]) -> dict[str, list[str]]:
    """Return which rewards look at which columns of a row by name, as far as their arguments say."""
    names_by_form: dict[str, list[str]] = {}
    for name, reward in (spec.get("rewards") or {}).items():
        words = set(re.findall(r"\w+", " ".join(re.findall(r"\{[{%].*?[%}]\}", str((reward or {}).get("args")), re.S))))
        for column in columns:
            if column in words:
                names_by_form.setdefault(column, []).append(name)
    return names_by_form


def _has_failed(rollout: RolloutSummary) -> bool:
    return RolloutState(rollout.state).given_up


def _failures(failed: Sequence[RolloutSummary]) -> Iterator[FailureCause]:
    for ending, count in Counter(rollout.ending for rollout in failed).most_common():
        first = next(rollout for rollout in failed if rollout.ending == ending)
        yield FailureCause(ending, count, first.error, first.id)


def _spreads(values: Mapping[str, Iterable[float | None]]) -> dict[str, Spread]:
    return {name: found for name, given in values.items() if (found := Spread.of(given)) is not None}


def _row(key: str, rollouts: Sequence[RolloutSummary], success: float) -> RowSummary:
    scores = [rollout.score for rollout in rollouts if rollout.score is not None]
    worst = min(rollouts, key=lambda one: -1e300 if one.score is None else one.score)
    return RowSummary(
        row_key=key,
        score=mean(scores) if scores else None,
        passed=sum(score >= success for score in scores),
        graded=len(scores),
        ungraded=sum(map(_has_failed, rollouts)),
        seconds=mean([rollout.seconds.get("total", 0.0) for rollout in rollouts]),
        shown=worst.id,
    )


def _is_bad(row: RowSummary) -> bool:
    return row.passed < row.graded or row.ungraded > 0


def _badness(row: RowSummary) -> tuple[float, float, int]:
    return (row.passed / row.graded if row.graded else -1.0, row.score or 0.0, -row.ungraded)


def rule_of(ending: str) -> str:
    """Return what an ending means, in words."""
    return RULES[Ending(ending)].what
