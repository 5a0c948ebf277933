"""Door to SkyRL: a spec as its generator, `HermesGenerator`.

Owns how rollouts look to SkyRL; its inference engines sample. SkyRL has no rollout without a score: see `_stand_ins`.
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
from hermes_rl.integrations.opened import (
    FAILURES,
    Played,
    is_scored,
    logprobs_of,
    require_a_score,
    require_carried,
    require_in_logprobs,
    require_neutral,
    require_own_baseline,
    values_of,
    without_trainers,
)

TIMES = "trajectory_generation_times"
"""The seconds of a rollout, which SkyRL wants for each of its rows."""


class HermesGenerator:
    """A spec as a generator of SkyRL: `BasePPOExp.get_generator` returns one.

    Args:
        spec: a loaded spec, a path, or the name of a shipped one.
        generator_cfg: SkyRL's `cfg.generator`.
        inference_engine_client: SkyRL's client of its engines.
        tokenizer: SkyRL's tokenizer.
        renderer: as `renderer` of a server in a spec; its name is enough.
        sampling: settings of the spec's `agent`, such as `{"max_turns": 4}`. Temperature and top_p are SkyRL's.
        concurrency: rollouts at a time, or groups where a reward compares their members; default: all of a batch.
        replays: how often a rollout is played again after a failure that was not the policy's doing.
        allow_inexact: train also on tokens that are not proven to be those that were sampled.
        environ: where `${VAR}` and the keys of servers are looked up.
    """

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
        replays: int = 2,
        allow_inexact: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._env = hermes_rl.open_env(spec, environ=environ)
        self._opening: asyncio.Task[Any] | None = None
        self._step_wise, self._engine = bool(generator_cfg.step_wise_trajectories), inference_engine_client
        engine = generator_cfg.inference_engine.engine_init_kwargs or {}
        self._raw = engine.get("logprobs_mode") != "processed_logprobs"
        given = generator_cfg.max_input_length
        context = None if given is None else given + generator_cfg.sampling_params.max_generate_length
        self._longest = int(generator_cfg.sampling_params.max_generate_length)
        self._policy = hermes_rl.Policy.sampling(self._sample, tokenizer, renderer=renderer, context=context)
        self._sampling = without_trainers(sampling, "SkyRL", "generator.sampling_params")
        self._replays, self._exact = replays, not allow_inexact
        self._room = asyncio.Semaphore(concurrency or 1_000_000)

    async def generate(self, input_batch: Mapping[str, Any], disable_tqdm: bool = True) -> dict[str, Any]:
        """Play a rollout for each prompt of a GeneratorInput, and return a GeneratorOutput.

        Raises:
            UserError: settings exclude each other, or rollouts are none that SkyRL can take.
            RunError: not one rollout could be scored, and that was not the policy's doing.
        """
        if self._opening is None:
            self._opening = asyncio.create_task(self._env.open())
        await asyncio.shield(self._opening)
        require_own_baseline(self._env, "SkyRL")
        names, extras = input_batch["trajectory_ids"], input_batch["env_extras"]
        metadata = input_batch.get("batch_metadata")
        evaluated = metadata is not None and metadata.training_phase == "eval"
        given = {
            "split": "eval" if evaluated else "train",
            "sampling": {
                **self._sampling,
                **_sampling(input_batch["sampling_params"] or {}, self._raw and not evaluated),
            },
            "replays": self._replays,
        }
        places: dict[str, list[int]] = {}
        for place, name in enumerate(names):
            places.setdefault(name.instance_id, []).append(place)
        work = [
            asyncio.create_task(self._group(_key_of(extras[members[0]]), f"{group}@{_step(metadata)}", members, given))
            for group, members in places.items()
        ]
        try:
            groups = await asyncio.gather(*work)
        finally:
            for task in work:
                task.cancel()
        played = {place: one for members, found in zip(places.values(), groups, strict=True)
                  for place, one in zip(members, found, strict=True)}  # fmt: skip
        return await asyncio.to_thread(self._output, [played[place] for place in range(len(names))], names)

    async def close(self) -> None:
        """End what is played and release everything."""
        await self._env.close()

    async def _group(self, key: str, group: str, members: Sequence[int], given: Mapping[str, Any]) -> list[Played]:
        """Play the members of a group; together, where a reward compares them."""
        size = len(members)

        async def one(index: int) -> Played:
            async with self._room:
                rollout = await self._env.play(key, self._policy, group, index, size, **given)
            return rollout, rollout.ending, rollout.error

        if not self._env.comparing or size == 1:
            return list(await asyncio.gather(*map(one, range(size))))
        async with self._room:
            group_played = await self._env.play_group(key, size, self._policy, group, **given)
        if group_played.dropped is not None:
            return [(None, group_played.dropped, group_played.detail)] * size
        return [
            (rollout, rollout.ending, rollout.error)
            for rollout in sorted(group_played.rollouts, key=lambda member: member.key.index)
        ]

    async def _sample(self, ids: list[int], sampling: hermes_rl.Sampling) -> hermes_rl.Sampled:
        most = min(sampling.max_tokens, self._longest)
        asked = {
            "temperature": sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": most,
            "stop_token_ids": list(sampling.stop_ids),
            "skip_special_tokens": False,
            "logprobs": 0,
        }
        answer = await self._engine.generate(
            {
                "prompts": None,
                "prompt_token_ids": [ids],
                "session_ids": [sampling.rollout],
                "sampling_params": asked,
                "mm_features": None,
                "cache_salt": None,
            }
        )
        (tokens,), (finish,), logprobs = answer["response_ids"], answer["stop_reasons"], answer["response_logprobs"]
        if not logprobs:
            raise UserError("SkyRL's engine gave no log-probabilities, without which tokens cannot be trained on")
        return hermes_rl.Sampled(tokens, logprobs[0], finish)

    def _output(self, played: Sequence[Played], names: Sequence[Any]) -> dict[str, Any]:
        """Return rollouts as SkyRL takes them."""
        require_a_score(played)
        fields = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards", "stop_reasons")
        out: dict[str, Any] = {name: [] for name in (*fields, "trajectory_ids", "is_last_step", "env_metrics", TIMES)}
        stand_ins = _stand_ins(played, [name.instance_id for name in names])
        for (rollout, ending, _), name, stand_in in zip(played, names, stand_ins, strict=True):
            # One without a score is a single token, which is not trained on.
            examples = [hermes_rl.Example([0], [0], [0], [0.0], (None, None))]
            if is_scored(rollout):
                examples = require_carried(rollout, "SkyRL").examples(one=not self._step_wise, exact=self._exact)
            for number, example in enumerate(examples, start=1):
                last, size = number == len(examples), len(example.response_ids)
                row = (
                    example.prompt_ids,
                    example.response_ids,
                    example.mask,
                    logprobs_of(example, "SkyRL"),
                    [0.0] * (size - 1) + [stand_in if last else 0.0] if self._step_wise else stand_in,
                    "length" if ending in ("length", "token_budget") else "stop" if ending.graded else "error",
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
        return {**out, **empty, "rollout_metrics": _metrics(played)}


def _stand_ins(played: Sequence[Played], groups: Sequence[str]) -> list[float]:
    """Return the score of each rollout, and for one without a score what leaves its group's comparison as it is.

    SkyRL computes mean and standard deviation from all members of a group. Those without a score stand in pairs above
    and below the mean of the others, as far away as the others' standard deviation asks for, so that both numbers are
    those of the members that have a score. A single one, or an odd one, is at the mean: alone it cannot keep both.
    Where no member has a score, all are at the mean of the batch. Nothing of them is trained on.
    """
    scores: dict[str, list[float]] = {}
    lost: dict[str, list[int]] = {}
    for place, ((rollout, _, _), group) in enumerate(zip(played, groups, strict=True)):
        if is_scored(rollout) and rollout.score is not None:
            scores.setdefault(group, []).append(rollout.score)
        else:
            lost.setdefault(group, []).append(place)
    every = [score for known in scores.values() for score in known] or [0.0]
    whole = [0.0 if rollout is None or rollout.score is None else rollout.score for rollout, _, _ in played]
    for group, places in lost.items():
        known = scores.get(group, [fmean(every)])
        mean, paired = fmean(known), len(places) // 2 * 2
        distance = stdev(known) * sqrt(len(places) / paired) if paired and len(known) > 1 else 0.0
        for number, place in enumerate(places):
            whole[place] = mean if number >= paired else mean + (distance if number % 2 else -distance)
    return whole


def _metrics(played: Sequence[Played]) -> dict[str, float]:
    """Return what SkyRL logs; it adds up the parts of a batch that it asks for group by group, but for means."""
    ended = Counter(ending for _, ending, _ in played)
    scored = [rollout for rollout, _, _ in played if is_scored(rollout)]
    names = dict.fromkeys(name for rollout in scored for name in values_of(rollout))
    rewards = {name: [values_of(rollout)[name] for rollout in scored if name in values_of(rollout)] for name in names}
    return {
        "hermes_rl/unscored": float(len(played) - len(scored)),
        **{f"hermes_rl/failed/{cause}": float(ended[cause]) for cause in FAILURES},
        **{f"hermes_rl/rewards/{name}_mean": fmean(values) for name, values in rewards.items()},
        **({"hermes_rl/turns_mean": fmean(rollout.turns for rollout in scored)} if scored else {}),
    }


def _step(metadata: Any) -> int:
    return 0 if metadata is None else int(metadata.global_step)


def _key_of(extra: Mapping[str, Any]) -> str:
    if "key" not in extra:
        raise UserError("a prompt has no `key` of a row: write the data as docs/integrations/skyrl.md shows")
    return str(extra["key"])


def _sampling(given: Mapping[str, Any], raw: bool) -> dict[str, Any]:
    """Return SkyRL's temperature and top_p; refuse what rollouts do not apply, or what log-probabilities do not know.

    Args:
        given: `generator.sampling_params` as its engine takes them.
        raw: the engine's log-probabilities, which are trained on, are those before temperature and top_p.
    """
    require_neutral(given, "generator.sampling_params")
    settings = {name: float(given[name]) for name in ("temperature", "top_p") if name in given}
    if raw:
        require_in_logprobs(
            settings, "set generator.inference_engine.engine_init_kwargs.logprobs_mode=processed_logprobs"
        )
    return settings
