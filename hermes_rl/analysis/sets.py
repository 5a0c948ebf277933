"""The table of a set: its run directories side by side, models and settings as rows, specs as columns.

Every spec has the same weight in the mean over the specs, however many rows it has. Its interval, like the interval of
a difference between two players, is combined from the intervals of the specs by the method of variance estimates
recovery (Zou and Donner, 2008): the distances from the means to their ends add up as standard errors do. With one spec
it is the interval of that spec. Players (models with their settings) are compared pairwise, row by row
(`hermes_rl.runs.statistics.paired`). Each of `n` players is in `n - 1` comparisons, so these have a confidence of 1 -
0.05 / (n - 1) each, and the interval of a player's rank contains the true rank in 95 of 100 sets (Bonferroni).

The module is pure: it reads run directories, runs no rollout and writes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hermes_rl.analysis.record import RolloutSummary, RunRecord, by_row, scores_of
from hermes_rl.analysis.settings import contrast, model_of, span_of, spec_of, success_of
from hermes_rl.analysis.statistics import Interval
from hermes_rl.rollouts.rollout import RolloutState
from hermes_rl.runs.statistics import CONFIDENCE, clustered_stderr, mean, paired
from hermes_rl.servers.base import POLICY
from hermes_rl.servers.usage import Usage
from hermes_rl.spec.suggest import choices

NOT_PLAYED = "not run yet"


@dataclass(frozen=True)
class SetRun:
    """A run of a set: its directory, and why it does not count, or None if it is complete."""

    spec: str
    model: str
    setting: str
    path: Path
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval, or None if it is unknown."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def mean_of(cls, parts: Sequence[Estimate]) -> Estimate:
        """Return the mean of independent estimates with equal weights."""
        centre = mean([part.value for part in parts])
        below = [None if part.low is None else part.value - part.low for part in parts]
        above = [None if part.high is None else part.high - part.value for part in parts]
        low, high = _combined_error(below), _combined_error(above)
        return cls(centre, None if low is None else centre - low, None if high is None else centre + high)


def _combined_error(errors: Sequence[float | None]) -> float | None:
    values = [error for error in errors if error is not None]
    return math.sqrt(math.fsum(error * error for error in values)) / len(errors) if len(values) == len(errors) else None


@dataclass(frozen=True)
class Cell:
    """A run in the table.

    Attributes:
        problem: why it does not count, or None if it is complete.
        policy: the policy, from run.json.
        score: mean score of the graded rollouts, or None if there are none.
        stderr: standard error of the score, clustered by row; None with fewer than two rows.
        pass_at_1: chance that a rollout passes, over the rows all of whose rollouts are graded; None without any.
        rollouts: number of rollouts that count, without the ones that the spec excludes; `ungraded` of these have no
            score.
        prompt_tokens: the policy's, of all calls of the run, as `completion_tokens`.
        seconds: mean seconds of a graded rollout; None without any.
        cost: US dollars of all models; None if the cost of a call is not known.
    """

    spec: str
    path: str
    problem: str | None
    policy: str = "?"
    score: Estimate | None = None
    stderr: float | None = None
    pass_at_1: float | None = None
    rows: int = 0
    rollouts: int = 0
    ungraded: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float | None = None
    cost: float | None = None


@dataclass(frozen=True)
class Standing:
    """A model with a setting: a row of the table.

    Attributes:
        setting: empty if the set has none.
        cells: one for each spec of the set, in its order.
        score: the mean over the specs, as `pass_at_1`, or None if a run is missing.
        rank: 1 plus the number of players with a higher mean, or None if it is not ranked.
        ranks: the first and the last rank that it may have; None likewise.
        behind: its score minus the score of the first, over the rows that both graded; None for the first itself.
    """

    model: str
    setting: str
    cells: tuple[Cell, ...]
    score: Estimate | None = None
    stderr: float | None = None
    pass_at_1: float | None = None
    rank: int | None = None
    ranks: tuple[int, int] | None = None
    behind: Estimate | None = None

    @property
    def label(self) -> str:
        """Name for messages and tables."""
        return f"{self.model} {self.setting}".rstrip()

    @property
    def complete(self) -> bool:
        """True if all of its runs count."""
        return all(cell.problem is None for cell in self.cells)


@dataclass(frozen=True)
class Breakdown:
    """The rows of a spec that have a value in a column, with the score of each player there, in the players' order."""

    spec: str
    value: str
    rows: int
    scores: tuple[Estimate | None, ...]


