"""Compare two runs over the same rows: their differences, and if these are more than chance.

Everything is paired by row. A row's value is the mean over its graded rollouts, and the difference of two runs is the
mean over rows of B's value minus A's. Rows are the random sample, so the interval is over the rows' differences:
rollouts of one row may depend on each other in any way (Miller, "Adding Error Bars to Evals", 2024, section 4.2). It
also contains the interval by permutation within rows (`hermes_rl.runs.statistics.paired`). If rows come in families
(questions of one template, tasks of one repository), families are the sample, and a column of the rows names the
family. Rollouts without a score are never 0: a row that is graded in one run only is excluded and counted, and bounds
show the possible difference if everything had been graded.

`compare` is pure and reads no files. `compare_runs` reads two run directories, with their settings from
`hermes_rl.analysis.settings`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

from hermes_rl.analysis.record import RolloutSummary, RunRecord, by_row
from hermes_rl.analysis.settings import contrast, model_of, span_of, spec_of, success_of
from hermes_rl.errors import UserError
from hermes_rl.rollouts.rollout import RolloutState
from hermes_rl.runs.statistics import Difference, mean, paired, sign_test
from hermes_rl.spec.suggest import choices

SHOWN = 16
"""Rollouts of a row of each run that are shown side by side."""

# ------------------------------------------------------------------------------------------------ Comparing runs


@dataclass(frozen=True, slots=True)
class ChangedRow:
    """A row that passes more often in one run than in the other.

    `a` and `b` are the numbers of passes in `of` rollouts of each run; `shown_a` and `shown_b` are ids of rollouts that
    show the change: for a broken row one of A that passed and one of B that did not, for a fixed row the reverse.
    """

    row_key: str
    a: int
    b: int
    of: int
    shown_a: str
    shown_b: str


@dataclass(frozen=True)
class Comparison:
    """Differences of B from A.

    Attributes:
        passes: the difference of the shares of rollouts that pass, whose score is at least `success`.
        p: p-value of `sign_test` over the fixed and broken rows.
        fixed: rows that pass more often in B, in descending change; `broken` ones less often.
        measures: the differences of rewards, turns, tokens, calls and seconds.
        rows: number of rows in both runs; `only_a` and `only_b` are in one of them.
        excluded: rows that both have and that are graded in one of them at most.
        ungraded_a: rollouts of A without a score that no rule of the spec excludes, in rows that both have.
        bounds: the possible difference of the scores if these had been graded, or None if all were graded.
    """

    score: Difference
    passes: Difference
    success: float
    p: float
    fixed: tuple[ChangedRow, ...]
    broken: tuple[ChangedRow, ...]
    measures: tuple[Difference, ...]
    rows: int
    only_a: int
    only_b: int
    excluded: int
    ungraded_a: int
    ungraded_b: int
    bounds: tuple[float, float] | None

    def is_significantly_worse(self, margin: float = 0.0) -> bool:
        """Return True if B is worse by more than `margin`, beyond chance: the upper end of the interval is below
        -margin.
        """
        return self.score.high is not None and self.score.high < -margin


def compare(
    a: Iterable[RolloutSummary],
    b: Iterable[RolloutSummary],
    *,
    success: float = 1.0,
    span: tuple[float, float] = (0.0, 1.0),
    family: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare the rollouts of a run with the rollouts of another, using the one that counts for each place.

    `RunRecord.counting` selects them.

    Args:
        a, b: rollouts of the baseline run and of the new run.
        success: score from which a rollout passes.
        span: the lowest and the highest possible score.
        family: the family of each row that both have, or None if each row is its own family.

    Raises:
        UserError: they have no row in common, or none that is graded in both.
    """
    before, after = by_row(a), by_row(b)
    common = [row for row in before if row in after]
    if not common:
        raise UserError(
            f"the runs have no row in common: the first has {len(before)} rows, the second {len(after)}. Rows are the "
            "same where their keys are, so compare runs of one dataset and split"
        )
    rows_a, right = {row: before[row] for row in common}, {row: after[row] for row in common}

    def difference(name: str, quantity: Quantity, span: tuple[float, float] | None = None) -> Difference | None:
        return paired(name, _values_by_row(rows_a, quantity), _values_by_row(right, quantity), span, family=family)

    scores = [rollout.score for rollout in _rollouts(rows_a) + _rollouts(right) if rollout.score is not None]
    score = difference("score", lambda rollout: rollout.score, (min([span[0], *scores]), max([span[1], *scores])))
    passes = difference("pass", lambda rollout: float(rollout.passes(success)), (0.0, 1.0))
    if score is None or passes is None:
        raise UserError(f"the runs have {len(common)} rows in common, and none of them has a score in both")
    changed = [row for row in (_change(key, rows_a[key], right[key], success) for key in common) if row is not None]
    changed.sort(key=lambda row: (-abs(row.b - row.a) / row.of, row.row_key))
    fixed = tuple(row for row in changed if row.b > row.a)
    broken = tuple(row for row in changed if row.b < row.a)
    rewards = dict.fromkeys(name for rollout in _rollouts(rows_a) + _rollouts(right) for name in rollout.rewards)
    quantities: dict[str, Quantity] = {f"reward/{name}": _value_of_reward(name) for name in rewards} | dict(MEASURES)
    measures = [difference(name, value_of) for name, value_of in quantities.items()]
    return Comparison(
        score=score,
        passes=passes,
        success=success,
        p=sign_test(len(fixed), len(broken)),
        fixed=fixed,
        broken=broken,
        measures=tuple(measure for measure in measures if measure is not None),
        rows=len(common),
        only_a=len(before) - len(common),
        only_b=len(after) - len(common),
        excluded=len(common) - score.rows,
        ungraded_a=sum(map(_is_ungraded, _rollouts(rows_a))),
        ungraded_b=sum(map(_is_ungraded, _rollouts(right))),
        bounds=_difference_bounds(rows_a, right, span),
    )


