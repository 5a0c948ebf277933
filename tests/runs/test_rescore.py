"""Other weights, a clamp or other endings score what is there anew; what has no recorded values is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.errors import UserError
from hermes_rl.runs.grading import Grading
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.rescore import Regrading
from hermes_rl.scoring.combine import Weighting

REWARDS = {"a": "1", "b": "2"}
OLD = Grading(REWARDS, [Weighting("a"), Weighting("b")])


def rollout(
    index: int, score: float | None, ending: str = "finished", attempt: str = "", **values: Any
) -> dict[str, Any]:
    rewards = {name: {"value": value} for name, value in values.items()}
    shared = {"row_key": "row", "group": "row-1:0", "ending": ending, "error": None}
    return {"id": f"row-1:0-{index}{attempt}", "rewards": rewards, "score": score, **shared}


class Files:
    def __init__(self, folder: Path) -> None:
        self.rollouts, self.groups = Journal(folder / "rollouts.jsonl"), Journal(folder / "groups.jsonl")
        self.said: list[str] = []

    def fill(self, *rollouts: dict[str, Any], scores: list[float]) -> None:
        self.rollouts.keep(rollouts)
        masks = [[-100, 7] for _ in scores]
        self.groups.keep([{"group": "row-1:0", "row_key": "row", "run": "", "scores": scores, "masks": masks}])

    def regrade(self, new: Grading, old: Grading = OLD, *, drop_uniform: bool = False) -> None:
        described = {"started": "yesterday", "grading": old.record()}
        Regrading(described, new, self.said.append, drop_uniform)(self.rollouts, self.groups)

    def scores(self) -> list[float | None]:
        return [line["score"] for line in self.rollouts.read()]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path)
    # The second member ended first, and its first attempt failed.
    members = rollout(1, None), rollout(1, 3.0, "max_turns", "r1", a=1.0, b=2.0), rollout(0, 1.0, a=0.5, b=0.5)
    made.fill(*members, scores=[1.0, 3.0])
    yield made
    made.rollouts.close()
    made.groups.close()


def grading(weight: float = 1.0, **more: Any) -> Grading:
    return Grading(REWARDS, [Weighting("a"), Weighting("b", weight)], **more)


def test_other_weights_and_a_clamp_give_other_scores_in_both_files(files: Files) -> None:
    files.regrade(grading(10.0, clamp=(0.0, 15.0)))
    assert files.scores() == [None, 15.0, 5.5]
    (group,) = files.groups.read()
    assert group["scores"] == [5.5, 15.0]
    assert files.said == ["the scoring has changed: 2 rollouts that were there are scored anew"]


def test_the_same_scoring_changes_nothing(files: Files) -> None:
    before = files.rollouts.path.read_text(), files.groups.path.read_text()
    files.regrade(grading())
    assert (files.rollouts.path.read_text(), files.groups.path.read_text()) == before
    assert files.said == []


def test_an_ending_may_have_a_score_be_masked_or_drop_its_group(files: Files) -> None:
    files.regrade(grading(endings={"max_turns": 0.0}))
    assert files.scores() == [None, 0.0, 1.0]
    files.regrade(grading(endings={"max_turns": "mask"}), grading(endings={"max_turns": 0.0}))
    (group,) = files.groups.read()
    assert (group["scores"], group["masks"]) == ([1.0, 3.0], [[-100, 7], [-100, -100]])
    with pytest.raises(UserError, match=r"endings\.max_turns was `mask`.*--fresh"):
        files.regrade(grading(), grading(endings={"max_turns": "mask"}))
    files.regrade(grading(endings={"max_turns": "drop"}), grading(endings={"max_turns": "mask"}))
    assert files.scores() == [None, None, 1.0]
    assert list(files.groups.read()) == []


def test_a_group_that_becomes_uniform_is_left_out_where_the_spec_says_so(files: Files) -> None:
    files.regrade(grading(0.0, clamp=(0.0, 0.25)), drop_uniform=True)
    assert files.scores() == [None, 0.25, 0.25]
    assert list(files.groups.read()) == []


@pytest.mark.parametrize("rewards", [{"a": "1"}, {**REWARDS, "c": "3"}, {"a": "1", "b": "other"}])
def test_other_rewards_are_refused_and_nothing_is_touched(files: Files, rewards: dict[str, str]) -> None:
    before = files.rollouts.path.read_text()
    with pytest.raises(UserError, match=r"rewards have changed since yesterday \([bc]\).*--fresh"):
        files.regrade(Grading(rewards, [Weighting(name) for name in rewards]))
    assert files.rollouts.path.read_text() == before


def test_another_judge_is_another_reward(files: Files) -> None:
    with pytest.raises(UserError, match=r"servers\.judge"):
        files.regrade(grading(roles={"judge": "y"}), grading(roles={"judge": "x"}))


def test_a_value_that_is_missing_is_named(files: Files) -> None:
    files.fill(rollout(0, 1.0, a=1.0), scores=[1.0])
    with pytest.raises(UserError, match=r"rollout row-1:0-0 has no value of every reward \('b'\)"):
        files.regrade(grading(2.0))


def test_a_group_without_its_rollouts_is_named(files: Files) -> None:
    files.fill(rollout(1, 3.0, a=1.0, b=2.0), scores=[1.0, 3.0])
    with pytest.raises(UserError, match=r"the rollouts of group row-1:0 are not in the run directory"):
        files.regrade(grading(2.0))


def test_a_run_that_does_not_say_how_it_graded_is_not_gone_on_with(files: Files) -> None:
    with pytest.raises(UserError, match=r"run\.json does not say how"):
        Regrading({}, grading(), files.said.append)(files.rollouts, files.groups)
