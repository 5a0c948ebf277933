"""Integrate with OpenRLHF: offer a spec as the `AgentExecutor` of its rollout actors, created by `executor`.

This module converts rollouts to OpenRLHF's output; the vLLM engine in the actor's process samples. OpenRLHF cannot
represent a rollout without a score, so such a rollout raises, which stops training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import hermes_rl
from hermes_rl.errors import UserError
from hermes_rl.integrations.base import (
    CUT,
    BatchPlace,
    TrainerAdapter,
    parameters,
    read_agent_settings,
    require_score,
    row_named,
    sampled_by_vllm,
)
from hermes_rl.integrations.common import logprobs_of, require_no_comparing, values_of
from hermes_rl.spec.new_names import with_renamed_parameters

PROCESSED = "give vLLM logprobs_mode=processed_logprobs and say executor(…, processed_logprobs=True)"


@with_renamed_parameters
def executor(
    spec: hermes_rl.Spec | str | Path,
    *,
    renderer: str | Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    processed_logprobs: bool = False,
    retries: int = 2,
    allow_inexact: bool = False,
    environ: Mapping[str, str] | None = None,
) -> type[Any]:
    """Return the class that the file given by `--train.agent_func_path` must export as `AgentExecutor`.

    Args:
        spec: a loaded spec, a path, or the name of a shipped spec.
        renderer, sampling, retries, allow_inexact: as for `TrainerAdapter`.
        processed_logprobs: whether vLLM's log-probabilities include temperature and top_p (its `logprobs_mode`).
        environ: variables used for `${VAR}` and for server keys.

    Raises:
        UserError: OpenRLHF is not installed, or settings conflict.
    """
    try:
        from openrlhf.utils.agent import AgentExecutorBase
    except ImportError as error:
        raise UserError(f"the executor needs OpenRLHF 0.11 ({error}): install it as its documents say") from error
    agent_settings = read_agent_settings(sampling, "OpenRLHF", "its arguments")

    class AgentExecutor(AgentExecutorBase):
        """Executor that runs rollouts of the spec."""

        def __init__(self) -> None:
            self.env = hermes_rl.open_env(spec, environ=environ)
            self._pull = TrainerAdapter(
                "OpenRLHF", self.env, sampling=agent_settings, retries=retries, allow_inexact=allow_inexact
            )
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
            """Run a rollout of the row that the label names, and return it in OpenRLHF's format."""
            pull = self._pull
            require_no_comparing(await pull.open(), "OpenRLHF")
            split, key = row_named(label, "a label names no row", "openrlhf")
            sampling = {name: getattr(sampling_params, name) for name in ("temperature", "top_p", "top_k")}
            settings = pull.sampling(sampling, None if processed_logprobs or split == "eval" else PROCESSED)
            made_of = llm_engine, max_length, sampling_params.max_tokens
            if made_of not in self._policies:
                self._policies[made_of] = _engine_policy(hf_tokenizer, renderer, sampling_params, *made_of)
            rollout = require_score(
                await pull.play(BatchPlace(key, None, 0, 1), split, settings, self._policies[made_of])
            )
            (example,) = await asyncio.to_thread(pull.examples, rollout, one=True)
            before = [0] * len(example.prompt_ids)
            return {
                "prompt": prompt,
                "label": label,
                "images": images,
                "mm_train_inputs": None,
                "reward": rollout.score,
                "scores": rollout.score,
                "observation_tokens": example.prompt_ids + example.response_ids,
                "action_ranges": _one_ranges(before + example.mask),
                "rollout_log_probs": [*map(float, before), *logprobs_of(example, "OpenRLHF")],
                "truncated": rollout.stop_reason in CUT,
                "extra_logs": values_of(rollout),
            }

    return AgentExecutor


def _engine_policy(
    tokenizer: Any, renderer: Any, params: Any, engine: Any, longest: int, max_tokens: int | None
) -> hermes_rl.Policy:
    """Return a policy that samples with the vLLM engine of this process."""

    async def sample(ids: list[int], sampling: hermes_rl.Sampling) -> hermes_rl.Sampled:
        settings = deepcopy(params)
        for name, value in {**parameters(sampling, max_tokens), "logprobs": 0, "min_tokens": 0}.items():
            setattr(settings, name, value)
        return sampled_by_vllm(await engine.generate(ids, settings))

    return hermes_rl.Policy.sampling(sample, tokenizer, renderer=renderer, context=longest)


def _one_ranges(mask: list[int]) -> list[tuple[int, int]]:
    """Return the start and the exclusive end of each run of ones."""
    starts = [
        index for index, (is_trained, last) in enumerate(zip(mask, [0, *mask], strict=False)) if is_trained and not last
    ]
    ends = [
        index
        for index, (is_trained, last) in enumerate(zip([*mask, 0], [0, *mask], strict=True))
        if last and not is_trained
    ]
    return list(zip(starts, ends, strict=True))
