"""`hermes-rl compare`: print the comparison of two or more runs; `hermes_rl.analysis.compare` has the statistics."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hermes_rl.analysis.compare import ChangedRow, RunComparison, compare_runs
from hermes_rl.analysis.record import RunRecord
from hermes_rl.cli.echo import echo
from hermes_rl.cli.screen import BAD, DIM, GOOD, HEAD, safe, short, show, table
from hermes_rl.errors import UserError
from hermes_rl.runs.statistics import Difference
from hermes_rl.terminal_text import pluralize


@dataclass(frozen=True)
class CompareRequest:
    """Arguments of `hermes-rl compare`."""

    runs: Sequence[Path]
    success: float | None = None
    families: str | None = None
    seat: str | None = None
    anyway: bool = False
    fail_if_worse: bool = False
    margin: float = 0.0
    limit: int = 10
    as_json: bool = False
    pager: bool = True


def compare_paths(request: CompareRequest) -> int:
    """Compare the first run with each other one; return the exit status."""
    if len(request.runs) < 2:
        raise UserError("compare needs two runs: hermes-rl compare A B, each a run directory")
    if request.margin and not request.fail_if_worse:
        raise UserError("--margin sets the tolerance of --fail-if-worse; pass both")
    if request.margin < 0:
        raise UserError("--margin must be 0 or more; it is the tolerated decrease of B")
    first, *others = [_read_record(path) for path in request.runs]
    comparisons = [
        (compare_runs(first, other, request.success, request.families, request.seat), other) for other in others
    ]
    refused = [comparison for comparison, _ in comparisons if comparison.refusals]
    if refused and not request.anyway:
        raise UserError(
            f"{refused[0].a} (A) and {refused[0].b} (B) are graded differently, so their scores are not comparable:\n"
            + "\n".join(f"  {text}" for text in refused[0].refusals)
            + "\n`hermes-rl regrade RUN --set …` grades a run again without new rollouts; --force compares them anyway"
        )
    if request.as_json:
        echo(json.dumps([comparison.record() for comparison, _ in comparisons], indent=2, ensure_ascii=False))
    else:
        parts = (part for comparison, other in comparisons for part in _report_parts(comparison, first, other, request))
        show(parts, pager=request.pager)
    for record in (first, *(other for _, other in comparisons)):
        if record.excluded:
            echo(record.excluded, err=True)
    worse = [comparison for comparison, _ in comparisons if comparison.found.is_significantly_worse(request.margin)]
    if worse and request.fail_if_worse:
        by = f" by more than {request.margin:g}" if request.margin else ""
        for comparison in worse:
            echo(f"error: {comparison.b} is worse than {comparison.a}{by}, beyond chance", err=True)
        return 1
    return 0


def _read_record(path: Path) -> RunRecord:
    record = RunRecord(path)
    record.refresh()
    if not record.rollouts:
        raise UserError(f"{record.path} has no rollout yet")
    return record


def _report_parts(runs: RunComparison, a: RunRecord, b: RunRecord, request: CompareRequest) -> Iterator[RenderableType]:
    comparison = runs.found
    yield safe(f"A  {runs.a}  ({runs.model_a})")
    yield safe(f"B  {runs.b}  ({runs.model_b})")
    if played := next((rollout.seat for rollout in a.counting() if rollout.seat), None):
        yield safe(f"seat {request.seat or played}" + ("" if request.seat else " (--seat NAME compares another one)"))
    for text in (*runs.refusals, *runs.warnings):
        yield safe(f"warning: {text}", "yellow")
    yield Text()
    yield _difference_table([comparison.score, comparison.passes])
    yield Text()
    rows = pluralize(comparison.score.rows, "row")
    if request.families is not None:
        rows += f" of {comparison.score.families} families"
    style = {True: GOOD, False: BAD}[comparison.score.difference > 0] if comparison.score.beyond_chance else HEAD
    yield safe(f"{runs.verdict}; both graded {rows}", style)
    if (detectable := comparison.score.detectable) is not None:
        yield safe(f"four times in five, {rows} would show a true difference of {detectable:.3g} or more")
    if comparison.bounds is not None:
        low, high = comparison.bounds
        yield safe(
            f"without a score: {comparison.ungraded_a} rollouts in A, {comparison.ungraded_b} in B; graded, they could "
            f"make the difference {low:+.3f} to {high:+.3f}",
            "yellow",
        )
    yield Text()
    # The test assumes independent rows, which rows of one family are not.
    chance = f"; sign test p = {comparison.p:.3g}" if request.families is None else ""
    changed = f"{pluralize(len(comparison.fixed), 'row')} fixed, {len(comparison.broken)} broken"
    yield safe(f"{changed} (a pass scores {comparison.success:g} or more){chance}")
    if comparison.fixed or comparison.broken:
        yield from _row_parts(comparison.fixed, comparison.broken, a, b, request.limit)
    yield Text()
    yield _difference_table([measure for measure in comparison.measures if measure.a or measure.b])
    yield safe("* beyond chance: the interval does not hold 0", DIM)
    yield Text()


def _difference_table(differences: Sequence[Difference]) -> Table:
    rows = table("mean of", "A", "B", "B - A", "95 % interval", right=("A", "B", "B - A", "95 % interval"))
    for difference in differences:
        interval = "" if difference.low is None else f"{_format_number(difference.low, True)} to "
        interval += "" if difference.high is None else _format_number(difference.high, True)
        numbers = (
            _format_number(difference.a),
            _format_number(difference.b),
            _format_number(difference.difference, True),
        )
        is_equal = difference.difference == 0 and not difference.beyond_chance
        marker = " *" if difference.beyond_chance else "  "
        rows.add_row(safe(difference.name), *numbers, interval + marker, style=DIM if is_equal else "")
    return rows


def _format_number(value: float, signed: bool = False) -> str:
    sign = "+" if signed else ""
    if 0 < abs(value) < 0.001:
        return f"{value:{sign}.2g}"
    return f"{value:{sign}.1f}" if abs(value) >= 100 else f"{value:{sign}.3f}"


def _row_parts(
    fixed: Sequence[ChangedRow], broken: Sequence[ChangedRow], a: RunRecord, b: RunRecord, limit: int
) -> Iterator[RenderableType]:
    row_table, example = (
        table("", "A", "B", "row", "see A", "see B", right=("A", "B"), uncut=("", "see A", "see B")),
        "",
    )
    for name, rows, style in (("broken", broken, BAD), ("fixed", fixed, GOOD)):
        for row in rows[:limit]:
            label, counts = a.label(row.row_key, 44) or row.row_key, (f"{row.a}/{row.of}", f"{row.b}/{row.of}")
            line_number = b.line_number(row.shown_b)
            row_table.add_row(
                Text(name, style), *counts, short(label), f"#{a.line_number(row.shown_a)}", f"#{line_number}"
            )
            example = example or f"hermes-rl show {shlex.quote(str(b.path))} {line_number}"
        if len(rows) > limit:
            row_table.add_row(Text(name, style), "", "", Text(f"… and {len(rows) - limit} more", DIM), "", "")
    yield row_table
    if example:
        yield safe(example, DIM)
