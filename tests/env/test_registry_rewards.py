"""Rewards of atroposlib's registry, called like any other."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_rl.agent.result import AgentResult
from hermes_rl.errors import RewardFailure
from hermes_rl.scoring.reward_function import call_reward, find_reward


def said(text: str) -> AgentResult:
    return AgentResult(messages=[{"role": "assistant", "content": text}], turns_used=1)


async def values(name: str, *answers: str, **args: Any) -> object:
    reward = find_reward(name, f"atropos:{name}")
    group = [said(answer) for answer in answers]
    return (await call_reward(reward, {"group": group, **reward.arguments(args)}))[0]


GOOD = "<think>because</think> <answer>\\boxed{4}</answer>"


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("format", {}, [1.0, 0.0]),
        ("format", {"preferred_tags": ["nothing"]}, [0.0, 0.0]),
        ("accuracy", {"solution": "\\boxed{4}"}, [1.0, 0.0]),
        ("reasoning_steps", {}, None),
        ("repetition_penalty", {}, None),
        ("crossword_format", {}, None),
    ],
)
async def test_registry_rewards_without_torch_return_expected_values(
    name: str, args: dict[str, Any], expected: list[float] | None
) -> None:
    found = await values(name, GOOD, "no tags, and \\boxed{5}", **args)
    assert isinstance(found, list) and len(found) == 2 and all(isinstance(value, float) for value in found)
    assert expected is None or found == expected


async def test_its_exceptions_are_failures_and_no_zeros() -> None:
    with pytest.raises(RewardFailure, match="format"):
        await values("format", GOOD, preferred_tags=5)