@dataclass(frozen=True)
class SetTable:
    """Content of a set's table: `specs` are the columns, `players` the rows, the best first, unranked ones last.

    `by` has the parts for each requested column of the rows, and `notes` the reasons why scores cannot be compared, and
    missing values.
    """

    name: str
    specs: tuple[str, ...]
    players: tuple[Standing, ...]
    by: Mapping[str, tuple[Breakdown, ...]]
    notes: tuple[str, ...]


def set_table(name: str, runs: Sequence[SetRun], by: Sequence[str] = ()) -> SetTable:
    """Read the runs of a set, finished or not, and put them side by side, also by the values of the columns `by`."""
    specs = tuple(dict.fromkeys(run.spec for run in runs))
    read = {(run.spec, run.model, run.setting): _Read.from_run(run, with_rows=bool(by)) for run in runs}
    names = dict.fromkeys((run.model, run.setting) for run in runs)
    runs_of = {name: [read[spec, *name] for spec in specs] for name in names}
    players = {name: _standing(*name, [run.cell for run in runs_of[name]]) for name in names}
    complete = [name for name in names if players[name].complete]
    refusals, notes = _setting_differences([[runs_of[name][index] for name in complete] for index in range(len(specs))])
    if not refusals:
        players |= _rank({name: players[name] for name in complete}, runs_of)
    order = sorted(names, key=lambda name: (players[name].rank is None, players[name].rank or 0))
    parts = {column: tuple(_breakdowns(column, specs, [runs_of[name] for name in order])) for column in by}
    columns = {name for run in read.values() for row in run.columns.values() for name in row}
    for column in by:
        if complete and not parts[column]:
            notes.append(f"by: no row has a column `{column}`{choices(column, sorted(columns))}")
    return SetTable(name, specs, tuple(players[name] for name in order), parts, (*refusals, *notes))


# ---------------------------------------------------------------------------------------------- Reading a run


@dataclass
class _Read:
    """A loaded run: its cell, its scores by row, and the rows if they are requested."""

    run: SetRun
    cell: Cell
    record: RunRecord | None = None
    rows: Mapping[str, Sequence[RolloutSummary]] = field(default_factory=dict)
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)
    columns: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    span: tuple[float, float] = (0.0, 1.0)

    @property
    def label(self) -> str:
        """Name of the player for messages and tables."""
        return f"{self.run.model} {self.run.setting}".rstrip()

    @classmethod
    def from_run(cls, run: SetRun, *, with_rows: bool) -> _Read:
        if not (run.path / "run.json").is_file():
            return cls(run, Cell(run.spec, str(run.path), run.problem or NOT_PLAYED))
        record = RunRecord(run.path)
        record.refresh()
        spec, run_info, counting = spec_of(record), record.run_info, list(record.counting())
        rows = by_row(counting)
        scores = {key: scores_of(row) for key, row in rows.items()}
        graded = [rollout for rollout in counting if rollout.score is not None]
        count = sum(rollout.state != RolloutState.EXCLUDED for rollout in counting)
        used = record.usage
        policy = used.get(POLICY, Usage())
        costs = [usage.cost for usage in used.values()]
        success = success_of(spec)
        shares = [mean([score >= success for score in row]) for row in scores.values() if row]
        cell = Cell(
            spec=run.spec,
            path=str(run.path),
            problem=run.problem if graded or run.problem else "nothing was graded",
            policy=model_of(run_info),
            score=_estimate(graded),
            stderr=clustered_stderr(list(scores.values())),
            pass_at_1=mean(shares) if shares else None,
            rows=len(rows),
            rollouts=count,
            ungraded=count - len(graded),
            prompt_tokens=policy.prompt_tokens,
            completion_tokens=policy.completion_tokens,
            seconds=mean([rollout.total_seconds for rollout in graded]) if graded else None,
            cost=None if None in costs else math.fsum(cost for cost in costs if cost is not None),
        )
        return cls(run, cell, record, rows, scores, record.columns() if with_rows else {}, span_of(run_info))


def _estimate(rollouts: Sequence[RolloutSummary]) -> Estimate | None:
    interval = Interval.from_rollouts(rollouts)
    return None if interval.mean is None else Estimate(interval.mean, interval.low, interval.high)


# ---------------------------------------------------------------------------------------------- Comparing players


