"""An environment without sandbox or server, whose rollouts do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.data.rows import Row
from hermes_rl.rollouts.environment import EndingPolicy
from hermes_rl.rollouts.rollout import Rollout, RolloutKey
from hermes_rl.scoring.reward_value import RewardValue
from hermes_rl.servers.base import POLICY, ChatReply, ChatRequest
from hermes_rl.servers.usage import Usage, begin_call, end_call
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tools.base import ToolRuntime

Act = Callable[[RolloutKey], Any]


def row(key: str = "row") -> Row:
    return Row(key=key, columns={"key": key}, index=0, digest="0" * 64)


def rows(count: int) -> list[Row]:
    return [row(f"row{number}") for number in range(count)]


class Policy:
    """Says "done" after `delay` seconds, and not before its gate is open; counts the calls in flight."""

    scripted = False
    usage: Mapping[str, Any] = {}
    """What its server reports beside the counts of tokens."""

    def __init__(self, delay: float = 0.0, finish_reason: str = "stop") -> None:
        self.delay, self.finish_reason = delay, finish_reason
        self.in_flight = self.most = self.calls = 0
        self.requests: list[ChatRequest] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def chat(self, request: ChatRequest) -> ChatReply:
        await begin_call(POLICY)
        self.calls += 1
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        self.requests.append(request)
        try:
            await asyncio.sleep(self.delay)
            await self.gate.wait()
        finally:
            self.in_flight -= 1
        message = {"role": "assistant", "content": "done"}
        usage = {"prompt_tokens": 10, "completion_tokens": 1, **self.usage}
        counted = Usage()
        counted.add(usage)
        end_call(POLICY, counted)
        return ChatReply(message, self.finish_reason, usage, model="stub", server_type="stub")

    async def close(self) -> None: ...


@dataclass
class World:
    """`on_grade(key)` returns the reward, or raises; `on_group(rollouts)` may add group-level rewards."""

    on_grade: Act = lambda key: 1.0
    on_group: Callable[[list[Rollout]], Any] | None = None
    on_stop_policies: dict[StopReason, EndingPolicy] = field(default_factory=dict)
    policy: Policy = field(default_factory=Policy)
    teacher: Any = None
    name: str = "world"
    seed: int = 0
    opened: int = 0
    closed: int = 0

    @property
    def has_group_rewards(self) -> bool:
        return self.on_group is not None

    def options(self, split: str) -> LoopOptions:
        return LoopOptions()

    def prompt(self, row: Row) -> list[dict[str, Any]]:
        return [{"role": "user", "content": row.key}]

    async def user(self, key: RolloutKey, runtime: ToolRuntime) -> None:
        return None

    def program(self, key: RolloutKey, runtime: ToolRuntime, context: Any) -> None:
        return None

    @asynccontextmanager
    async def runtime(self, key: RolloutKey) -> AsyncIterator[ToolRuntime]:
        self.opened += 1
        try:
            async with ToolRuntime(task_id=key.id) as runtime:
                yield runtime
        finally:
            self.closed += 1

    async def grade(self, rollout: Rollout, runtime: ToolRuntime) -> None:
        rollout.rewards["reward"] = RewardValue(self.on_grade(rollout.key))

    async def grade_group(self, rollouts: list[Rollout]) -> None:
        if self.on_group is not None:
            self.on_group(rollouts)

    def score(self, rollout: Rollout) -> float:
        return sum(value.value or 0.0 for value in rollout.rewards.values())

    def credit(self, rollout: Rollout) -> tuple[float, ...] | None:
        return None

    def on_stop_policy(self, stop_reason: StopReason) -> EndingPolicy:
        return self.on_stop_policies.get(stop_reason, "grade")
