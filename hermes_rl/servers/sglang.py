"""Implement `type: sglang`: SGLang's own ``/generate`` with token ids."""

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
    scores_of,
)
from hermes_rl.tokens.transcript import TokenLogprobs


class Generate:
    """SGLang's ``/generate``; see `base.Dialect`."""

    path = "/generate"
    names: Mapping[str, str] = {**NAMES, "seed": "sampling_seed", "max_tokens": "max_new_tokens"}
    neutral: Mapping[str, float] = {**NEUTRAL, "top_k": -1}
    paused_path: str | None = None
    weights_paths: Sequence[str] = ("/get_weight_version", "/model_info")
    """The first path up to release 0.5.20, the second since."""

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

    def scoring_body(self, top_k: int, config: ServerConfig) -> dict[str, Any]:
        return {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top_k,
            "return_text_in_logprobs": False,
        }

    def read_scores(self, data: Any, prompt: array[int], top_k: int) -> TokenLogprobs:
        """Parse two lists with an entry per token: [logprob, id, text], and a list of these; the first is null."""
        meta = _meta_info(data)
        token_entries = meta.get("input_token_logprobs")
        top = meta.get("input_top_logprobs") if top_k else [None] * len(prompt)
        if not isinstance(token_entries, list) or not isinstance(top, list) or len(token_entries) != len(top):
            raise Malformed("the answer has no input_token_logprobs, or no input_top_logprobs")
        position_scores = [
            {int(entry[1]): entry[0] for entry in (*(top_entries or ()), single)}
            for single, top_entries in zip(token_entries[1:], top[1:], strict=True)
        ]
        return scores_of([None, *position_scores], prompt, top_k)

    def read(self, data: Any) -> Sampled:
        meta = _meta_info(data)
        pairs = meta.get("output_token_logprobs")
        if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) > 1 for pair in pairs):
            raise Malformed("the answer has no output_token_logprobs")
        finish = meta.get("finish_reason")
        reason, cached = finish.get("type") if isinstance(finish, dict) else finish, meta.get("cached_tokens")
        tokens, logprobs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
        return generated(tokens, logprobs, reason, meta.get("weight_version"), cached=cached)


def _meta_info(data: Any) -> dict[str, Any]:
    first = data[0] if isinstance(data, list) and data else data
    meta = first.get("meta_info") if isinstance(first, dict) else None
    if not isinstance(meta, dict):
        raise Malformed("the answer has no meta_info")
    return meta