Rows = Mapping[str, Sequence[RolloutSummary]]
Quantity = Callable[[RolloutSummary], float | None]
MEASURES: Mapping[str, Quantity] = {
    "turns": lambda rollout: rollout.turns,
    "tool_calls": lambda rollout: rollout.calls,
    "tool_errors": lambda rollout: rollout.call_errors,
    "prompt_tokens": lambda rollout: rollout.prompt_tokens,
    "completion_tokens": lambda rollout: rollout.completion_tokens,
    "cost": lambda rollout: rollout.cost,
    "seconds": lambda rollout: rollout.seconds.get("total"),
}


def _value_of_reward(name: str) -> Quantity:
    return lambda rollout: rollout.rewards.get(name)


def _values_by_row(rows: Rows, quantity: Quantity) -> dict[str, list[float]]:
    return {
        key: [value for rollout in row if rollout.score is not None and (value := quantity(rollout)) is not None]
        for key, row in rows.items()
    }


def _rollouts(rows: Rows) -> list[RolloutSummary]:
    return [rollout for row in rows.values() for rollout in row]


def _is_ungraded(rollout: RolloutSummary) -> bool:
    return rollout.score is None and rollout.state != RolloutState.EXCLUDED


def _change(key: str, a: Sequence[RolloutSummary], b: Sequence[RolloutSummary], success: float) -> ChangedRow | None:
    """Return the row if it passes more often in one run; uses the first rollouts of each, equally many of both.

    With unequal numbers, two runs of one model would differ more often in one direction than in the other.
    """
    graded = [[rollout for rollout in side if rollout.score is not None] for side in (a, b)]
    rollout_count = min(map(len, graded))
    rollouts_a, right = ([(rollout.score or 0.0, rollout.id) for rollout in side[:rollout_count]] for side in graded)
    won = [sum(score >= success for score, _ in side) for side in (rollouts_a, right)]
    if won[0] == won[1]:
        return None
    (a_shows, b_shows) = (max, min) if won[1] < won[0] else (min, max)
    by_score = itemgetter(0)
    return ChangedRow(
        key, won[0], won[1], rollout_count, a_shows(rollouts_a, key=by_score)[1], b_shows(right, key=by_score)[1]
    )


def _difference_bounds(a: Rows, b: Rows, span: tuple[float, float]) -> tuple[float, float] | None:
    """Return the bounds of the difference over all rows of both, if missing scores had any value within `span`."""
    if not any(map(_is_ungraded, _rollouts(a) + _rollouts(b))):
        return None
    low, high = span

    def filled(row: Sequence[RolloutSummary], missing: float) -> float | None:
        values = [
            missing if rollout.score is None else rollout.score
            for rollout in row
            if rollout.score is not None or _is_ungraded(rollout)
        ]
        return mean(values) if values else None

    def difference(missing_a: float, missing_b: float) -> float:
        pairs = ((filled(a[key], missing_a), filled(b[key], missing_b)) for key in a)
        return mean([y - x for x, y in pairs if x is not None and y is not None])

    return difference(high, low), difference(low, high)


# ---------------------------------------------------------------------------------------------- Run directories


