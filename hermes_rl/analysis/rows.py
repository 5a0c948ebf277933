"""Rows of a run with all their rollouts, as JSON for a page: which are never, always or sometimes solved, since when.

A row is named by its key or its prompt, never by a column that may be hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from hermes_rl.analysis.findings import Scoring, groups_of_rows, reason_of
from hermes_rl.analysis.record import RolloutSummary, RunRecord, by_row, scores_of
from hermes_rl.analysis.rollout_view import PREVIEW, Screen
from hermes_rl.errors import UserError
from hermes_rl.runs.statistics import mean

PAGE = 60
"""Rows of a page."""
SQUARES = 64
"""Rollouts of a row that are shown, the latest ones."""
SHOWN_COLUMNS = 3
"""Columns of the rows that are shown."""
RowSort = Literal["solved", "spread", "drop", "name"]
ROW_SORTS: tuple[RowSort, ...] = get_args(RowSort)
LEAST_FIRST = -1.0
"""Mean of a row without a score, which comes first."""


def rows_page(
    record: RunRecord,
    scoring: Scoring,
    *,
    column_filter: str = "",
    unsolved: bool = False,
    sort: str = "solved",
    start: int = 0,
    size: int = PAGE,
) -> dict[str, Any]:
    """Return a page of the rows of a loaded run.

    Args:
        record: the run.
        scoring: its settings.
        column_filter: rows with a value of a column, as `column=value`.
        unsolved: only rows without a pass.
        sort: one of `ROW_SORTS`: the fewest solved, the most mixed, the largest fall from the first to the second
            half, or by name.
        start: number of rows before the page.
        size: maximum rows of the page.

    Raises:
        UserError: the order is unknown.
    """
    if sort not in ROW_SORTS:
        raise UserError(f"rows are sorted by {', '.join(ROW_SORTS)}, not {sort!r}")
    rows = by_row(record.counting())
    groups = groups_of_rows(rows, record.categories)
    never = {key for key, row in rows.items() if not any(map(scoring.passes, row))}
    keys = [
        key for key in rows if (not unsolved or key in never) and _is_in(record.categories.get(key, {}), column_filter)
    ]
    keys.sort(key=lambda key: _ORDERS[sort](key, rows[key], scoring))
    page_keys = keys[start : start + size]
    previews = record.previews(page_keys, PREVIEW)
    columns = sorted(groups, key=lambda column: len(groups[column]))[:SHOWN_COLUMNS]
    page: dict[str, Any] = Screen().value(
        {
            "columns": [{"name": name, "values": sorted(groups[name])} for name in columns],
            "rows": [
                _row_entry(key, rows[key], scoring) | _row_identity(record, key, columns, previews[key])
                for key in page_keys
            ],
            "unsolved": len(never),
            "fit": len(keys),
            "total": len(rows),
            "next": start + size if start + size < len(keys) else None,
        }
    )
    return page


def _is_in(columns: Mapping[str, str], column_filter: str) -> bool:
    column, _, value = column_filter.partition("=")
    return not column_filter or columns.get(column) == value


def _row_identity(record: RunRecord, key: str, columns: Sequence[str], preview: Mapping[str, str]) -> dict[str, Any]:
    values = record.categories.get(key, {})
    label, question = preview["label"], preview["question"]
    return {"label": label, "question": question, "columns": [values.get(name, "") for name in columns]}


def _row_entry(key: str, rollouts: Sequence[RolloutSummary], scoring: Scoring) -> dict[str, Any]:
    scores = scores_of(rollouts)
    reasons = Counter(reason for each in rollouts if (reason := reason_of(each, scoring)))
    epochs: dict[int, list[list[Any]]] = {}
    for each in rollouts[-SQUARES:]:
        epochs.setdefault(each.epoch, []).append([each.id, each.score])
    return {
        "row_key": key,
        "passed": sum(map(scoring.passes, rollouts)),
        "graded": len(scores),
        "rollouts": len(rollouts),
        "mean": mean(scores) if scores else None,
        "epochs": [[epoch, squares] for epoch, squares in epochs.items()],
        "reason": reasons.most_common(1)[0] if reasons else None,
    }


def _pass_rate(rollouts: Sequence[RolloutSummary], scoring: Scoring) -> float:
    return sum(map(scoring.passes, rollouts)) / len(rollouts)


def _mean_score(rollouts: Sequence[RolloutSummary]) -> float:
    scores = scores_of(rollouts)
    return mean(scores) if scores else LEAST_FIRST


def _score_change(rollouts: Sequence[RolloutSummary]) -> float:
    """Return the change of the mean from the first half of the rollouts to the second."""
    half = len(rollouts) // 2
    return _mean_score(rollouts[half:]) - _mean_score(rollouts[:half]) if half else 0.0


_ORDERS: Mapping[str, Callable[[str, Sequence[RolloutSummary], Scoring], Any]] = {
    "solved": lambda key, row, scoring: (_pass_rate(row, scoring), _mean_score(row), key),
    "spread": lambda key, row, scoring: (abs(_pass_rate(row, scoring) - 0.5), key),
    "drop": lambda key, row, scoring: (_score_change(row), key),
    "name": lambda key, row, scoring: key,
}
