"""The table of a set: its run directories side by side, models and settings as rows, specs as columns.

Every spec weighs the same in the mean over the specs, however many rows it has. Its interval, like that of a difference
between two players, is put together from those of the specs by the method of variance estimates recovery (Zou and
Donner, 2008): the distances from the means to their ends add up as standard errors do. With one spec it is that spec's
own interval. Players are compared pairwise, row by row (`hermes_rl.runs.statistics.paired`). Each of `n` players is in
`n - 1` comparisons, so these have a confidence of 1 - 0.05 / (n - 1) each, and the interval of a player's rank holds
the true rank in 95 of 100 sets (Bonferroni).

It is pure: it reads run directories, and plays and writes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hermes_rl.reading.compare import by_row
from hermes_rl.reading.record import RolloutSummary, RunRecord
from hermes_rl.reading.settings import contrast, model_of, spec_of, success_of
from hermes_rl.reading.statistics import Interval
from hermes_rl.rollouts.rollout import RolloutState
from hermes_rl.runs.statistics import CONFIDENCE, clustered_stderr, mean, paired
from hermes_rl.spec.suggest import choices

NOT_PLAYED = "not played yet"


@dataclass(frozen=True)
class SetRun:
    """A run of a set: where it lies, and why it does not count; None where it is complete."""

    spec: str
    model: str
    setting: str
    path: Path
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval; None where it cannot be told."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def over(cls, parts: Sequence[Estimate]) -> Estimate:
        """Return the mean of independent estimates, each of which weighs the same."""
        centre = mean([part.value for part in parts])
        below = [None if part.low is None else part.value - part.low for part in parts]
        above = [None if part.high is None else part.high - part.value for part in parts]
        low, high = _together(below), _together(above)
        return cls(centre, None if low is None else centre - low, None if high is None else centre + high)


def _together(errors: Sequence[float | None]) -> float | None:
    known = [error for error in errors if error is not None]
    return math.sqrt(math.fsum(one * one for one in known)) / len(errors) if len(known) == len(errors) else None


@dataclass(frozen=True)
class Cell:
    """A run in the table.

    Attributes:
        spec: its name in the set.
        path: of the run directory.
        problem: why it does not count; None where it is complete.
        policy: who played, as run.json says.
        score: mean score of the graded rollouts; None where there are none.
        stderr: of the score, clustered by row; None with fewer than two rows.
        pass_at_1: chance that a rollout passes, over the rows all of whose rollouts are graded; None without any.
        rows: how many were played.
        rollouts: how many count, those that the spec leaves out aside.
        ungraded: how many of these have no score.
        prompt_tokens: of all attempts together.
        completion_tokens: likewise.
        seconds: of a graded rollout on average; None without any.
        cost: of all attempts together in US dollars; None where no server tells.
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
        model: its name in the set.
        setting: likewise; empty where the set has none.
        cells: one for each spec of the set, in its order.
        score: the mean over the specs; None where a run is missing.
        stderr: of it.
        pass_at_1: the mean over the specs.
        rank: 1 and how many have a higher mean; None where it is not ranked.
        ranks: the first and the last rank that it may have; None likewise.
        behind: its score minus that of the first, over the rows that both graded; None for the first itself.
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
        """What people call it."""
        return f"{self.model} {self.setting}".rstrip()

    @property
    def complete(self) -> bool:
        """True where all of its runs count."""
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
    """All that a set shows.

    Attributes:
        name: of the set.
        specs: the columns.
        players: the rows, the best first; those that are not ranked last.
        by: for each column of the rows that was asked for, the parts.
        notes: what keeps scores from being compared, and what was not found.
    """

    name: str
    specs: tuple[str, ...]
    players: tuple[Standing, ...]
    by: Mapping[str, tuple[Breakdown, ...]]
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def set_table(name: str, runs: Sequence[SetRun], by: Sequence[str] = ()) -> SetTable:
    """Read the runs of a set and put them side by side.

    Args:
        name: of the set.
        runs: every combination, played or not.
        by: columns of the rows by whose values scores are told as well.

    Raises:
        UserError: a file of a run cannot be read.
    """
    specs = tuple(dict.fromkeys(run.spec for run in runs))
    read = {(run.spec, run.model, run.setting): _Read.of(run, with_rows=bool(by)) for run in runs}
    names = dict.fromkeys((run.model, run.setting) for run in runs)
    runs_of = {name: [read[spec, *name] for spec in specs] for name in names}
    players = {name: _player(*name, [own.cell for own in runs_of[name]]) for name in names}
    complete = [name for name in names if players[name].complete]
    notes = [note for number in range(len(specs)) for note in _differing([runs_of[one][number] for one in complete])]
    if not any(note.refused for note in notes):
        players |= _ranked({one: players[one] for one in complete}, runs_of)
    order = sorted(names, key=lambda one: (players[one].rank is None, players[one].rank or 0))
    told = {column: tuple(_parts(column, specs, [runs_of[one] for one in order])) for column in by}
    missing = [_no_column(column, runs_of) for column, parts in told.items() if not parts and complete]
    return SetTable(name, specs, tuple(players[one] for one in order), told, (*(note.text for note in notes), *missing))


