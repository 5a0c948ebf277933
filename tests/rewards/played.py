"""How the tests call a shipped reward: with a rollout that was played, or a sandbox to look into."""

from __future__ import annotations

import asyncio
from typing import Any

from hermes_rl.agent.result import AgentResult, ToolCall
from hermes_rl.scoring.reward_function import call_reward, find_reward
from hermes_rl.scoring.reward_value import RewardValue, interpret
from hermes_rl.tools.context import ToolContext


async def graded(
    name: str, *, result: AgentResult | None = None, ctx: ToolContext | None = None, **args: Any
) -> RewardValue:
    """What the shipped reward `name` says, called as a run calls it."""
    reward = find_reward(name, None)
    offered = reward.select_parameters({"result": result or AgentResult(), "ctx": ctx})
    returned, seconds = await call_reward(reward, {**offered, **reward.arguments(args)})
    return interpret(name, returned, seconds)


def said(text: str | None, *, turns: int = 1, calls: tuple[str, ...] = (), failed: tuple[str, ...] = ()) -> AgentResult:
    """A rollout that ended with `text` after these calls of tools."""
    records = [ToolCall(1, f"c{i}", name, {}, "ok") for i, name in enumerate(calls)]
    records += [ToolCall(1, f"f{i}", name, {}, "no", error="no") for i, name in enumerate(failed)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}, {"role": "assistant", "content": text}]
    return AgentResult(messages=messages, turns_used=turns, tool_calls=records)


async def write(ctx: ToolContext, **files: str) -> None:
    """Files of the agent: `test_a` is written to `test_a.py`."""
    for name, content in files.items():
        command = f"cat > {name}.py <<'END_OF_FILE'\n{content}\nEND_OF_FILE"
        answer = await asyncio.to_thread(ctx.terminal, command)
        assert answer["exit_code"] == 0, answer
