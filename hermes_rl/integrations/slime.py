"""Door to slime: a spec as its `--custom-generate-function-path`, `generate`, with the two hooks that go with it.

Owns how a rollout looks to slime; the SGLang servers behind its router sample. A rollout without a score has the reward
None: `whole` leaves its group out, and `rewards` keeps it out of the baseline.
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
from hermes_rl.integrations.opened import require_no_comparing
from hermes_rl.integrations.pull import CUT, NEUTRAL, BatchPlace, Pull, is_scored, row_named

REWARDS = "hermes_rl.integrations.slime.rewards"
_OPENED: dict[tuple[Any, ...], Pull] = {}
"""By event loop and settings: what a process of slime's shares between its rollouts."""


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Play the row that a sample's metadata names, and return the sample; a list of them with the hook `rewards`.

    Settings are attributes of `args`, from slime's `--custom-config-path`: `hermes_spec`, and, where they are not to be
    the default, `hermes_renderer`, `hermes_sampling`, `hermes_replays`, `hermes_allow_inexact` and `hermes_workers`.

    Raises:
        UserError: settings exclude each other, or the rollout is none that slime can take.
    """
    pull = _pull(args)
    require_no_comparing(await pull.open(), "slime")
    named = {**(sample.metadata or {}), "split": "eval" if evaluation else "train"}
    split, key = row_named(named, "a sample has no `key` in its metadata", "slime")
    place = BatchPlace(key, f"{key}@{sample.group_index}", 0, 1)
    rollout = await pull.play(place, split, _sampling(args, pull, sampling_params))
    # slime wants one shape from all rollouts: lists, where its reward hook knows how to count them.
    several = getattr(args, "custom_reward_post_process_path", None) == REWARDS and not evaluation
    sample.metadata = {**sample.metadata, "ending": str(rollout.ending), "error": rollout.error}
    sample.rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
    if not is_scored(rollout):
        sample.status, sample.remove_sample = type(sample).Status.ABORTED, True
        sample.reward = math.nan if evaluation else None
        return [sample] if several else sample
    examples = await asyncio.to_thread(pull.examples, rollout)
    if several:
        return [_sample(sample, rollout, example) for example in examples]
    if len(examples) > 1 and not evaluation:
        raise UserError(
            f"rollout {rollout.id} has {len(examples)} sequences, and slime's own baseline takes each for a rollout: "
            f"set --custom-reward-post-process-path {REWARDS}"
        )
    return _sample(sample, rollout, examples[-1])


def _sample(sample: Any, rollout: hermes_rl.Rollout, example: hermes_rl.Example) -> Any:
    filled = copy.copy(sample)
    filled.tokens, filled.response_length = example.prompt_ids + example.response_ids, len(example.response_ids)
    filled.loss_mask, filled.rollout_log_probs = example.mask, example.logprobs
    filled.response = str(rollout.messages[-1].get("content") or "")
    filled.reward, filled.remove_sample, filled.metadata = rollout.score, False, dict(sample.metadata)
    filled.weight_versions = [str(version) for version in dict.fromkeys(example.weights) if version is not None]
    filled.status = type(sample).Status.TRUNCATED if rollout.ending in CUT else type(sample).Status.COMPLETED
    return filled


def whole(args: Any, samples: Sequence[Any], **_: Any) -> bool:
    """Whether a group's rollouts all have a score: slime's `--dynamic-sampling-filter-path`; else it draws another."""
    return not any(sample.remove_sample for sample in _flat(samples))


def rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return raw rewards, and those that slime trains with: its `--custom-reward-post-process-path`.

    As slime's own, but a rollout of several sequences counts once in its group, and one without a score not at all.
    The raw reward of that one, which is only logged, is the mean of the others.
    """
    every = _flat(samples)
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


def _flat(samples: Sequence[Any]) -> list[Any]:
    return [sample for member in samples for sample in (_flat(member) if isinstance(member, list) else [member])]


def _sampling(args: Any, pull: Pull, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the agent's settings with slime's temperature and lengths; refuse what rollouts do not apply."""
    settings = pull.sampling(parameters, neutral={**NEUTRAL, "top_p": (1.0,)})
    bounds = {
        "max_tokens": parameters.get("max_new_tokens"),
        "max_trajectory_tokens": getattr(args, "rollout_max_context_len", None),
    }
    for name, bound in bounds.items():
        known = [
            value for value in (bound, settings.get(name, getattr(pull.env.spec.agent, name))) if value is not None
        ]
        settings.update({name: min(known)} if known else {})
    return settings


def _pull(args: Any) -> Pull:
    names = ("spec", "renderer", "sampling", "replays", "allow_inexact", "workers")
    spec, renderer, sampling, replays, inexact, workers = (getattr(args, f"hermes_{name}", None) for name in names)
    if spec is None:
        raise UserError("name the spec as `hermes_spec` in the file of --custom-config-path")
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    key = asyncio.get_running_loop(), spec, url, workers, replays, inexact, str((renderer, sampling))
    if key not in _OPENED:
        _OPENED[key] = Pull(
            "slime",
            hermes_rl.open_env(spec, workers=workers),
            hermes_rl.Policy.server("sglang", url, None, tokenizer=args.hf_checkpoint, renderer=renderer),
            sampling=sampling,
            where="--rollout-temperature",
            replays=2 if replays is None else replays,
            allow_inexact=bool(inexact),
        )
    return _OPENED[key]


async def close() -> None:
    """End what is played in this process and release everything."""
    opened = list(_OPENED.values())
    _OPENED.clear()
    for pull in opened:
        await pull.close()
