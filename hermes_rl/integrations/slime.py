"""Integrate with slime: offer a spec as its `--custom-generate-function-path` (`generate`), with two matching hooks.

This module converts rollouts to slime's samples; the SGLang servers that slime's router selects do the sampling. A
rollout without a score has the reward None: `whole` drops its group, and `rewards` excludes it from the baseline.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import hermes_rl
from hermes_rl.errors import UserError
from hermes_rl.integrations.base import CUT, NEUTRAL, BatchPlace, TrainerAdapter, is_scored, row_named
from hermes_rl.integrations.common import require_no_comparing

REWARDS = "hermes_rl.integrations.slime.rewards"
_OPENED: dict[tuple[Any, ...], TrainerAdapter] = {}
"""Open specs by event loop and settings; all rollouts of a slime process share them."""


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Run the row that a sample's metadata names, and return the filled sample, or a list with the hook `rewards`.

    Settings are attributes of `args`, from slime's `--custom-config-path`: `hermes_spec` (required), `hermes_renderer`,
    `hermes_sampling`, `hermes_retries`, `hermes_allow_inexact` and `hermes_workers`. With the hook, training returns
    one sample per sequence.

    Raises:
        UserError: settings conflict, or slime cannot represent the rollout.
    """
    pull = _open_adapter(args)
    require_no_comparing(await pull.open(), "slime")
    split = "eval" if evaluation else "train"
    _, key = row_named(sample.metadata, "a sample has no `key` in its metadata", "slime", split)
    position = BatchPlace(key, f"{key}@{sample.group_index}", 0, 1)
    rollout = await pull.play(position, split, _sampling_settings(args, pull, sampling_params))
    # slime requires the same shape for all rollouts. Only our reward hook can count the sequences of a list.
    several = getattr(args, "custom_reward_post_process_path", None) == REWARDS and not evaluation
    sample.metadata = {**sample.metadata, "stop_reason": str(rollout.stop_reason), "error": rollout.error}
    sample.rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
    if not is_scored(rollout):
        sample.status, sample.remove_sample = type(sample).Status.ABORTED, True
        sample.reward = math.nan if evaluation else None
        return [sample] if several else sample
    examples = await asyncio.to_thread(pull.examples, rollout)
    if several:
        return [_fill_sample(sample, rollout, example) for example in examples]
    if len(examples) > 1 and not evaluation:
        raise UserError(
            f"rollout {rollout.id} has {len(examples)} sequences, and slime's own baseline takes each for a rollout: "
            f"set --custom-reward-post-process-path {REWARDS}"
        )
    return _fill_sample(sample, rollout, examples[-1])


def _fill_sample(sample: Any, rollout: hermes_rl.Rollout, example: hermes_rl.Example) -> Any:
    filled = copy.copy(sample)
    filled.tokens, filled.response_length = example.prompt_ids + example.response_ids, len(example.response_ids)
    filled.loss_mask, filled.rollout_log_probs = example.mask, example.logprobs
    filled.response = str(rollout.messages[-1].get("content") or "")
    filled.reward, filled.remove_sample, filled.metadata = rollout.score, False, dict(sample.metadata)
    filled.weight_versions = [str(version) for version in dict.fromkeys(example.weights) if version is not None]
    filled.status = type(sample).Status.TRUNCATED if rollout.stop_reason in CUT else type(sample).Status.COMPLETED
    return filled


def whole(args: Any, samples: Sequence[Any], **_: Any) -> bool:
    """Return True if all rollouts of a group have a score; slime otherwise samples another group.

    This is the hook for slime's `--dynamic-sampling-filter-path`.
    """
    return not any(sample.remove_sample for sample in _flatten(samples))


def rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return the raw rewards and the rewards that slime trains with, one per sample.

    This is the hook for slime's `--custom-reward-post-process-path`. It normalizes as slime does, except that a rollout
    with several sequences counts once in its group and a rollout without a score does not count. The raw reward of
    the latter is only logged; it is the mean of its group, or of the batch if the group has no score.
    """
    every = _flatten(samples)
    groups: dict[Any, dict[Any, float]] = {}
    for sample in every:
        if not sample.remove_sample:
            groups.setdefault(sample.group_index, {})[sample.rollout_id] = sample.reward
    mean = {group: fmean(scores.values()) for group, scores in groups.items()}
    spread = {group: stdev(scores.values()) if len(scores) > 1 else 0.0 for group, scores in groups.items()}
    overall = fmean(mean.values()) if mean else 0.0
    raw = [mean.get(sample.group_index, overall) if sample.remove_sample else float(sample.reward) for sample in every]
    grouped = args.advantage_estimator in ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
    if not (grouped and args.rewards_normalization):
        return raw, raw
    scaled = args.grpo_std_normalization and args.advantage_estimator != "reinforce_plus_plus_baseline"
    return raw, [
        0.0
        if sample.remove_sample
        else (sample.reward - mean[sample.group_index]) / (spread[sample.group_index] + 1e-6 if scaled else 1.0)
        for sample in every
    ]


def _flatten(samples: Sequence[Any]) -> list[Any]:
    return [sample for member in samples for sample in (_flatten(member) if isinstance(member, list) else [member])]


def _sampling_settings(args: Any, pull: TrainerAdapter, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the agent's settings with slime's temperature and lengths.

    Raises:
        UserError: slime sets a sampling parameter that rollouts do not apply.
    """
    settings = pull.sampling(parameters, neutral={**NEUTRAL, "top_p": (1.0,)})
    bounds = {
        "max_tokens": parameters.get("max_new_tokens"),
        "max_trajectory_tokens": getattr(args, "rollout_max_context_len", None),
    }
    for name, bound in bounds.items():
        limits = [
            value for value in (bound, settings.get(name, getattr(pull.env.spec.agent, name))) if value is not None
        ]
        settings.update({name: min(limits)} if limits else {})
    return settings


def _open_adapter(args: Any) -> TrainerAdapter:
    names = ("spec", "renderer", "sampling", "retries", "allow_inexact", "workers")
    spec, renderer, sampling, retries, inexact, workers = (getattr(args, f"hermes_{name}", None) for name in names)
    if spec is None:
        raise UserError("name the spec as `hermes_spec` in the file of --custom-config-path")
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    key = asyncio.get_running_loop(), spec, url, workers, retries, inexact, str((renderer, sampling))
    if key not in _OPENED:
        _OPENED[key] = TrainerAdapter(
            "slime",
            hermes_rl.open_env(spec, workers=workers),
            hermes_rl.Policy.server("sglang", url, None, tokenizer=args.hf_checkpoint, renderer=renderer),
            sampling=sampling,
            config_location="--rollout-temperature",
            retries=2 if retries is None else retries,
            allow_inexact=bool(inexact),
        )
    return _OPENED[key]


async def close() -> None:
    """Cancel the rollouts of this process and release all resources."""
    opened = list(_OPENED.values())
    _OPENED.clear()
    for pull in opened:
        await pull.close()
