"""A hand-written environment as the core sees it: its hooks behind the `Environment` interface."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from hermes_rl.agent.loop import LoopOptions
from hermes_rl.agent.result import Message
from hermes_rl.data.rows import Row
from hermes_rl.endings import Ending
from hermes_rl.errors import RewardFailure
from hermes_rl.rollouts.compiled import with_thinking
from hermes_rl.rollouts.environment import Treatment
from hermes_rl.rollouts.rollout import Rollout, RolloutKey
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.scoring.grader import RewardFunction, call_reward
from hermes_rl.scoring.value import interpret
from hermes_rl.tools.base import ToolRuntime
from hermes_rl.tools.context import ToolContext

if TYPE_CHECKING:
    from hermes_rl.env.base import HermesAgentBaseEnv

REWARD = "reward"
"""Name under which the value of `compute_reward` is recorded."""


def sandbox_config(config: Any) -> SandboxConfig:
    """The sandbox that the configuration's terminal_* fields describe."""
    backend = "bubblewrap" if config.terminal_backend == "local" else config.terminal_backend
    network = config.terminal_network
    return SandboxConfig(
        backend=backend,
        image=config.terminal_image,
        workdir=config.terminal_workdir,
        env=dict(config.terminal_env),
        network=network if isinstance(network, bool) else tuple(network),
        timeout=config.terminal_timeout,
        lifetime=config.terminal_lifetime,
    )


class HandWritten:
    """Answers the core with `format_prompt`, `compute_reward` and the configuration of an environment."""

    has_group_rewards = False

    def __init__(self, env: HermesAgentBaseEnv) -> None:
        self._env = env
        self.name = env.name or type(env).__name__
        self.seed = env.config.seed

    @property
    def policy(self) -> Any:
        return self._env.server

    async def user(self, key: RolloutKey, runtime: ToolRuntime) -> None:
        """Nobody answers; an environment that has somebody plays its own conversation."""

    @property
    def teacher(self) -> None:
        """Nobody is asked; a spec may name a teacher."""

    def options(self, split: str) -> LoopOptions:
        config = self._env.config
        return LoopOptions(
            max_turns=config.max_agent_turns,
            timeout=config.agent_timeout,
            tool_timeout=max(300.0, config.terminal_timeout),
            max_tokens=config.agent_max_tokens or config.max_token_length,
            temperature=config.agent_temperature,
            reasoning=self._env._reasoning_settings,
            extra_body=config.extra_body,
        )

    def prompt(self, row: Row) -> list[Message]:
        return with_thinking(self._env.format_messages(row.columns), self._env.config.custom_thinking_prompt)

    @asynccontextmanager
    async def machine(self, key: RolloutKey) -> AsyncIterator[ToolRuntime]:
        toolkit = self._env._toolkit_for(key.group)
        sandbox = self._env.sandbox_for(key.row.columns)
        async with ToolRuntime(sandbox, task_id=_unique(key), toolkit=toolkit, run=True) as runtime:
            yield runtime

    async def grade(self, rollout: Rollout, runtime: ToolRuntime) -> None:
        reward = RewardFunction.of(REWARD, self._env.compute_reward)
        arguments = {
            "item": rollout.key.row.columns,
            "result": rollout.result.for_rewards() if rollout.result is not None else None,
            "ctx": ToolContext(runtime.task_id),
        }
        names = list(reward.parameters)[: len(arguments)]
        returned, seconds = await call_reward(reward, dict(zip(names, arguments.values(), strict=True)))
        rollout.rewards[REWARD] = interpret(REWARD, returned, seconds)

    async def grade_group(self, rollouts: list[Rollout]) -> None:
        """A hand-written environment compares rollouts in `postprocess_histories`."""

    def score(self, rollout: Rollout) -> float:
        value = rollout.rewards[REWARD].value
        if value is None:
            raise RewardFailure("compute_reward returned None: it could not tell")
        return value

    def credit(self, rollout: Rollout) -> tuple[float, ...] | None:
        return rollout.rewards[REWARD].per_turn

    def treatment(self, ending: Ending) -> Treatment:
        return "grade"


def _unique(key: RolloutKey) -> str:
    """Two items may be equal and in flight together, so the row's key is not enough for a task id."""
    import uuid

    return f"{key.id}-{uuid.uuid4().hex[:8]}"
