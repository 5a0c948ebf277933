"""Implement `type: vllm`: stock vLLM over ``/v1/completions`` with token ids (0.10.2 and later)."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_rl.servers.base import (
    NAMES,
    NEUTRAL,
    PROMPT,
    Malformed,
    Sampled,
    Sampling,
    ServerConfig,
    generated,
    scores_of_prompt,
)
from hermes_rl.servers.usage import cached_tokens_of
from hermes_rl.tokens.transcript import TokenLogprobs


class Completions:
    """vLLM's completions with token ids; see `base.Dialect`."""

    path = "completions"
    names: Mapping[str, str] = NAMES
    neutral: Mapping[str, float] = NEUTRAL
    paused_path: str | None = "/is_paused"
    weights_paths: Sequence[str] = ()
    """vLLM's own version counts only weights loaded through its own interface; `weights_path` names a better source."""

    def body(self, sampling: Sampling, config: ServerConfig) -> dict[str, Any]:
        body: dict[str, Any] = {"model": config.model} if config.model else {}
        return {
            **body,
            "prompt": PROMPT,
            "logprobs": 0,  # only the log-probability of the sampled token
            "return_token_ids": True,
            "skip_special_tokens": False,
            "stop_token_ids": list(sampling.stop_ids),
            **sampling.parameters(self),
        }

    def scoring_body(self, top_k: int, config: ServerConfig) -> dict[str, Any]:
        body: dict[str, Any] = {"model": config.model} if config.model else {}
        # vLLM samples at least one token.
        return {**body, "prompt": PROMPT, "prompt_logprobs": top_k, "max_tokens": 1, "temperature": 1.0}

    def read_scores(self, data: Any, prompt: array[int], top_k: int) -> TokenLogprobs:
        return scores_of_prompt(_first_choice(data).get("prompt_logprobs"), prompt, top_k)

    def read(self, data: Any) -> Sampled:
        choice = _first_choice(data)
        if choice.get("token_ids") is None:
            raise Malformed("the answer has no token_ids: vLLM from 0.10.2 on returns them")
        logprobs = choice.get("logprobs")
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        version, usage = data.get("weight_version"), data.get("usage")
        # With --enable-prompt-tokens-details.
        cached = cached_tokens_of(usage) if isinstance(usage, dict) else 0
        return generated(choice["token_ids"], values, choice.get("finish_reason"), version, data.get("model"), cached)


def _first_choice(data: Any) -> dict[str, Any]:
    choices = data.get("choices") if isinstance(data, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Malformed("the answer has no choices")
    return choices[0]
