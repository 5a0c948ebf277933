"""`type: vllm`: stock vLLM over ``/v1/completions`` with token ids (0.10.2 and later)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hermes_rl.servers.base import (
    NAMES,
    PROMPT,
    Malformed,
    Place,
    Sampled,
    Sampling,
    ServerConfig,
    generated,
    scored_places,
)


class Completions:
    """See `generation.Dialect`."""

    path = "completions"
    names: Mapping[str, str] = NAMES
    neutral: Mapping[str, float] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    paused_path: str | None = "/is_paused"
    weights_paths: Sequence[str] = ()
    """vLLM's own version counts only weights loaded through its own interface; `weights_path` names a better source."""

    def body(self, sampling: Sampling, config: ServerConfig) -> dict[str, Any]:
        body: dict[str, Any] = {"model": config.model} if config.model else {}
        return {
            **body,
            "prompt": PROMPT,
            "logprobs": 0,  # the log-probability of the sampled token alone
            "return_token_ids": True,
            "skip_special_tokens": False,
            "stop_token_ids": list(sampling.stop_ids),
            **sampling.parameters(self),
        }

    def prompt_body(self, top: int, config: ServerConfig) -> dict[str, Any]:
        """See `base.ScoresPrompts`. vLLM samples at least one token, which nobody looks at."""
        body: dict[str, Any] = {"model": config.model} if config.model else {}
        return {**body, "prompt": PROMPT, "prompt_logprobs": top, "max_tokens": 1, "temperature": 0.0}

    def read_prompt(self, data: Any, prompt: Sequence[int]) -> list[Place]:
        choices = data.get("choices") if isinstance(data, dict) else None
        choice = choices[0] if isinstance(choices, list) and choices else None
        found = choice.get("prompt_logprobs") if isinstance(choice, dict) else None
        return scored_places(prompt, plain_places(found))

    def read(self, data: Any) -> Sampled:
        choices = data.get("choices") if isinstance(data, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise Malformed("the answer has no choices")
        choice = choices[0]
        if choice.get("token_ids") is None:
            raise Malformed("the answer has no token_ids: vLLM from 0.10.2 on returns them")
        logprobs = choice.get("logprobs")
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        version = data.get("weight_version")
        return generated(choice["token_ids"], values, choice.get("finish_reason"), version, data.get("model"))


def plain_places(found: Any) -> Any:
    """vLLM's entries of each place, ``{id: {"logprob": …}}`` or ``{id: logprob}``, as the latter."""
    if not isinstance(found, list):
        return None
    return [
        {token: value.get("logprob") if isinstance(value, dict) else value for token, value in place.items()}
        if isinstance(place, dict)
        else None
        for place in found
    ]
