"""The table of a set: means that weigh each spec the same, intervals that add up, and ranks that allow for chance."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.analysis.sets import NOT_PLAYED, Estimate, SetRun, SetTable, _sort_key, set_table
from hermes_rl.runs.statistics import interval, paired
from tests.analysis.recorded import recorded, write_run

Scores = list[float | None]


def a_table(
    folder: Path, played: dict[tuple[str, str], Scores], by: tuple[str, ...] = (), **described: Any
) -> SetTable:
    """Write and read the runs of a set without settings, `played` by spec and model."""
    runs = []
    for (spec, model), scores in played.items():
        lines = [recorded(f"row {number:02}", score=score) for number, score in enumerate(scores)]
        runs.append(SetRun(spec, model, "", write_run(folder / spec / model, lines, **described)))
    return set_table("a set", runs, by)


def test_the_mean_over_specs_weighs_each_the_same(tmp_path: Path) -> None:
    made = a_table(tmp_path, {("short", "a"): [1.0, 0.0], ("long", "a"): [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]})
    (player,) = made.players
    short, long = player.cells
    assert (short.score, long.score) != (None, None)
    assert short.score is not None
    assert long.score is not None
    assert player.score is not None
    assert player.score.value == pytest.approx((0.5 + 0.25) / 2)
    assert player.stderr == pytest.approx(math.hypot(short.stderr or 0, long.stderr or 0) / 2)
    for cell, rows in ((short, [[1.0], [0.0]]), (long, [[0.0]] * 6 + [[1.0]] * 2)):
        assert (cell.score.low, cell.score.high) == pytest.approx(interval(rows))  # type: ignore[union-attr]
    gaps = [cell.score.high - cell.score.value for cell in player.cells if cell.score and cell.score.high]
    assert player.score.high == pytest.approx(player.score.value + math.hypot(*gaps) / 2)


def test_an_interval_with_unlike_ends_keeps_each() -> None:
    made = Estimate.mean_of([Estimate(1.0, 0.7, 1.4), Estimate(0.0, -0.4, 0.3)])
    assert (made.value, made.low, made.high) == (0.5, pytest.approx(0.25), pytest.approx(0.75))
    assert Estimate.mean_of([Estimate(1.0, 0.7, 1.4), Estimate(0.5)]) == Estimate(0.75)


def test_two_models_of_one_spec_differ_as_compare_says(tmp_path: Path) -> None:
    a, b = [1.0, 1.0, 0.5, 1.0, 0.0, 1.0], [0.0, 1.0, 0.5, 0.0, 0.0, 0.5]
    made = a_table(tmp_path, {("s", "worse"): [*b], ("s", "better"): [*a]})
    first, second = made.players
    assert (first.model, second.model, first.behind) == ("better", "worse", None)
    rows = [{str(number): [score] for number, score in enumerate(scores)} for scores in (a, b)]
    found = paired("score", rows[0], rows[1], (0.0, 1.0))
    assert found is not None
    assert second.behind == Estimate(found.difference, found.low, found.high)


def test_ranks_give_a_range_for_indistinguishable_models(tmp_path: Path) -> None:
    best = [1.0] * 38 + [0.0] * 2
    close = [1.0] * 36 + [0.0] * 4
    far = [0.0] * 30 + [1.0] * 10
    made = a_table(tmp_path, {("s", "far"): [*far], ("s", "close"): [*close], ("s", "best"): [*best]})
    assert [(one.model, one.rank, one.ranks) for one in made.players] == [
        ("best", 1, (1, 2)),
        ("close", 2, (1, 2)),
        ("far", 3, (3, 3)),
    ]


def test_many_models_need_a_clearer_difference(tmp_path: Path) -> None:
    """Of many comparisons some are beyond chance by chance, so that each needs a higher confidence."""
    low, high = [0.0] * 14 + [1.0] * 6, [0.0] * 9 + [1.0] * 11
    pair = {("s", "low"): [*low], ("s", "high"): [*high]}
    assert [one.ranks for one in a_table(tmp_path / "two", pair).players] == [(1, 1), (2, 2)]
    more = pair | {("s", f"other{number}"): [*high] for number in range(8)}
    made = a_table(tmp_path / "ten", more)
    assert {one.model: one.ranks for one in made.players}["low"] == (1, 10)


def test_equal_means_have_one_rank(tmp_path: Path) -> None:
    made = a_table(tmp_path, {("s", name): [1.0, 0.0, 1.0] for name in ("a", "b", "c")})
    assert [(one.rank, one.ranks) for one in made.players] == [(1, (1, 3))] * 3


def test_who_lacks_a_run_is_shown_and_not_ranked(tmp_path: Path) -> None:
    run = write_run(tmp_path / "s" / "a", [recorded("r", score=1.0), recorded("q", score=0.0)])
    cut = write_run(tmp_path / "s" / "b", [recorded("r", score=1.0)])
    made = set_table(
        "a set",
        [
            SetRun("s", "c", "", tmp_path / "s" / "c"),
            SetRun("s", "b", "", cut, "ended early: the budget is used up"),
            SetRun("s", "a", "", run),
        ],
    )
    assert [(one.model, one.rank) for one in made.players] == [("a", 1), ("c", None), ("b", None)]
    problems = [one.cells[0].problem for one in made.players]
    assert problems == [None, NOT_PLAYED, "ended early: the budget is used up"]
    assert made.players[2].score is None
    assert made.players[2].cells[0].rows == 1


def test_ungraded_rollouts_are_counted_but_not_scored_as_zero(tmp_path: Path) -> None:
    made = a_table(tmp_path, {("s", "a"): [1.0, None, 0.5]})
    cell = made.players[0].cells[0]
    assert cell.score is not None
    assert (cell.score.value, cell.ungraded, cell.rollouts, cell.rows) == (0.75, 1, 3, 3)
    assert cell.pass_at_1 == 0.5


def test_tokens_and_cost_are_of_all_attempts(tmp_path: Path) -> None:
    lines = [recorded("r", score=None), recorded("r", score=1.0, attempt=1)]
    for line in lines:
        line["usage"]["cost"] = 0.25
    made = set_table("a set", [SetRun("s", "a", "", write_run(tmp_path, lines))])
    cell = made.players[0].cells[0]
    single = recorded("r")["usage"]
    assert cell.cost == 0.5
    assert (cell.prompt_tokens, cell.completion_tokens) == (
        2 * single["prompt_tokens"],
        2 * single["completion_tokens"],
    )
    assert (cell.rollouts, cell.ungraded) == (1, 0)


def test_set_with_different_grading_is_reported_and_not_ranked(tmp_path: Path) -> None:
    def grading(weight: float) -> dict[str, Any]:
        weightings = [{"name": "right", "weight": weight, "gate": False}]
        return {"rewards": {"right": "x"}, "scoring": {"weightings": weightings, "clamp": None, "stop_reasons": {}}}

    runs = [
        SetRun("s", name, "", write_run(tmp_path / name, [recorded("r")], grading=grading(weight)))
        for name, weight in (("a", 1.0), ("b", 2.0))
    ]
    made = set_table("a set", runs)
    assert [one.rank for one in made.players] == [None, None]
    assert made.notes == (
        "s: a and b are graded differently, so that nothing is ranked: rewards.right has weight 1 in the first (a) and "
        "2 in the other",
    )


def test_set_with_different_rows_is_reported(tmp_path: Path) -> None:
    made = a_table(tmp_path, {("s", "a"): [1.0, 0.0, 1.0], ("s", "b"): [1.0, 0.0]})
    assert made.notes == ("s: a and b have 2 rows in common, of 3 and 2",)


def test_a_column_of_the_rows_parts_the_scores(tmp_path: Path) -> None:
    runs = []
    for model, scores in (("a", [1.0, 0.0, 1.0, 1.0]), ("b", [0.0, 0.0, 1.0, 0.0])):
        lines = [recorded(f"row {number}", score=score) for number, score in enumerate(scores)]
        for line, level in zip(lines, (10, 9, "x", 9), strict=True):
            line["row"]["level"] = level
        runs.append(SetRun("s", model, "", write_run(tmp_path / model, lines)))
    made = set_table("a set", runs, ("level", "levle"))
    assert [(one.value, one.rows) for one in made.by["level"]] == [("9", 2), ("10", 1), ("x", 1)]
    means = [[one.value if one is not None else None for one in part.scores] for part in made.by["level"]]
    assert means == [[0.5, 0.0], [1.0, 0.0], [1.0, 1.0]]
    assert made.by["levle"] == ()
    assert made.notes[0].startswith("by: no row has a column `levle`; did you mean `level`?")
    assert json.loads(json.dumps(asdict(made)))["by"]["level"][0]["rows"] == 2


def test_nan_and_text_values_sort_after_numbers() -> None:
    values = ["3", "nan", "1", "inf", "x", "2", "NaN", "-inf"]
    orders = {tuple(sorted(order, key=_sort_key)) for order in (values, values[::-1], values[3:] + values[:3])}
    assert orders == {("-inf", "1", "2", "3", "inf", "NaN", "nan", "x")}