# ---------------------------------------------------------------------------------------------- Reading a run


@dataclass
class _Read:
    """A run as it was read: its cell, its scores by row, and the rows where they are asked for."""

    run: SetRun
    cell: Cell
    record: RunRecord | None = None
    rows: Mapping[str, Sequence[RolloutSummary]] = field(default_factory=dict)
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)
    columns: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    span: tuple[float, float] = (0.0, 1.0)

    @classmethod
    def of(cls, run: SetRun, *, with_rows: bool) -> _Read:
        if not (run.path / "run.json").is_file():
            return cls(run, Cell(run.spec, str(run.path), run.problem or NOT_PLAYED))
        record = RunRecord(run.path)
        record.refresh()
        spec, described, counting = spec_of(record), record.described, list(record.counting())
        rows = by_row(counting)
        scores = {key: [one.score for one in row if one.score is not None] for key, row in rows.items()}
        graded = [rollout for rollout in counting if rollout.score is not None]
        kept = [rollout for rollout in counting if rollout.state != RolloutState.LEFT_OUT]
        costs = [rollout.cost for rollout in record.rollouts if rollout.cost is not None]
        clamp = ((described.get("grading") or {}).get("scoring") or {}).get("clamp") or (0.0, 1.0)
        cell = Cell(
            spec=run.spec,
            path=str(run.path),
            problem=run.problem if graded or run.problem else "nothing was graded",
            policy=model_of(described),
            score=_score(graded),
            stderr=clustered_stderr(list(scores.values())),
            pass_at_1=_pass_at_1(scores, success_of(spec), int((spec.get("evaluate") or {}).get("rollouts", 1))),
            rows=len(rows),
            rollouts=len(kept),
            ungraded=sum(one.score is None for one in kept),
            prompt_tokens=sum(rollout.prompt_tokens for rollout in record.rollouts),
            completion_tokens=sum(rollout.completion_tokens for rollout in record.rollouts),
            seconds=mean([rollout.seconds.get("total", 0.0) for rollout in graded]) if graded else None,
            cost=math.fsum(costs) if costs else None,
        )
        columns = record.columns() if with_rows else {}
        return cls(run, cell, record, rows, scores, columns, (float(clamp[0]), float(clamp[1])))


def _score(graded: Sequence[RolloutSummary]) -> Estimate | None:
    interval = Interval.of(graded)
    return None if interval.mean is None else Estimate(interval.mean, interval.low, interval.high)


def _pass_at_1(scores: Mapping[str, Sequence[float]], success: float, size: int) -> float | None:
    shares = [mean([float(one >= success) for one in row]) for row in scores.values() if len(row) == size]
    return mean(shares) if shares else None


# ---------------------------------------------------------------------------------------------- Comparing players


@dataclass(frozen=True)
class _Note:
    text: str
    refused: bool = False


def _differing(runs: Sequence[_Read]) -> list[_Note]:
    """Return what keeps the runs of one spec from being compared with the first of them."""
    notes = []
    first = runs[0] if runs else None
    for other in runs[1:]:
        assert first is not None and first.record is not None and other.record is not None
        pair = f"{first.run.spec}: {_called(first.run)} and {_called(other.run)}"
        if refusals := contrast(first.record, other.record).refusals:
            said = (
                refusals[0].replace(" in A", f" in the first ({_called(first.run)})").replace(" in B", " in the other")
            )
            notes.append(_Note(f"{pair} are graded differently, so that nothing is ranked: {said}", refused=True))
        common = [key for key in first.rows if key in other.rows]
        if len(common) < max(len(first.rows), len(other.rows)):
            notes.append(_Note(f"{pair} have {len(common)} rows in common, of {len(first.rows)} and {len(other.rows)}"))
        changed = sum(first.rows[key][0].row_digest != other.rows[key][0].row_digest for key in common)
        if changed:
            notes.append(_Note(f"{pair} have rows with the same key and other content: {changed}"))
    return notes


