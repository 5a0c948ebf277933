"""`type: sglang`: SGLang's own ``/generate`` with token ids."""

from __future__ import annotations

from typing import Any

from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.generation import PROMPT, Generated, Sampling, generated
from hermes_rl.servers.wire import Malformed

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "sampling_seed",
    "max_tokens": "max_new_tokens",
}


class Generate:
    """See `generation.Dialect`."""

    path = "/generate"
    paused_path: str | None = None
    weights_path: str | None = "/get_weight_version"

    def body(self, sampling: Sampling, config: ServerConfig) -> dict[str, Any]:
        parameters = {
            **sampling.parameters(_NAMES),
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

    def read(self, data: Any) -> Generated:
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
