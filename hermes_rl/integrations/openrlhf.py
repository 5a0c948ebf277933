"""Door to OpenRLHF: a spec as the `AgentExecutor` of its rollout actors, made by `executor`.

Owns how a rollout looks to OpenRLHF; the vLLM of the actor's process samples. A rollout without a score raises, which
stops training: OpenRLHF has none.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import hermes_rl
from hermes_rl.errors import RunError, UserError
from hermes_rl.integrations.opened import (
    is_scored,
    logprobs_of,
    require_carried,
    require_in_logprobs,
    require_neutral,
    require_own_baseline,
    values_of,
    without_trainers,
)


def executor(
    spec: hermes_rl.Spec | str | Path,
    *,
    renderer: str | Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    processed_logprobs: bool = False,
    replays: int = 2,
    allow_inexact: bool = False,
    environ: Mapping[str, str] | None = None,
) -> type[Any]:
    """Return the class that a file of `--train.agent_func_path` has to name `AgentExecutor`.

    Args:
        spec: a loaded spec, a path, or the name of a shipped one.
        renderer: as `renderer` of a server in a spec; its name is enough.
        sampling: settings of the spec's `agent`, such as `{"max_turns": 4}`. Temperature and top_p are OpenRLHF's.
        processed_logprobs: vLLM's log-probabilities know of temperature and top_p (`logprobs_mode`).
        replays: how often a rollout is played again after a failure that was not the policy's doing.
        allow_inexact: train also on tokens that are not proven to be those that were sampled.
        environ: where `${VAR}` and the keys of servers are looked up.

    Raises:
        UserError: OpenRLHF is not installed, or settings exclude each other.
    """
    try:
        from openrlhf.utils.agent import AgentExecutorBase
    except ImportError as error:
        raise UserError(f"the executor needs OpenRLHF 0.11 ({error}): install it as its documents say") from error
    own = without_trainers(sampling, "OpenRLHF", "its arguments")

    class AgentExecutor(AgentExecutorBase):
        """Plays rollouts of the spec."""

        def __init__(self) -> None:
            self.env = hermes_rl.open_env(spec, environ=environ)
            self._opening: asyncio.Task[Any] | None = None
            self._policies: dict[tuple[Any, ...], hermes_rl.Policy] = {}

        async def execute(
            self,
            prompt: str,
            label: str,
            sampling_params: Any,
            max_length: int,
            hf_tokenizer: Any,
            llm_engine: Any,
            images: Any = None,
        ) -> dict[str, Any]:
            """Play the row that the label names."""
            if self._opening is None:
                self._opening = asyncio.create_task(self.env.open())
            await asyncio.shield(self._opening)
            split, key = _row_of(label)
            require_own_baseline(self.env, "OpenRLHF")
            if self.env.comparing:
                raise UserError(
                    f"{', '.join(self.env.comparing)} compares the members of a group, and OpenRLHF does not say which "
                    "they are"
                )
            given = _sampling(sampling_params, processed_logprobs or split == "eval")
            made_of = llm_engine, max_length, sampling_params.max_tokens
            if made_of not in self._policies:
                self._policies[made_of] = _policy(hf_tokenizer, renderer, sampling_params, *made_of)
            rollout = await self.env.play(
                key, self._policies[made_of], split=split, sampling={**own, **given}, replays=replays
            )
            if not is_scored(rollout):
                raise RunError(f"rollout {rollout.id} has no score ({rollout.ending}: {rollout.error})")
            (example,) = await asyncio.to_thread(
                require_carried(rollout, "OpenRLHF").examples, one=True, exact=not allow_inexact
            )
            before = [0] * len(example.prompt_ids)
            return {
                "prompt": prompt,
                "label": label,
                "images": images,
                "mm_train_inputs": None,
                "reward": rollout.score,
                "scores": rollout.score,
                "observation_tokens": example.prompt_ids + example.response_ids,
                "action_ranges": _ranges(before + example.mask),
                "rollout_log_probs": [*map(float, before), *logprobs_of(example, "OpenRLHF")],
                "truncated": rollout.ending in ("length", "token_budget"),
                "extra_logs": values_of(rollout),
            }

    return AgentExecutor


def _policy(
    tokenizer: Any, renderer: Any, params: Any, engine: Any, longest: int, most: int | None
) -> hermes_rl.Policy:
    """Make the policy that asks the vLLM of this process."""

    async def sample(ids: list[int], sampling: hermes_rl.Sampling) -> hermes_rl.Sampled:
        asked = deepcopy(params)
        asked.temperature, asked.top_p = sampling.temperature, 1.0 if sampling.top_p is None else sampling.top_p
        asked.max_tokens = sampling.max_tokens if most is None else min(sampling.max_tokens, most)
        asked.stop_token_ids, asked.logprobs, asked.min_tokens = list(sampling.stop_ids), 0, 0
        (answer,) = (await engine.generate(ids, asked)).outputs
        logprobs = [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
        return hermes_rl.Sampled(list(answer.token_ids), logprobs, answer.finish_reason or "stop")

    return hermes_rl.Policy.sampling(sample, tokenizer, renderer=renderer, context=longest)


def _sampling(params: Any, processed: bool) -> dict[str, float]:
    """Return OpenRLHF's temperature and top_p; refuse what rollouts do not apply, or log-probabilities do not know."""
    require_neutral({"top_k": params.top_k}, "OpenRLHF")
    settings = {"temperature": float(params.temperature), "top_p": float(params.top_p)}
    if not processed:
        require_in_logprobs(
            settings, "give vLLM logprobs_mode=processed_logprobs and say executor(…, processed_logprobs=True)"
        )
    return settings


def _row_of(label: Any) -> tuple[str, str]:
    """Return the split and the key that a label names."""
    try:
        row = json.loads(label)
        return str(row["split"]), str(row["key"])
    except (TypeError, ValueError, KeyError):
        raise UserError("a label names no row: write the data as docs/integrations/openrlhf.md shows") from None


def _ranges(mask: list[int]) -> list[tuple[int, int]]:
    """Return the stretches of ones, as start and end."""
    starts = [place for place, (one, last) in enumerate(zip(mask, [0, *mask], strict=False)) if one and not last]
    ends = [place for place, (one, last) in enumerate(zip([*mask, 0], [0, *mask], strict=True)) if last and not one]
    return list(zip(starts, ends, strict=True))
