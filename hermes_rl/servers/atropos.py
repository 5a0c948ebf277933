"""Implement `type: atropos`: the older ``/generate`` API of Atropos' example server, which other servers also offer."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_rl.servers.base import (
    NAMES,
    PROMPT,
    Malformed,
    Sampled,
    Sampling,
    ServerConfig,
    generated,
    scores_of_prompt,
)
from hermes_rl.tokens.transcript import TokenLogprobs


class LegacyGenerate:
    """The older ``/generate`` API; see `base.Dialect`."""

    path = "/generate"
    names: Mapping[str, str] = NAMES
    # This server takes its parameters only from the body, and none from the model's generation_config.json.
    neutral: Mapping[str, float] = {}
    paused_path: str | None = "/bridge/is_paused"
    weights_paths: Sequence[str] = ("/bridge/info",)

    def body(self, sampling: Sampling, config: ServerConfig) -> dict[str, Any]:
        return {
            "prompt": {"prompt_token_ids": PROMPT},
            "logprobs": 0,
            "skip_special_tokens": False,
            "stop_token_ids": list(sampling.stop_ids),
            **sampling.parameters(self),
        }

    def scoring_body(self, top_k: int, config: ServerConfig) -> dict[str, Any]:
        body = {"prompt": {"prompt_token_ids": PROMPT}, "prompt_logprobs": top_k}
        return {**body, "max_tokens": 1, "temperature": 1.0}

    def read_scores(self, data: Any, prompt: array[int], top_k: int) -> TokenLogprobs:
        """Parse `prompt_logprobs`, [position] or [completion][position] of {id: logprob}, or of lists of them."""
        position_scores = data.get("prompt_logprobs") if isinstance(data, dict) else None
        if isinstance(position_scores, list) and position_scores and isinstance(position_scores[0], list):
            position_scores = position_scores[0]
        if isinstance(position_scores, list):
            position_scores = [
                {k: v for part in scores for k, v in part.items()} if isinstance(scores, list) else scores
                for scores in position_scores
            ]
        return scores_of_prompt(position_scores, prompt, top_k)

    def read(self, data: Any) -> Sampled:
        """Parse `logprobs`, [completion][position][{id: logprob}]; without `token_ids` its keys are the ids."""
        if not isinstance(data, dict):
            raise Malformed("the answer is not a JSON object")
        positions = _first_entry(data.get("logprobs"), "logprobs")
        if data.get("token_ids") is None:
            ids = [int(_position_entry(position, None)[0]) for position in positions]
        else:
            ids = _first_entry(data["token_ids"], "token_ids")
        if not isinstance(positions, list) or len(positions) != len(ids):
            raise Malformed(f"the answer has {len(ids)} tokens and {len(positions)} log-probabilities")
        values = [_position_entry(one, token)[1] for one, token in zip(positions, ids, strict=True)]
        return generated(ids, values, _first_entry(data.get("finish_reasons"), "finish_reasons"))


def _first_entry(value: Any, name: str) -> Any:
    if not isinstance(value, list) or not value:
        raise Malformed(f"the answer has no {name}")
    return value[0]


def _position_entry(position: Any, token: int | None) -> tuple[str, Any]:
    """Return id and log-probability at one position; the first ones if the sampled token is unknown."""
    entry = position[0] if isinstance(position, list) and position else position
    if not isinstance(entry, dict) or not entry:
        raise Malformed("a sampled token has no log-probability")
    key = next(iter(entry)) if token is None else str(token)
    if key not in entry or not str(key).isdecimal():
        raise Malformed(f"the log-probabilities do not have the sampled token {token}")
    return str(key), entry[key]
