"""Integrate with tinker-cookbook: offer a spec as its `EnvGroupBuilder` and `RLDataset`, in token ids.

The cookbook samples; the spec provides tools, simulated user, budgets, stop reasons and rewards. This module converts
rollouts to the cookbook's results. A rollout without a score raises, so that the cookbook's strategies retry or drop
it; it never gets the reward 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import chz
import tinker
from tinker_cookbook.rl.types import (
    PARSE_ERROR_MASKED_METRIC_KEY,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
    StopReason,
)

import hermes_rl
from hermes_rl.errors import UserError
from hermes_rl.integrations.base import read_agent_settings
from hermes_rl.integrations.common import (
    require_carried,
    require_no_comparing,
    require_one_stepped,
    shared_environment,
    tasks_of,
    values_of,
)

T = TypeVar("T")
_STOPPED = {
    hermes_rl.StopReason.MAX_TURNS: StopReason.MAX_TURNS,
    hermes_rl.StopReason.LENGTH: StopReason.MAX_TOKENS,
    hermes_rl.StopReason.TOKEN_BUDGET: StopReason.CONTEXT_OVERFLOW,
    hermes_rl.StopReason.TIMEOUT: StopReason.ROLLOUT_TIMEOUT,
}
"""Stop reasons with an equivalent in the cookbook; all others map to COMPLETED."""


class RolloutFailed(RuntimeError):
    """The rollout has no score: `RetryOnFailure` retries it, and `FailFast`, the default, stops training."""


class HermesEnv(Env):
    """One rollout of a row; the cookbook answers each of its model calls with token ids."""

    def __init__(self, group: HermesGroup, name: str) -> None:
        self._group, self._name = group, name
        self._env: Any = None
        self._sync: Any = None
        self._session: Any = None

    async def initial_observation(self) -> Any:
        """Start the rollout; return the prompt in token ids with the stop ids, or the result if it ended at once.

        A rollout ends at once if its prompt leaves no room for a reply.

        Raises:
            RolloutFailed: the rollout ended without a score.
            UserError: the spec does not work for the row or with the cookbook.
        """
        await self.close()
        group = self._group
        self._env, self._sync = await asyncio.to_thread(shared_environment, group.spec)
        require_no_comparing(self._env, "tinker-cookbook")
        require_one_stepped(self._env, "tinker-cookbook")
        self._session = await self._on_loop(
            self._env.session(
                group.key,
                group=self._name,
                split=group.split,
                sampling=group.sampling,
                tokenizer=group.tokenizer,
                renderer=group.renderer,
            )
        )
        turn = await self._on_loop(self._session.start())
        if turn is not None:
            return tinker.ModelInput.from_ints(turn.prompt_ids), list(turn.stop_ids)
        ended = self._final_step()
        return InitialObservationOverflow(reward=ended.reward, metrics=ended.metrics, logs=ended.logs)

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        """Apply the sampled ids, and return the complete conversation in token ids, or the score if it ended.

        Raises:
            RolloutFailed: the rollout ended without a score.
            UserError: the rollout was not started.
        """
        if self._session is None:
            raise UserError("call initial_observation first: no rollout has started")
        finish = (extra or {}).get("stop_reason")
        turn = await self._on_loop(self._session.step(list(action), finish=finish))
        if turn is None:
            return self._final_step()
        return StepResult(0.0, False, tinker.ModelInput.from_ints(turn.prompt_ids), list(turn.stop_ids))

    @property
    def rollout(self) -> hermes_rl.Rollout | None:
        """The finished rollout, or None while it is running."""
        rollout: hermes_rl.Rollout | None = self._session.rollout if self._session is not None else None
        return rollout

    async def close(self) -> None:
        """End the rollout if it is still running, and release its sandbox."""
        if self._session is not None:
            await self._on_loop(self._session.close())

    def _final_step(self) -> StepResult:
        rollout = self._session.rollout
        if rollout.score is None:
            raise RolloutFailed(f"{rollout.stop_reason}: {rollout.error}")
        require_carried(rollout, "tinker-cookbook")
        reason = _STOPPED.get(rollout.stop_reason, StopReason.COMPLETED)
        return StepResult(
            rollout.score,
            True,
            tinker.ModelInput.from_ints([]),
            [],
            metrics={**values_of(rollout), "turns": rollout.turns, f"stop/{reason}": 1.0},
            logs={"stop_reason": str(rollout.stop_reason), "row": self._group.key},
        )

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        result: T = await asyncio.wrap_future(self._sync.submit(work))
        return result


class HermesGroup(EnvGroupBuilder):
    """The rollouts of one row. A group can be pickled; the process that runs it opens the spec.

    Args:
        spec: a path, or the name of a shipped spec.
        key: the key of the row.
        tokenizer: the tokenizer of the trained model: a hub name or a directory.
        size: the number of members.
        renderer: the name of a renderer, as in a spec's server.
        sampling: settings of the spec's `agent`, such as `{"max_turns": 4}`. The cookbook sets temperature and top_p.
        split: "train", or "eval" for the agent's evaluation settings.
    """

    def __init__(
        self,
        spec: str,
        key: str,
        tokenizer: str,
        size: int,
        renderer: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        split: str = "train",
    ) -> None:
        self.spec, self.key, self.tokenizer, self.size = spec, key, tokenizer, size
        self.renderer, self.split = renderer, split
        self.sampling = read_agent_settings(sampling, "tinker-cookbook", "the cookbook's configuration")
        self._open_envs: list[HermesEnv] = []

    async def make_envs(self) -> Sequence[HermesEnv]:
        """Return new members; each starts its rollout at `initial_observation`."""
        envs = [HermesEnv(self, self.key) for _ in range(self.size)]
        self._open_envs += envs
        return envs

    async def compute_group_rewards(self, trajectory_group: list[Any], env_group: Sequence[Any]) -> list[Any]:
        """Return 0 per member, since scores are step rewards, and exclude masked rollouts from the loss.

        Raises:
            RolloutFailed: the cookbook stopped a rollout at a limit that the spec does not have, before it was scored.
        """
        for trajectory, member in zip(trajectory_group, env_group, strict=True):
            if member.rollout is None:
                raise RolloutFailed(
                    f"the cookbook ended a rollout ({trajectory.stop_reason}) before it was scored: put the bound into "
                    "the spec's `agent`"
                )
            if member.rollout.masked:  # this metric excludes turns from the loss, but not from the baseline
                for transition in trajectory.transitions:
                    transition.metrics[PARSE_ERROR_MASKED_METRIC_KEY] = 1.0
        return [(0.0, {}) for _ in trajectory_group]

    async def cleanup(self) -> None:
        """Release the sandboxes of rollouts that did not finish."""
        envs, self._open_envs = self._open_envs, []
        await asyncio.gather(*(env.close() for env in envs))

    def logging_tags(self) -> list[str]:
        """Return the tags by which the cookbook aggregates metrics."""
        return ["hermes-rl"]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_envs": []}


class HermesDataset(RLDataset):
    """Batches of `per_batch` groups, each row once; an incomplete last batch is dropped."""

    def __init__(self, groups: Sequence[HermesGroup], per_batch: int) -> None:
        self._groups, self._per_batch = groups, per_batch

    def get_batch(self, index: int) -> Sequence[HermesGroup]:
        """Return the groups of the batch at an index."""
        return self._groups[index * self._per_batch : (index + 1) * self._per_batch]

    def __len__(self) -> int:
        return len(self._groups) // self._per_batch


@chz.chz
class HermesDatasetBuilder(RLDatasetBuilder):
    """Builder for `dataset_builder` of the cookbook's training, with the rows of a spec."""

    spec: str
    tokenizer: str
    per_batch: int
    group_size: int
    rows: int | None = None
    renderer: str | None = None

    async def __call__(self) -> tuple[HermesDataset, None]:
        """Return the training dataset, and None for the evaluation dataset.

        Raises:
            UserError: the spec is wrong or cannot run here, or its rows do not fill a batch.
        """
        tasks = await asyncio.to_thread(tasks_of, self.spec, "train", self.rows, "tinker-cookbook")
        if self.per_batch < 1:
            raise UserError(f"per_batch is {self.per_batch}, and not at least 1")
        if len(tasks) < self.per_batch:
            raise UserError(f"{len(tasks)} rows make no batch of {self.per_batch}: lower `per_batch`")
        groups = [HermesGroup(self.spec, key, self.tokenizer, self.group_size, self.renderer) for key, _ in tasks]
        return HermesDataset(groups, self.per_batch), None
