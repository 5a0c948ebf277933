"""OpenRLHF's own agent module with rollouts of a spec; its other modules cannot be installed without CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.real.doors_played import require_as_everywhere
from tests.real.environments import HERE, openrlhf_python, small_learner
from tests.real.test_trl import seen

COMPONENT = "OpenRLHF's module of agents"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]


def play(program: str, folder: Path) -> dict[str, Any]:
    return seen([str(openrlhf_python()), str(HERE / "openrlhf_programs.py"), program, str(small_learner())], folder)


def test_responses_of_openrlhf_have_every_sampled_token_once(tmp_path: Path) -> None:
    found = play("batch", tmp_path)
    assert found["base"]
    assert found["responses"] == 16
    assert found["trained"] == found["sampled"] > 16 * 8
    assert found["worst"] < 1e-4
    assert found["scores"] == found["right"]
    assert set(found["scores"]) <= {0.0, 1.0}


def test_advantages_are_those_of_the_estimators(tmp_path: Path) -> None:
    found = play("estimators", tmp_path)
    assert found.keys() == {"mean", "std", "rloo", "returns"}
    assert max(found.values()) < 1e-9


def test_common_spec_gives_the_same_scores_and_tokens_in_every_integration(tmp_path: Path) -> None:
    found = play("doors", tmp_path)
    require_as_everywhere(found["rows"], compared=False)
    assert "rewards.judged.args.fallback, rewards.longest compares the members of a group, and Open" in found["refused"]
