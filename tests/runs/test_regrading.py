"""Other weights, a clamp or other endings score what is there anew; what has no recorded values is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_rl.errors import UserError
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.regrading import Grading, bring_up_to_date
from hermes_rl.runs.store import RolloutStore
from hermes_rl.scoring.reward_value import Weighting

REWARDS = {"a": "1", "b": "2"}
OLD = Grading(REWARDS, [Weighting("a"), Weighting("b")])


def rollout(
    index: int, score: float | None, stop_reason: str = "finished", attempt: int = 0, **values: Any
) -> dict[str, Any]:
    rewards = {name: {"value": value} for name, value in values.items()}
    error = None if score is not None else "failed"
    shared = {"row_key": "row-1", "group": "row-1:0", "epoch": 0, "stop_reason": stop_reason, "error": error}
    place = {"index": index, "attempt": attempt, "state": "failed" if score is None else "scored"}
    return {"id": f"row-1:0-{index}r{attempt}", "rewards": rewards, "score": score, **place, **shared}


class Files:
    def __init__(self, folder: Path, *there: dict[str, Any]) -> None:
        self.path = folder / "rollouts.jsonl"
        self.path.write_text("".join(json.dumps(line) + "\n" for line in there))
        self.directory = RunDirectory(folder)
        self.store = RolloutStore(self.directory, 2)
        self.said: list[str] = []
        self.changed: set[str] = set()

    def regrade(self, new: Grading, old: Grading | None = OLD) -> None:
        self.directory.write_json("run.json", {"started": "yesterday", **({"grading": old.record()} if old else {})})
        compiled: Any = SimpleNamespace(grader=None)
        work = bring_up_to_date(self.store, self.directory, compiled, new, (), self.said.append)
        self.changed = asyncio.run(work)

    def scores(self) -> list[float | None]:
        return [line["score"] for line in self.store.all_lines()]

    def states(self) -> list[str]:
        return [line["state"] for line in self.store.all_lines()]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    # The second member ended first, and its first attempt failed.
    second = rollout(1, None), rollout(1, 3.0, "max_turns", 1, a=1.0, b=2.0)
    made = Files(tmp_path, *second, rollout(0, 1.0, a=0.5, b=0.5))
    yield made
    made.store.close()


def grading(weight: float = 1.0, **more: Any) -> Grading:
    return Grading(REWARDS, [Weighting("a"), Weighting("b", weight)], **more)


def test_other_weights_and_a_clamp_give_other_scores(files: Files) -> None:
    files.regrade(grading(10.0, clamp=(0.0, 15.0)))
    assert files.scores() == [None, 15.0, 5.5]
    assert files.changed == {"row-1:0"}
    assert files.said == ["scoring changed: rescoring 2 recorded rollouts"]


def test_the_same_scoring_changes_nothing(files: Files) -> None:
    before = files.path.read_text()
    files.regrade(grading())
    assert files.path.read_text() == before
    assert (files.said, files.changed) == ([], set())


def test_stop_reason_rule_may_change_between_regrades(files: Files) -> None:
    files.regrade(grading(on_stop={"max_turns": 0.0}))
    assert files.scores() == [None, 0.0, 1.0]
    files.regrade(grading(on_stop={"max_turns": "mask"}), grading(on_stop={"max_turns": 0.0}))
    assert files.scores() == [None, 3.0, 1.0]
    files.regrade(grading(), grading(on_stop={"max_turns": "mask"}))
    assert (files.scores(), files.changed) == ([None, 3.0, 1.0], {"row-1:0"}), "another mask is another line"
    files.regrade(grading(on_stop={"max_turns": "drop"}))
    assert (files.scores(), files.states()) == ([None, None, 1.0], ["failed", "excluded", "scored"])
    files.regrade(grading(), grading(on_stop={"max_turns": "drop"}))
    assert files.scores() == [None, 3.0, 1.0]


def test_a_value_that_is_missing_is_named(tmp_path: Path) -> None:
    files = Files(tmp_path, rollout(0, 1.0, a=1.0))
    with pytest.raises(UserError, match=r"rollout row-1:0-0r0 lacks the value of a reward \('b'\)"):
        files.regrade(grading(2.0))


def test_run_without_recorded_grading_is_not_resumed(files: Files) -> None:
    with pytest.raises(UserError, match=r"run\.json does not describe the grading"):
        files.regrade(grading(), old=None)
