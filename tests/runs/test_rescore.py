"""Other weights, a clamp or other endings score what is there anew; what has no recorded values is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.errors import UserError
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.grading import Grading
from hermes_rl.runs.kept import Kept
from hermes_rl.runs.rescore import Regrading
from hermes_rl.scoring.combine import Weighting

REWARDS = {"a": "1", "b": "2"}
OLD = Grading(REWARDS, [Weighting("a"), Weighting("b")])


def rollout(
    index: int, score: float | None, ending: str = "finished", attempt: str = "", **values: Any
) -> dict[str, Any]:
    rewards = {name: {"value": value} for name, value in values.items()}
    error = None if score is not None else "failed"
    shared = {"row_key": "row", "group": "row-1:0", "ending": ending, "error": error}
    return {"id": f"row-1:0-{index}{attempt}", "rewards": rewards, "score": score, **shared}


class Files:
    def __init__(self, folder: Path) -> None:
        self.kept = Kept(RunDirectory(folder), 2)
        self.said: list[str] = []
        self.changed: set[str] = set()

    def regrade(self, new: Grading, old: Grading = OLD) -> None:
        described = {"started": "yesterday", "grading": old.record()}
        regrading = Regrading(described, new, self.said.append)
        asyncio.run(regrading(self.kept))
        self.changed = regrading.changed

    def scores(self) -> list[float | None]:
        return [line["score"] for line in self.kept.rollouts.read()]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path)
    # The second member ended first, and its first attempt failed.
    second = rollout(1, None), rollout(1, 3.0, "max_turns", "r1", a=1.0, b=2.0)
    made.kept.rollouts.keep([*second, rollout(0, 1.0, a=0.5, b=0.5)])
    yield made
    made.kept.close()


def grading(weight: float = 1.0, **more: Any) -> Grading:
    return Grading(REWARDS, [Weighting("a"), Weighting("b", weight)], **more)


def test_other_weights_and_a_clamp_give_other_scores(files: Files) -> None:
    files.regrade(grading(10.0, clamp=(0.0, 15.0)))
    assert files.scores() == [None, 15.0, 5.5]
    assert files.changed == {"row-1:0"}
    assert files.said == ["the scoring has changed: 2 rollouts that were there are scored anew"]


def test_the_same_scoring_changes_nothing(files: Files) -> None:
    before = files.kept.rollouts.path.read_text()
    files.regrade(grading())
    assert files.kept.rollouts.path.read_text() == before
    assert (files.said, files.changed) == ([], set())


def test_an_ending_may_have_a_score_be_masked_or_dropped_and_back(files: Files) -> None:
    files.regrade(grading(endings={"max_turns": 0.0}))
    assert files.scores() == [None, 0.0, 1.0]
    files.regrade(grading(endings={"max_turns": "mask"}), grading(endings={"max_turns": 0.0}))
    assert files.scores() == [None, 3.0, 1.0]
    files.regrade(grading(), grading(endings={"max_turns": "mask"}))
    assert (files.scores(), files.changed) == ([None, 3.0, 1.0], {"row-1:0"}), "another mask is another line"
    files.regrade(grading(endings={"max_turns": "drop"}))
    assert files.scores() == [None, None, 1.0]
    files.regrade(grading(), grading(endings={"max_turns": "drop"}))
    assert files.scores() == [None, 3.0, 1.0]


def test_a_value_that_is_missing_is_named(files: Files) -> None:
    files.kept.rollouts.keep([rollout(0, 1.0, a=1.0)])
    with pytest.raises(UserError, match=r"rollout row-1:0-0 has no value of every reward \('b'\)"):
        files.regrade(grading(2.0))


def test_a_run_that_does_not_say_how_it_graded_is_not_gone_on_with(files: Files) -> None:
    with pytest.raises(UserError, match=r"run\.json does not say how"):
        asyncio.run(Regrading({}, grading(), files.said.append)(files.kept))
