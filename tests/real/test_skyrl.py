"""SkyRL's own dataset, input and validators with rollouts of a spec, in both of its modes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.real.doors_played import require_as_everywhere
from tests.real.environments import HERE, skyrl_python, small_learner
from tests.real.test_trl import seen

COMPONENT = "SkyRL's validators"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]


def play(program: str, folder: Path) -> dict[str, Any]:
    return seen([str(skyrl_python()), str(HERE / "skyrl_programs.py"), program, str(small_learner())], folder)


def test_a_batch_of_skyrl_has_every_sampled_token_once(tmp_path: Path) -> None:
    found = play("plain", tmp_path)
    assert found["rows"] == 16
    assert found["trained"] == found["sampled"] > 16 * 8
    assert found["worst"] < 1e-4
    assert found["mean"] == pytest.approx(found["metrics"]["hermes_rl/rewards/right_mean"])
    assert set(found["rewards"]) <= {0.0, 1.0}


def test_sequences_of_a_rollout_are_steps_of_one_trajectory(tmp_path: Path) -> None:
    found = play("steps", tmp_path)
    assert found["last"] == 16
    assert found["rows"] > 24
    assert found["merged"] == found["rows"]  # no sequence is the beginning of another
    assert found["trained"] == found["sampled"]
    assert found["worst"] < 1e-4


def test_failures_are_masked_and_counted(tmp_path: Path) -> None:
    found = play("failing", tmp_path)
    assert 0 < found["errors"] == found["masked"] < 16
    assert found["metrics"]["hermes_rl/unscored"] == found["errors"]
    assert found["worst"] < 1e-4


def test_advantages_are_those_of_the_estimators(tmp_path: Path) -> None:
    found = play("estimators", tmp_path)
    assert found.keys() == {"mean", "std", "rloo", "returns"}
    assert max(found.values()) < 1e-9


def test_common_spec_gives_the_same_scores_and_tokens_in_every_integration(tmp_path: Path) -> None:
    found = play("doors", tmp_path)
    require_as_everywhere(found["plain"], compared=True)
    require_as_everywhere(found["steps"], compared=True)
