"""`type: sglang`: SGLang's own ``/generate`` with token ids."""

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


class Generate:
    """See `generation.Dialect`."""

    path = "/generate"
    names: Mapping[str, str] = {**NAMES, "seed": "sampling_seed", "max_tokens": "max_new_tokens"}
    neutral: Mapping[str, float] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    paused_path: str | None = None
    weights_paths: Sequence[str] = ("/get_weight_version", "/model_info")
    """The first until 0.5.20, the second since."""

    def body(self, sampling: Sampling, config: ServerConfig) -> dict[str, Any]:
        parameters = {
            **sampling.parameters(self),
            "stop_token_ids": list(sampling.stop_ids),
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
        }
        return {
            "input_ids": PROMPT,
            "sampling_params": parameters,
            "return_logprob": True,
            "return_text_in_logprobs": False,
        }

    def prompt_body(self, top: int, config: ServerConfig) -> dict[str, Any]:
        """See `base.ScoresPrompts`."""
        return {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top,
            "return_text_in_logprobs": False,
        }

    def read_prompt(self, data: Any, prompt: Sequence[int]) -> list[Place]:
        first = data[0] if isinstance(data, list) and data else data
        meta = first.get("meta_info") if isinstance(first, dict) else None
        own, top = (meta or {}).get("input_token_logprobs"), (meta or {}).get("input_top_logprobs")
        if not isinstance(own, list):
            raise Malformed("the answer has no input_token_logprobs")
        others = top if isinstance(top, list) and len(top) == len(own) else [None] * len(own)
        pairs = [[pair, *(more or ())] for pair, more in zip(own, others, strict=True)]
        return scored_places(prompt, [{pair[1]: pair[0] for pair in place} for place in pairs])

    def read(self, data: Any) -> Sampled:
        first = data[0] if isinstance(data, list) and data else data
        meta = first.get("meta_info") if isinstance(first, dict) else None
        if not isinstance(meta, dict):
            raise Malformed("the answer has no meta_info")
        pairs = meta.get("output_token_logprobs")
        if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) > 1 for pair in pairs):
            raise Malformed("the answer has no output_token_logprobs")
        finish = meta.get("finish_reason")
        reason = finish.get("type") if isinstance(finish, dict) else finish
        return generated([pair[1] for pair in pairs], [pair[0] for pair in pairs], reason, meta.get("weight_version"))
