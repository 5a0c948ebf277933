"""Integrate with verl: offer a spec as the agent loop of its rollout workers, `VerlAgentLoop`.

This module converts rollouts to verl's output and gathers the members of a group that rewards compare. verl's own
servers sample. A rollout without a score raises: verl's v1 trainer then drops the group and samples another; the older
trainer stops.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import hermes_rl
from hermes_rl.errors import RunError, UserError, install_command
from hermes_rl.integrations.base import (
    BatchPlace,
    TrainerAdapter,
    parameters,
    read_agent_settings,
    require_score,
    row_named,
)
from hermes_rl.spec.new_names import with_renamed_parameters

GROUP_START_SECONDS = 60.0
"""Seconds within which verl must start all members of a compared group; verl normally starts them together."""


class VerlAgentLoop:
    """Agent loop of one rollout; verl creates one per rollout from the entry in `agent_loop_config_path`.

    Args:
        trainer_config, server_manager, tokenizer: passed by verl, as are all arguments that are not listed below.
        spec: a path, or the name of a shipped spec.
        renderer, sampling, retries, allow_inexact: as for `TrainerAdapter`.
    """

    _workers: ClassVar[dict[tuple[Any, ...], _Worker]] = {}
    """Resources that the rollouts of a verl process share, by event loop, server manager and settings."""

    @with_renamed_parameters
    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        spec: str,
        renderer: str | Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        retries: int = 2,
        allow_inexact: bool = False,
        *,
        name: str = "",
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        hf_model_type: str | None = None,
        tools: Any = None,
    ) -> None:
        self._config = trainer_config.config.actor_rollout_ref.rollout
        _require_exact_settings(self._config)
        self._made_of = spec, server_manager, tokenizer, renderer
        agent_settings = read_agent_settings(sampling, "verl", "the configuration of verl")
        self._settings: dict[str, Any] = {
            "sampling": agent_settings,
            "retries": retries,
            "allow_inexact": allow_inexact,
        }

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> Any:
        """Run the row that a sample names, and return an AgentLoopOutput.

        If verl passes `session_id` (its v1 trainer), return a list with one AgentLoopOutput per sequence.

        Raises:
            RunError: the rollout has no score.
            UserError: settings conflict, or verl cannot represent the rollout.
        """
        try:
            from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
        except ImportError as error:
            raise UserError(f"VerlAgentLoop needs verl 0.9 ({error}): {install_command('verl')}") from error
        worker = await self._worker()
        rollout, several = await self._play(worker, sampling_params, sample), "session_id" in sample
        examples = await asyncio.to_thread(worker.examples, require_score(rollout), one=not several)
        longest = len(examples[0].prompt_ids)
        if not several and longest > self._config.prompt_length:
            raise UserError(f"a prompt has {longest} tokens: set data.max_prompt_length to at least that")
        timings = {"generate_sequences": "generation", "tool_calls": "tools", "compute_score": "rewards"}
        metrics = AgentLoopMetrics(
            **{theirs: rollout.timings.get(timing_key, 0.0) for theirs, timing_key in timings.items()}
        )
        values = {name: reward.value for name, reward in rollout.rewards.items()}
        # verl requires the same names from every rollout, so a reward without a value is NaN.
        rewards = {name: math.nan if values.get(name) is None else values[name] for name in worker.env.spec.rewards}
        outputs = [
            AgentLoopOutput(
                prompt_ids=example.prompt_ids,
                response_ids=example.response_ids,
                response_mask=example.mask,
                response_logprobs=example.logprobs,
                reward_score=rollout.score,
                num_turns=len(rollout.messages),
                metrics=metrics,
                extra_fields={
                    "min_global_steps": example.weights[0],
                    "max_global_steps": example.weights[1],
                    "stop_reason": str(rollout.stop_reason),
                    "reward_extra_info": rewards,
                },
            )
            for example in examples
        ]
        return outputs if several else outputs[0]

    async def _play(self, worker: _Worker, params: Mapping[str, Any], sample: Mapping[str, Any]) -> hermes_rl.Rollout:
        problem = "a sample has no `split` and `key` in its extra_info"
        split, key = row_named(sample.get("extra_info"), problem, "verl")
        settings, uid = worker.sampling(params), str(sample["uid"]) if "uid" in sample else None
        size = int(self._config.n if split == "train" else self._config.val_kwargs.n)
        compared = worker.env.comparing and size > 1
        if "session_id" not in sample:
            if compared:
                raise UserError(
                    f"{', '.join(worker.env.comparing)} compares the members of a group, and verl's older trainer does "
                    "not identify them: set trainer.use_v1=true"
                )
            return await worker.play(BatchPlace(key, uid, 0, 1), split, settings)
        position = BatchPlace(key, uid, int(sample["session_id"]), size)
        if compared:
            return await worker.together(position, split, settings)
        return await worker.play(position._replace(size=max(size, position.member + 1)), split, settings)

    async def _worker(self) -> _Worker:
        spec, manager, _, renderer = self._made_of
        key = asyncio.get_running_loop(), manager, spec, str(renderer), str(self._settings)
        if key not in self._workers:
            self._workers[key] = _Worker(*self._made_of, self._config, self._settings)
        await self._workers[key].open()
        return self._workers[key]

    @classmethod
    async def close(cls) -> None:
        """Cancel the rollouts of this process and release all resources."""
        opened, cls._workers = cls._workers, {}
        for worker in opened.values():
            await worker.close()


class _Worker(TrainerAdapter):
    """Resources that the rollouts of one process share: environment, policy, and groups whose members are awaited."""

    def __init__(
        self, spec: str, manager: Any, tokenizer: Any, renderer: Any, config: Any, settings: Mapping[str, Any]
    ) -> None:
        async def sample(ids: list[int], sampling: hermes_rl.Sampling) -> hermes_rl.Sampled:
            settings = {**parameters(sampling), "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
            answer = await manager.generate(sampling.rollout, prompt_ids=ids, sampling_params=settings)
            steps = answer.extra_fields
            cut = len(answer.token_ids) >= sampling.max_tokens and answer.token_ids[-1] not in sampling.stop_ids
            return hermes_rl.Sampled(
                answer.token_ids,
                answer.log_probs,
                "abort" if answer.stop_reason in ("aborted", "abort") else "length" if cut else "stop",
                version=steps.get("max_global_steps"),
                oldest=steps.get("min_global_steps"),
            )

        context = config.max_model_len or config.prompt_length + config.response_length
        policy = hermes_rl.Policy.sampling(
            sample, tokenizer, renderer=renderer, context=context, response=config.response_length
        )
        super().__init__("verl", hermes_rl.open_env(spec), policy, **settings)
        self._groups: dict[str, tuple[asyncio.Queue[int], asyncio.Task[hermes_rl.Group]]] = {}
        self._waiting: Counter[asyncio.Task[hermes_rl.Group]] = Counter()

    async def together(self, position: BatchPlace, split: str, sampling: Mapping[str, Any]) -> hermes_rl.Rollout:
        """Run a group after verl has started all of its members, and return the requested member.

        Raises:
            RunError: the group was dropped, or verl did not start all members in time.
            UserError: the member index is out of range.
        """
        if not 0 <= position.member < position.size:
            raise UserError(
                f"a group of {position.size} has members from 0 to {position.size - 1}, not {position.member}"
            )
        uid = str(position.group)
        if uid not in self._groups:
            arrived: asyncio.Queue[int] = asyncio.Queue()
            playing = asyncio.create_task(self._run_full_group(arrived, position, split, sampling))
            playing.add_done_callback(lambda _: self._groups.pop(uid))
            self._groups[uid] = arrived, playing
        arrived, playing = self._groups[uid]
        arrived.put_nowait(position.member)
        self._waiting[playing] += 1
        try:
            group = await asyncio.shield(playing)  # if verl cancels one member, the others still need the group
        finally:
            self._waiting[playing] -= 1
            if not self._waiting[playing]:
                del self._waiting[playing]
                playing.cancel()
        if group.dropped is not None:
            raise RunError(f"group {group.id} has no scores ({group.dropped}: {group.detail})")
        return next(member for member in group.rollouts if member.key.index == position.member)

    async def _run_full_group(
        self, arrived: asyncio.Queue[int], position: BatchPlace, split: str, sampling: Mapping[str, Any]
    ) -> hermes_rl.Group:
        arrived_members: set[int] = set()
        try:
            async with asyncio.timeout(GROUP_START_SECONDS):
                while len(arrived_members) < position.size:
                    arrived_members.add(await arrived.get())
        except TimeoutError:
            raise RunError(
                f"{', '.join(self.env.comparing)} compares the members of a group, and verl has started "
                f"{len(arrived_members)} of {position.size} within {GROUP_START_SECONDS:.0f} s: rollout.n "
                "(val_kwargs.n) has to be the size of every group"
            ) from None
        return await self.run_group(position, split, sampling)


def _require_exact_settings(config: Any) -> None:
    """Raise `UserError` for rollout settings of verl with which log-probabilities do not match the sampled tokens."""
    if not config.calculate_log_probs:
        raise UserError("set actor_rollout_ref.rollout.calculate_log_probs=true: training needs log-probabilities")
    if config.get("logprobs_mode", "processed_logprobs") != "processed_logprobs":
        raise UserError(
            "set actor_rollout_ref.rollout.logprobs_mode=processed_logprobs: training needs those that were sampled"
        )
    if config.get("ignore_eos"):
        raise UserError("actor_rollout_ref.rollout.ignore_eos samples tokens after the end of a turn: remove it")
