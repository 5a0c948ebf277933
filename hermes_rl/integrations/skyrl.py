"""Integrate with SkyRL: offer a spec as its generator, `HermesGenerator`.

This module converts rollouts to SkyRL's output; SkyRL's inference engines sample. SkyRL cannot represent a rollout
without a score; `_stand_ins` computes a neutral score for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import hermes_rl
from hermes_rl.errors import UserError
from hermes_rl.integrations.base import (
    CUT,
    FAILURES,
    BatchPlace,
    BatchResult,
    TrainerAdapter,
    is_scored,
    parameters,
    require_a_score,
    row_named,
)
from hermes_rl.integrations.common import logprobs_of, values_of
from hermes_rl.spec.new_names import with_renamed_parameters

RAW = "set generator.inference_engine.engine_init_kwargs.logprobs_mode=processed_logprobs"
"""Advice for engines whose log-probabilities are computed before temperature and top_p are applied."""
TIMES = "trajectory_generation_times"
"""Column with the duration of each rollout, in seconds."""


class HermesGenerator:
    """A SkyRL generator that runs a spec; return it from `BasePPOExp.get_generator`.

    Args:
        spec: a loaded spec, a path, or the name of a shipped spec.
        generator_cfg: SkyRL's `cfg.generator`.
        inference_engine_client: SkyRL's client for its engines.
        tokenizer: SkyRL's tokenizer.
        renderer, sampling, concurrency, retries, allow_inexact: as for `TrainerAdapter`.
        environ: variables used for `${VAR}` and for server keys.
    """

    @with_renamed_parameters
    def __init__(
        self,
        spec: hermes_rl.Spec | str | Path,
        generator_cfg: Any,
        inference_engine_client: Any,
        tokenizer: Any,
        *,
        renderer: str | Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
        retries: int = 2,
        allow_inexact: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._step_wise, self._engine = bool(generator_cfg.step_wise_trajectories), inference_engine_client
        engine = generator_cfg.inference_engine.engine_init_kwargs or {}
        self._raw = engine.get("logprobs_mode") != "processed_logprobs"
        limit = generator_cfg.max_input_length
        context = None if limit is None else limit + generator_cfg.sampling_params.max_generate_length
        self._longest = int(generator_cfg.sampling_params.max_generate_length)
        self._pull = TrainerAdapter(
            "SkyRL",
            hermes_rl.open_env(spec, environ=environ),
            hermes_rl.Policy.sampling(self._sample, tokenizer, renderer=renderer, context=context),
            sampling=sampling,
            config_location="generator.sampling_params",
            retries=retries,
            concurrency=concurrency,
            allow_inexact=allow_inexact,
        )

    async def generate(self, input_batch: Mapping[str, Any], disable_tqdm: bool = True) -> dict[str, Any]:
        """Run a rollout for each prompt of a GeneratorInput, and return a GeneratorOutput.

        Raises:
            UserError: settings conflict, or SkyRL cannot represent a rollout.
            RunError: infrastructure failed every rollout of the batch, or no rollout called the policy.
        """
        await self._pull.open()
        names, metadata = input_batch["trajectory_ids"], input_batch.get("batch_metadata")
        step = 0 if metadata is None else int(metadata.global_step)
        evaluated = metadata is not None and metadata.training_phase == "eval"
        split = "eval" if evaluated else "train"
        sampling = self._pull.sampling(
            input_batch["sampling_params"] or {}, RAW if self._raw and not evaluated else None
        )
        sizes, member_counts, positions = Counter(name.instance_id for name in names), Counter[Any](), []
        extras = input_batch["env_extras"]
        if len(extras) != len(names):
            raise UserError(f"SkyRL's batch has {len(names)} trajectory_ids and {len(extras)} env_extras")
        for name, extra in zip(names, extras, strict=True):
            group = name.instance_id
            _, key = row_named(extra, "a prompt has no `key` of a row", "skyrl", split)
            positions.append(BatchPlace(key, f"{group}@{step}", member_counts[group], sizes[group]))
            member_counts[group] += 1
        played = await self._pull.play_all(positions, split, sampling)
        return await asyncio.to_thread(self._output, played, names)

    async def close(self) -> None:
        """Cancel running rollouts and release all resources."""
        await self._pull.close()

    async def _sample(self, ids: list[int], sampling: hermes_rl.Sampling) -> hermes_rl.Sampled:
        settings = {
            **parameters(sampling, self._longest),
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "skip_special_tokens": False,
            "logprobs": 0,
        }
        answer = await self._engine.generate(
            {
                "prompts": None,
                "prompt_token_ids": [ids],
                "session_ids": [sampling.rollout],
                "sampling_params": settings,
                "mm_features": None,
                "cache_salt": None,
            }
        )
        (tokens,), (finish,), logprobs = answer["response_ids"], answer["stop_reasons"], answer["response_logprobs"]
        if logprobs is None or not len(logprobs):
            raise UserError("SkyRL's engine gave no log-probabilities, without which tokens cannot be trained on")
        return hermes_rl.Sampled(tokens, logprobs[0], finish)

    def _output(self, played: Sequence[BatchResult], names: Sequence[Any]) -> dict[str, Any]:
        """Return rollouts as a GeneratorOutput: one entry per rollout, or per sequence with step-wise trajectories."""
        require_a_score(played)
        fields = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards", "stop_reasons")
        out: dict[str, Any] = {name: [] for name in (*fields, "trajectory_ids", "is_last_step", "env_metrics", TIMES)}
        stand_ins = _stand_ins(played, [name.instance_id for name in names])
        for (rollout, stop_reason, _), name, stand_in in zip(played, names, stand_ins, strict=True):
            # SkyRL requires tokens: a rollout without a score becomes a single token with mask 0.
            examples = [hermes_rl.Example([0], [0], [0], [0.0], (None, None))]
            if is_scored(rollout):
                examples = self._pull.examples(rollout, one=not self._step_wise)
            for sequence_index, example in enumerate(examples, start=1):
                last, size = sequence_index == len(examples), len(example.response_ids)
                row = (
                    example.prompt_ids,
                    example.response_ids,
                    example.mask,
                    logprobs_of(example, "SkyRL"),
                    [0.0] * (size - 1) + [stand_in if last else 0.0] if self._step_wise else stand_in,
                    "length" if stop_reason in CUT else "stop" if stop_reason.graded else "error",
                    name,
                    last,
                    {} if rollout is None else values_of(rollout),
                    0.0 if rollout is None else rollout.timings.get("total", 0.0),
                )
                for column, value in zip(out.values(), row, strict=True):
                    column.append(value)
        if not self._step_wise:
            out["is_last_step"] = None
        empty = dict.fromkeys(("rollout_expert_indices", "pixel_values", "image_grid_thw"))
        return {**out, **empty, "rollout_metrics": _batch_metrics(played)}


def _stand_ins(played: Sequence[BatchResult], groups: Sequence[str]) -> list[float]:
    """Return one score per rollout, with neutral values for rollouts without a score.

    SkyRL computes mean and standard deviation from all members of a group. The missing scores are therefore placed in
    pairs above and below the mean of the scored members, at the distance that preserves both the mean and the standard
    deviation. An unpaired missing score gets the mean, which lowers the standard deviation. If no member of a group
    has a score, all get the mean of the batch. No token of these rollouts is trained on.
    """
    scores: dict[str, list[float]] = {}
    unscored: dict[str, list[int]] = {}
    for index, ((rollout, _, _), group) in enumerate(zip(played, groups, strict=True)):
        if is_scored(rollout) and rollout.score is not None:
            scores.setdefault(group, []).append(rollout.score)
        else:
            unscored.setdefault(group, []).append(index)
    every = [score for group_scores in scores.values() for score in group_scores] or [0.0]
    filled_scores = [0.0 if rollout is None or rollout.score is None else rollout.score for rollout, _, _ in played]
    for group, indices in unscored.items():
        group_scores = scores.get(group, [fmean(every)])
        mean, paired = fmean(group_scores), len(indices) // 2 * 2
        distance = stdev(group_scores) * sqrt(len(indices) / paired) if paired and len(group_scores) > 1 else 0.0
        for rank, index in enumerate(indices):
            filled_scores[index] = mean if rank >= paired else mean + (distance if rank % 2 else -distance)
    return filled_scores


def _batch_metrics(played: Sequence[BatchResult]) -> dict[str, float]:
    """Return the metrics that SkyRL logs.

    SkyRL may request a batch group by group. It then sums these metrics, and averages those named `…_mean`.
    """
    ended = Counter(stop_reason for _, stop_reason, _ in played)
    scored = [rollout for rollout, _, _ in played if is_scored(rollout)]
    names = dict.fromkeys(name for rollout in scored for name in values_of(rollout))
    rewards = {name: [values_of(rollout)[name] for rollout in scored if name in values_of(rollout)] for name in names}
    return {
        "hermes_rl/unscored": float(len(played) - len(scored)),
        **{f"hermes_rl/failed/{cause}": float(ended[cause]) for cause in FAILURES},
        **{f"hermes_rl/rewards/{name}_mean": fmean(values) for name, values in rewards.items()},
        **({"hermes_rl/turns_mean": fmean(rollout.turns for rollout in scored)} if scored else {}),
    }
