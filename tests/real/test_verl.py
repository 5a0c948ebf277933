"""verl's own rollout workers run a spec: the older trainer's, and the newer one's with several sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.real.doors_played import require_as_everywhere
from tests.real.environments import HERE, small_learner, verl_python
from tests.real.test_trl import seen

COMPONENT = "verl's rollout workers"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]


def play(program: str, folder: Path) -> dict[str, Any]:
    return seen([str(verl_python()), str(HERE / "verl_programs.py"), program, str(small_learner())], folder)


def test_a_batch_of_verl_has_every_sampled_token_once(tmp_path: Path) -> None:
    found = play("older", tmp_path)
    assert found["rollouts"] == 16
    assert found["trained"] == found["sampled"]
    assert len(found["trained"]) > 16 * 8
    assert found["worst"] < 1e-4
    assert found["scores"] == found["right"]
    assert set(found["scores"]) <= {0.0, 1.0}
    assert set(found["steps"]) == {3}
    assert "finished" in found["stop_reasons"]


def test_the_newer_trainer_gets_every_sequence_of_a_rollout(tmp_path: Path) -> None:
    found = play("newer", tmp_path)
    assert found["status"] == [[f"uid{n}", "finished"] for n in range(4)]
    rollouts = {key.rsplit("_", 1)[0] for key in found["keys"]}
    assert len(rollouts) == 16
    assert len(found["keys"]) > 24
    assert found["trained"] == found["sampled"]
    assert found["worst"] < 1e-4
    assert found["tags"] == [3]


def test_failed_group_is_marked_and_stores_no_data(tmp_path: Path) -> None:
    found = play("failing", tmp_path)
    assert found["status"] == [[f"uid{n}", "failure"] for n in range(4)]
    assert found["keys"] == []


def test_advantages_are_those_of_the_estimators(tmp_path: Path) -> None:
    found = play("estimators", tmp_path)
    assert found.keys() == {"mean", "mean, vectorized", "std", "rloo", "rloo, vectorized", "returns"}
    assert max(found.values()) < 1e-6  # the vectorized mean is computed in single precision


def test_common_spec_gives_the_same_scores_and_tokens_in_every_integration(tmp_path: Path) -> None:
    found = play("doors", tmp_path)
    require_as_everywhere(found["newer"], compared=True)
    require_as_everywhere(found["older"], compared=False)
    assert "rewards.longest compares the members of a group, and verl's older trainer" in found["refused"]