def _called(run: SetRun) -> str:
    return f"{run.model} {run.setting}".rstrip()


def _player(model: str, setting: str, cells: Sequence[Cell]) -> Standing:
    made = Standing(model, setting, tuple(cells))
    scores = [cell.score for cell in cells if cell.score is not None]
    if not made.complete or len(scores) < len(cells):
        return made
    passed = [cell.pass_at_1 for cell in cells if cell.pass_at_1 is not None]
    return replace(
        made,
        score=Estimate.over(scores),
        stderr=_together([cell.stderr for cell in cells]),
        pass_at_1=mean(passed) if len(passed) == len(cells) else None,
    )


Names = tuple[str, str]


def _ranked(players: Mapping[Names, Standing], runs_of: Mapping[Names, Sequence[_Read]]) -> dict[Names, Standing]:
    """Return the players with their ranks, and how far they are behind the first."""
    names = sorted(players, key=lambda one: -_value(players[one]))
    others = len(names) - 1
    confidence = 1.0 - (1.0 - CONFIDENCE) / max(others, 1)
    gaps: dict[tuple[Names, Names], Estimate | None] = {}
    for place, better in enumerate(names):
        for worse in names[place + 1 :]:
            gaps[better, worse] = _difference(runs_of[better], runs_of[worse], confidence)
    ranked = {}
    for name in names:
        above = sum(_beyond_chance(gaps, other, name) for other in names)
        below = sum(_beyond_chance(gaps, name, other) for other in names)
        higher = sum(_value(players[other]) > _value(players[name]) + 1e-12 for other in names)
        ranked[name] = replace(
            players[name],
            rank=1 + higher,
            ranks=(1 + above, len(names) - below),
            behind=gaps[names[0], name] if name != names[0] else None,
        )
    return ranked


def _value(player: Standing) -> float:
    assert player.score is not None, "all runs of who is ranked are complete"
    return player.score.value


def _difference(a: Sequence[_Read], b: Sequence[_Read], confidence: float) -> Estimate | None:
    """Return the mean over the specs of B's score minus A's; None where they have no graded row of a spec in common."""
    parts = []
    for before, after in zip(a, b, strict=True):
        known = [value for one in (before, after) for row in one.scores.values() for value in row]
        span = min(before.span[0], *known), max(before.span[1], *known)
        difference = paired("score", before.scores, after.scores, span, confidence)
        if difference is None:
            return None
        parts.append(Estimate(difference.difference, difference.low, difference.high))
    return Estimate.over(parts)


def _beyond_chance(gaps: Mapping[tuple[Names, Names], Estimate | None], better: Names, worse: Names) -> bool:
    """Say whether one scores more than another beyond chance."""
    if (gap := gaps.get((better, worse))) is not None:
        return gap.high is not None and gap.high < 0
    gap = gaps.get((worse, better))
    return gap is not None and gap.low is not None and gap.low > 0


# ---------------------------------------------------------------------------------------------- Parts of the rows


def _parts(column: str, specs: Sequence[str], players: Sequence[Sequence[_Read]]) -> list[Breakdown]:
    parts = []
    for number, spec in enumerate(specs):
        runs = [player[number] for player in players]
        rows: dict[str, dict[str, None]] = {}
        for run in runs:
            for key, columns in run.columns.items():
                if column in columns:
                    rows.setdefault(_text(columns[column]), {})[key] = None
        for value in sorted(rows, key=_in_order):
            keys = rows[value]
            scores = tuple(
                _score([one for key in keys for one in run.rows.get(key, ()) if one.score is not None])
                if run.cell.problem is None
                else None
                for run in runs
            )
            parts.append(Breakdown(spec, value, len(keys), scores))
    return parts


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _in_order(value: str) -> tuple[bool, float, str]:
    """Numbers by size, before all else; nan is none, as it is neither more nor less than another."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    return (True, 0.0, value) if math.isnan(number) else (False, number, value)


def _no_column(column: str, runs_of: Mapping[Names, Sequence[_Read]]) -> str:
    known = dict.fromkeys(
        name for player in runs_of.values() for run in player for row in run.columns.values() for name in row
    )
    return f"by: no row has a column `{column}`{choices(column, known)}"