def _setting_differences(specs: Sequence[Sequence[_Read]]) -> tuple[list[str], list[str]]:
    """Return the reasons why runs of a spec cannot be compared with the first of them, and other differences."""
    refusals, notes = [], []
    for first, other in ((runs[0], other) for runs in specs for other in runs[1:]):
        assert first.record is not None and other.record is not None
        pair = f"{first.run.spec}: {first.label} and {other.label}"
        if differing := contrast(first.record, other.record).refusals:
            how = differing[0].replace(" in A", f" in the first ({first.label})").replace(" in B", " in the other")
            refusals.append(f"{pair} are graded differently, so that nothing is ranked: {how}")
        common = [key for key in first.rows if key in other.rows]
        if len(common) < max(len(first.rows), len(other.rows)):
            notes.append(f"{pair} have {len(common)} rows in common, of {len(first.rows)} and {len(other.rows)}")
        changed = sum(first.rows[key][0].row_digest != other.rows[key][0].row_digest for key in common)
        if changed:
            notes.append(f"{pair} have rows with the same key and other content: {changed}")
    return refusals, notes


def _standing(model: str, setting: str, cells: Sequence[Cell]) -> Standing:
    player = Standing(model, setting, tuple(cells))
    scores = [cell.score for cell in cells if cell.score is not None]
    if not player.complete or len(scores) < len(cells):
        return player
    passed = [cell.pass_at_1 for cell in cells if cell.pass_at_1 is not None]
    return replace(
        player,
        score=Estimate.mean_of(scores),
        stderr=_combined_error([cell.stderr for cell in cells]),
        pass_at_1=mean(passed) if len(passed) == len(cells) else None,
    )


Names = tuple[str, str]


def _rank(players: Mapping[Names, Standing], runs_of: Mapping[Names, Sequence[_Read]]) -> dict[Names, Standing]:
    """Return the players with their ranks, and their distance to the first."""
    means = {name: player.score.value for name, player in players.items() if player.score is not None}
    names = sorted(players, key=lambda name: -means[name])
    confidence = 1.0 - (1.0 - CONFIDENCE) / max(len(names) - 1, 1)
    gaps: dict[tuple[Names, Names], Estimate | None] = {}
    for index, better in enumerate(names):
        for worse in names[index + 1 :]:
            gaps[better, worse] = _score_difference(runs_of[better], runs_of[worse], confidence)
    ranked = {}
    for name in names:
        above = sum(_beyond_chance(gaps, other, name) for other in names)
        below = sum(_beyond_chance(gaps, name, other) for other in names)
        higher = sum(means[other] > means[name] + 1e-12 for other in names)
        ranked[name] = replace(
            players[name],
            rank=1 + higher,
            ranks=(1 + above, len(names) - below),
            behind=gaps[names[0], name] if name != names[0] else None,
        )
    return ranked


def _score_difference(a: Sequence[_Read], b: Sequence[_Read], confidence: float) -> Estimate | None:
    """Return the mean over the specs of B's score minus A's, or None if they have no graded row of a spec in common."""
    parts = []
    for before, after in zip(a, b, strict=True):
        scores = [value for run in (before, after) for row in run.scores.values() for value in row]
        span = min(before.span[0], *scores), max(before.span[1], *scores)
        difference = paired("score", before.scores, after.scores, span, confidence)
        if difference is None:
            return None
        parts.append(Estimate(difference.difference, difference.low, difference.high))
    return Estimate.mean_of(parts)


def _beyond_chance(gaps: Mapping[tuple[Names, Names], Estimate | None], better: Names, worse: Names) -> bool:
    """Return True if one scores more than another beyond chance."""
    if (gap := gaps.get((better, worse))) is not None:
        return gap.high is not None and gap.high < 0
    gap = gaps.get((worse, better))
    return gap is not None and gap.low is not None and gap.low > 0


# ---------------------------------------------------------------------------------------------- Parts of the rows


def _breakdowns(column: str, specs: Sequence[str], players: Sequence[Sequence[_Read]]) -> Iterator[Breakdown]:
    for index, spec in enumerate(specs):
        runs = [player[index] for player in players]
        rows: dict[str, dict[str, None]] = {}
        for run in runs:
            for key, columns in run.columns.items():
                if column in columns:
                    value = columns[column]
                    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                    rows.setdefault(text, {})[key] = None
        for value in sorted(rows, key=_sort_key):
            scores = [
                None if run.cell.problem else _estimate([each for key in rows[value] for each in run.rows.get(key, ())])
                for run in runs
            ]
            yield Breakdown(spec, value, len(rows[value]), tuple(scores))


def _sort_key(value: str) -> tuple[bool, float, str]:
    """Return a sort key: numbers by size, before all else; nan does not count as a number, as it has no order."""
    try:
        numeric_value = float(value)
    except ValueError:
        numeric_value = math.nan
    return (True, 0.0, value) if math.isnan(numeric_value) else (False, numeric_value, value)
