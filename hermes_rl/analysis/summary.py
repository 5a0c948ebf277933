"""Summary of a run, selection of its rollouts, and the reasons why one of them failed.

All numbers are over the rollouts that count, one for each place (`RunRecord.counting`); attempts that were retried
after infrastructure failures are reported separately.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hermes_rl.agent.result import ProgramRun
from hermes_rl.analysis.compare import MEASURES
from hermes_rl.analysis.record import RolloutSummary, RunRecord, by_row, scores_of
from hermes_rl.analysis.settings import model_of, spec_of, success_of
from hermes_rl.analysis.statistics import Interval
from hermes_rl.rollouts.rollout import RolloutState, never_asked
from hermes_rl.runs.statistics import mean
from hermes_rl.stop_reasons import StopReason, stop_reason_named

MAX_ROWS_NAMED = 5
"""Maximum number of rows that are named as worst, and as slowest."""
PHASES = ("queue", "sandbox", "generation", "tools", "rewards", "total")
"""Phases of a rollout's time, in their order."""
Sort = Literal["number", "score", "turns", "tokens", "seconds", "errors"]
SORTS: tuple[Sort, ...] = get_args(Sort)
KEYS: Mapping[Sort, Callable[[RolloutSummary], float]] = {
    "score": lambda rollout: -1e300 if rollout.score is None else rollout.score,
    "turns": lambda rollout: -rollout.turns,
    "tokens": lambda rollout: -rollout.completion_tokens,
    "seconds": lambda rollout: -rollout.total_seconds,
    "errors": lambda rollout: -rollout.call_errors,
}
"""Sort keys of rollouts: the lowest score first, else the largest value."""
COUNTS = {
    "turns": "turns",
    "prompt tokens": "prompt_tokens",
    "completion tokens": "completion_tokens",
    "cost in $": "cost",
    "tool calls": "tool_calls",
    "tool errors": "tool_errors",
}
"""Quantities reported per rollout, and their names in a comparison of runs."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity over the rollouts that have it."""

    mean: float
    least: float
    most: float
    count: int

    @classmethod
    def from_values(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the spread, or None if no rollout has the quantity."""
        present_values = [value for value in values if value is not None]
        return (
            cls(mean(present_values), min(present_values), max(present_values), len(present_values))
            if present_values
            else None
        )


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Cause of ungraded rollouts: their stop reason, their number, and the message of the first of them."""

    stop_reason: str
    count: int
    error: str | None
    id: str


@dataclass(frozen=True, slots=True)
class RowSummary:
    """A row with the mean of its scores, or None if it has none, and the mean of its seconds."""

    row_key: str
    score: float | None
    passed: int
    graded: int
    ungraded: int
    seconds: float
    shown: str
    """Id of its worst rollout."""


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run; rollouts are the ones that count, one for each place.

    Attributes:
        name: name of the spec.
        demo: True if the scripted policy ran without model, network and containers.
        success: score from which a rollout passes.
        rows: number of started rows; likewise `groups`.
        excluded: number of rollouts that the spec's `on_stop` excludes.
        waiting: number of rollouts that wait for a reward that compares them with their group.
        score: mean, lowest and highest score, or None if nothing is graded.
        failures: reasons why others have no score, the most frequent first.
        again: attempts that were retried after infrastructure failures, by stop reason.
        fallbacks: groups that the fallback of a reward graded, by the reward.
        counts: turns, tokens, cost if servers report it, tool calls and their errors, per rollout.
        seconds: seconds by phase, per rollout.
        seats: means of each seat's `score`, `reward/NAME`, `turns` and `completion_tokens`, if there are several
            agents; all other numbers are the first seat's.
        unreadable: records that cannot be read.
        unasked: rollouts beyond the number that the last start requested for each row; they do not count.
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
    excluded: int
    waiting: int
    score: Spread | None
    interval: Interval
    stop_reasons: Mapping[str, int]
    failures: tuple[FailureCause, ...]
    again: Mapping[str, int]
    rewards: Mapping[str, Spread]
    fallbacks: Mapping[str, int]
    counts: Mapping[str, Spread]
    seconds: Mapping[str, Spread]
    seats: Mapping[str, Mapping[str, float | None]]
    worst: tuple[RowSummary, ...]
    slowest: tuple[RowSummary, ...]
    unreadable: int
    unasked: int


def summarise(record: RunRecord) -> RunSummary:
    """Return the summary of a loaded run; raises UserError if run.json or spec.yaml cannot be read."""
    run_info, success = record.run_info, success_of(spec_of(record))
    size = record.group_size
    counting = list(record.counting())
    graded = [rollout for rollout in counting if rollout.score is not None]
    failed, counting_ids = [rollout for rollout in counting if rollout.given_up], {rollout.id for rollout in counting}
    rows = by_row(counting)
    summaries = []
    for key, rollouts in rows.items():
        scores = scores_of(rollouts)
        summaries.append(
            RowSummary(
                row_key=key,
                score=mean(scores) if scores else None,
                passed=sum(score >= success for score in scores),
                graded=len(scores),
                ungraded=sum(rollout.given_up for rollout in rollouts),
                seconds=mean([rollout.total_seconds for rollout in rollouts]),
                shown=min(rollouts, key=KEYS["score"]).id,
            )
        )
    bad = [row for row in summaries if row.passed < row.graded or row.ungraded]
    bad.sort(key=lambda row: (row.passed / row.graded if row.graded else -1.0, row.score or 0.0, -row.ungraded))
    causes = Counter(rollout.stop_reason for rollout in failed).most_common()
    first = {rollout.stop_reason: rollout for rollout in reversed(failed)}
    names = dict.fromkeys(name for rollout in graded for name in rollout.rewards)

    def spreads(quantities: Mapping[str, Callable[[RolloutSummary], float | None]]) -> dict[str, Spread]:
        spread = {name: Spread.from_values(map(quantity, graded)) for name, quantity in quantities.items()}
        return {name: quantity_spread for name, quantity_spread in spread.items() if quantity_spread is not None}

    return RunSummary(
        path=str(record.path),
        name=str(run_info.get("name") or "?"),
        mode=str(run_info.get("mode") or "?"),
        demo=bool(run_info.get("demo")),
        model=model_of(run_info),
        started=str(run_info.get("started") or "?"),
        success=success,
        rows=len(rows),
        groups=len({rollout.group for rollout in counting}),
        rollouts=len(counting),
        graded=len(graded),
        passed=sum(rollout.passes(success) for rollout in graded),
        excluded=sum(rollout.state == RolloutState.EXCLUDED for rollout in counting),
        score=Spread.from_values(rollout.score for rollout in graded),
        interval=Interval.from_rollouts(graded),
        stop_reasons=dict(Counter(rollout.stop_reason for rollout in counting).most_common()),
        failures=tuple(
            FailureCause(stop_reason, count, first[stop_reason].error, first[stop_reason].id)
            for stop_reason, count in causes
        ),
        waiting=sum(rollout.state == RolloutState.WAITING for rollout in counting),
        again=dict(
            Counter(each.stop_reason for each in record.rollouts if each.id not in counting_ids and each.given_up)
        ),
        rewards=spreads({name: lambda rollout, name=name: rollout.rewards.get(name) for name in names}),  # type: ignore[misc]
        fallbacks=dict(
            Counter(name for name, _ in {(name, each.group) for each in counting for name in each.fallbacks})
        ),
        counts=spreads({label: MEASURES[name] for label, name in COUNTS.items()}),
        seconds=spreads({phase: lambda rollout, phase=phase: rollout.seconds.get(phase) for phase in PHASES}),  # type: ignore[misc]
        seats=_seat_means(record, counting),
        worst=tuple(bad[:MAX_ROWS_NAMED]),
        slowest=tuple(sorted(summaries, key=lambda row: -row.seconds)[:MAX_ROWS_NAMED]),
        unreadable=record.torn,
        unasked=sum(rollout.index >= size for rollout in record.rollouts),
    )


def _seat_means(record: RunRecord, first: Iterable[RolloutSummary]) -> dict[str, dict[str, float | None]]:
    """Return the means of each seat's score, rewards, turns and sampled tokens, starting with the `first` seat."""
    seats: dict[str, list[RolloutSummary]] = {rollout.seat: [] for rollout in first if rollout.seat}
    for rollout in record.counting(every_seat=True) if seats else ():
        if not rollout.given_up:
            seats.setdefault(rollout.seat, []).append(rollout)
    names = dict.fromkeys(name for rollouts in seats.values() for rollout in rollouts for name in rollout.rewards)
    quantities: dict[str, Callable[[RolloutSummary], float | None]] = {"score": lambda rollout: rollout.score}
    quantities |= {f"reward/{name}": lambda rollout, name=name: rollout.rewards.get(name) for name in names}  # type: ignore[misc]
    quantities |= {name: MEASURES[name] for name in ("turns", "completion_tokens")}
    means: dict[str, dict[str, float | None]] = {}
    for seat, rollouts in seats.items():
        spreads = {name: Spread.from_values(map(quantity, rollouts)) for name, quantity in quantities.items()}
        means[seat] = {name: None if spread is None else spread.mean for name, spread in spreads.items()}
    return means


def select_rollouts(
    record: RunRecord,
    success: float,
    *,
    failed: bool = False,
    stop_reason: str | None = None,
    tool: str | None = None,
    sort: Sort = "number",
) -> list[RolloutSummary]:
    """Return the requested rollouts; with `failed`, retried attempts are included.

    Args:
        success: score from which a rollout passes.
        failed: only rollouts that do not pass, or have no score; ungraded ones first, then the lowest scores.
        stop_reason: only rollouts with this stop reason.
        tool: only rollouts that called this tool.
        sort: sort key; with `failed`, the score unless another is given.
    """
    rollouts = [
        rollout
        for rollout in record.rollouts
        if (not failed or rollout.failed(success))
        and stop_reason in (None, rollout.stop_reason)
        and (tool is None or any(tool == name for name, _, _ in rollout.tools))
    ]
    sort_key: Sort = "score" if failed and sort == "number" else sort
    return rollouts if sort_key == "number" else sorted(rollouts, key=KEYS[sort_key])


def failure_reasons(line: Mapping[str, Any], weights: Mapping[str, float | None], success: float) -> Iterator[str]:
    """Yield the reasons why a rollout did not pass, the most likely first; nothing if it passed."""
    stop_reason = stop_reason_named(line["stop_reason"])
    if line["score"] is None:
        if stop_reason is None:
            yield f"it has no score: {line['stop_reason']}"
        else:
            cause = (
                "caused by the policy" if stop_reason.graded else "not caused by the policy, so it does not count as 0"
            )
            yield f"it has no score: {stop_reason.rule.description} ({stop_reason}; {cause})"
        if line["error"]:
            yield str(line["error"])
        return
    if line["score"] >= success:
        return
    if "program" in line and not line["program"]["calls"]:
        yield never_asked(ProgramRun(**line["program"]))
    for name, value in line["rewards"].items():
        weight = weights.get(name, 1.0)
        if weight == 0 or value["value"] is None or value["value"] >= 1.0 or (weight is not None and weight < 0):
            continue
        reason = f": {value['reason']}" if value.get("reason") else ""
        yield f"{name} gave {value['value']:.4g}{reason}"
    yield from () if stop_reason is None else _too_early(line, stop_reason)
    if line["tool_errors"]:
        last = line["tool_errors"][-1]
        calls = len(line["tool_calls"])
        yield f"{len(line['tool_errors'])} of {calls} tool calls failed, the last: {last['tool_name']}: {last['error']}"


def _too_early(line: Mapping[str, Any], stop_reason: StopReason) -> Iterator[str]:
    """Yield the stop reason of a rollout that did not finish."""
    program = line.get("program")
    if program is None or stop_reason is not StopReason.PROGRAM_ABORTED:
        if not stop_reason.finished_naturally:
            yield f"it ended before it was done: {stop_reason.rule.description} ({stop_reason})"
    elif program["calls"]:
        refusal = program.get("refusal")
        refused = f"; the last request that was refused: {refusal}" if refusal else ""
        yield f"its agent program aborted with status {program['exit_code']}{refused}"


def columns_read(spec: Mapping[str, Any], columns: Iterable[str]) -> dict[str, list[str]]:
    """Return which rewards read which columns of a row by name, as far as their arguments show it."""
    rewards: dict[str, list[str]] = {}
    for name, reward in (spec.get("rewards") or {}).items():
        template_words = set(
            re.findall(r"\w+", " ".join(re.findall(r"\{[{%].*?[%}]\}", str((reward or {}).get("args")), re.S)))
        )
        for column in columns:
            if column in template_words:
                rewards.setdefault(column, []).append(name)
    return rewards