@dataclass(frozen=True)
class RunComparison:
    """Two run directories, `a` and `b`: their models, the conclusions that their settings allow, and their differences.

    `refusals` explain why the scores of the two are not comparable, and `warnings` list differences other than the
    model.
    """

    a: str
    b: str
    model_a: str
    model_b: str
    refusals: tuple[str, ...]
    warnings: tuple[str, ...]
    found: Comparison

    @property
    def verdict(self) -> str:
        """Conclusion as one sentence."""
        score = self.found.score
        if score.low is None or score.high is None:
            return f"one {'row' if score.rows == 1 else 'family'} says nothing about others"
        if score.low > 0:
            return "B is better than A, beyond chance"
        if score.high < 0:
            return "B is worse than A, beyond chance"
        return "no difference beyond chance"

    def record(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**asdict(self), "verdict": self.verdict}


def compare_runs(
    a: RunRecord,
    b: RunRecord,
    success: float | None = None,
    families: str | None = None,
    seat: str | None = None,
) -> RunComparison:
    """Compare two loaded run directories (`RunRecord.refresh`), the second with the first.

    Args:
        success: score from which a rollout passes; None: the value in the first run's spec.
        families: column of the rows whose value names a row's family, or None if each row is its own family.
        seat: seat whose rollouts are compared, if there are several agents; None: the first seat.

    Raises:
        UserError: nothing can be compared, no row has that column, or a file cannot be read.
    """
    if a.path.resolve() == b.path.resolve():
        raise UserError(f"{a.path} is given twice: a run does not differ from itself")
    settings, counting, family = contrast(a, b), (_seat_rollouts(a, seat), _seat_rollouts(b, seat)), None
    if families is not None:
        columns = a.columns()
        if not any(families in row for row in columns.values()):
            column_names = ", ".join(dict.fromkeys(name for row in columns.values() for name in row)) or "none"
            raise UserError(
                f"--cluster-by {families}: no row of {a.path} has this column; recorded columns: {column_names}"
            )
        family = {
            key: f"{families}={row[families]!r}" if families in row else f"row {key}" for key, row in columns.items()
        }
    return RunComparison(
        str(a.path),
        str(b.path),
        model_of(a.run_info),
        model_of(b.run_info),
        settings.refusals,
        (*settings.warnings, *_other_rows(*map(by_row, counting))),
        compare(
            *counting,
            success=success_of(spec_of(a)) if success is None else success,
            span=span_of(a.run_info),
            family=family,
        ),
    )


def rows_compared(a: RunRecord, b: RunRecord, success: float) -> list[dict[str, Any]]:
    """Return the rows that both loaded runs have graded, as JSON: mean scores, passes and rollouts of both.

    Rows that pass less often in B come first, then rows that pass as often, then the others.
    """
    before, after = (by_row(record.counting()) for record in (a, b))
    rows = []
    for key in (key for key in before if key in after):
        sides = [[each for each in side[key] if each.score is not None] for side in (before, after)]
        if not all(sides):
            continue
        rollout_count = min(map(len, sides))
        passed = [sum(each.passes(success) for each in side[:rollout_count]) for side in sides]
        means = [mean([each.score or 0.0 for each in side]) for side in sides]
        change = "fixed" if passed[1] > passed[0] else "broken" if passed[1] < passed[0] else "same"
        squares = [[[each.id, each.score] for each in side[:SHOWN]] for side in sides]
        rows.append(
            {
                "row_key": key,
                "change": change,
                "of": rollout_count,
                "passed": passed,
                "means": means,
                "rollouts": squares,
            }
        )
    return sorted(rows, key=lambda row: (row["passed"][1] - row["passed"][0], row["means"][1] - row["means"][0]))


def _seat_rollouts(record: RunRecord, seat: str | None) -> list[RolloutSummary]:
    """Return the rollouts of a seat that count; None: the rollouts of the first seat, as for a single agent."""
    if seat is None:
        return list(record.counting())
    counting = list(record.counting(every_seat=True))
    seats = list(dict.fromkeys(rollout.seat for rollout in counting if rollout.seat))
    if seat not in seats:
        hint = choices(seat, seats) if seats else "; it has a single agent"
        raise UserError(f"--seat: {record.path} has no seat {seat!r}{hint}")
    return [rollout for rollout in counting if rollout.seat == seat]


def _other_rows(a: Rows, b: Rows) -> Iterable[str]:
    """Yield the differences between the rows of two runs and between their numbers of rollouts."""
    sizes = [Counter(map(len, rows.values())).most_common(1)[0][0] for rows in (a, b) if rows]
    if len(set(sizes)) > 1:
        yield f"most rows have {sizes[0]} rollouts in A and {sizes[1]} in B"
    changed = sum(a[key][0].row_digest != b[key][0].row_digest for key in a if key in b)
    if changed:
        yield f"rows with the same key in both runs and other content: {changed}"
    for name, run_rows, other in (("A", a, b), ("B", b, a)):
        alone = sum(key not in other for key in run_rows)
        if alone:
            yield f"rows that are only in {name}, and are excluded: {alone}"
