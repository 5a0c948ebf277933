"""Token ids in, token ids and log-probabilities out: the common part of the dialects of token-level servers.

Owns the types and the checks of an answer. A wrong answer is a failure: the call is repeated, and the answer is never
trained on. Leaves the JSON to the dialects.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hermes_rl.servers.base import ChatRequest, ServerConfig, drawn_seed
from hermes_rl.servers.wire import Malformed
from hermes_rl.tokens.sequence import listed

SENTINEL = -9999.0
"""vLLM's log-probability of a token for which it has none."""
PROMPT = "@prompt ids@"
"""Stands for the ids of the prompt in a body, until `Sampling.written` puts them in."""
NAMES = {"temperature": "temperature", "top_p": "top_p", "seed": "seed", "max_tokens": "max_tokens"}
"""The names of the parameters of `Sampling` at most servers."""
ABORT = "abort"
"""The server broke off to take new weights; the tokens sampled so far are good."""
_FINISH = {"stop": "stop", "eos": "stop", "length": "length", "abort": ABORT, "aborted": ABORT, "cancelled": ABORT}


@dataclass(frozen=True, slots=True)
class Sampling:
    """One request: a prompt, and the parameters of sampling."""

    prompt: array[int]
    max_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    further: Mapping[str, Any] = field(default_factory=dict)
    """A request's `extra_body`, under the server's own names; only the parameters that the dialect knows are sent."""
    text: tuple[bytes, ...] = ()
    """The prompt as parts of a JSON list without its brackets, where somebody has made them already."""

    @classmethod
    def of(
        cls,
        request: ChatRequest,
        prompt: array[int],
        max_tokens: int,
        stop_ids: tuple[int, ...],
        text: tuple[bytes, ...] = (),
    ) -> Sampling:
        return cls(
            prompt,
            max_tokens,
            stop_ids,
            request.temperature,
            request.top_p,
            request.seed,
            request.extra_body or {},
            text,
        )

    def after(self, ids: array[int]) -> Sampling:
        """Make the request for the rest, when some tokens are there already; it has a seed of its own."""
        return replace(
            self,
            prompt=self.prompt + ids,
            max_tokens=self.max_tokens - len(ids),
            seed=drawn_seed(self.seed, "after", len(ids)),
            text=(),
        )

    def written(self, body: Mapping[str, Any]) -> bytes:
        """Write a body as bytes. Most of it are the ids, which are not written anew for every turn of a rollout."""
        before, _, behind = json.dumps(body).encode("ascii").partition(f'"{PROMPT}"'.encode("ascii"))
        ids = b", ".join(filter(None, self.text or (listed(self.prompt),)))
        return b"".join((before, b"[", ids, b"]", behind))

    def parameters(self, dialect: Dialect) -> dict[str, Any]:
        """Return the parameters under the server's own names: neutral values, and over them those that are set."""
        given = {theirs: value for ours, theirs in dialect.names.items() if (value := getattr(self, ours)) is not None}
        further = {name: value for name, value in self.further.items() if name in dialect.neutral}
        return {**dialect.neutral, **given, **further}

    def policy(self, dialect: Dialect) -> dict[str, Any]:
        """Return the parameters that shape the distribution from which the server samples."""
        apart = {dialect.names["seed"], dialect.names["max_tokens"]}
        return {name: value for name, value in self.parameters(dialect).items() if name not in apart}


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer; ids and log-probabilities have one length.

    Where the model sampled the token that ends the turn, it is the last id.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str = "stop"
    """stop; length: at `Sampling.max_tokens`; abort: broken off to take new weights, another request gets the rest."""
    version: int | None = None
    """The version of the weights, where the answer tells it."""
    model: str | None = None


class Dialect(Protocol):
    """The JSON of one type of server. A path that begins with ``/`` is below the root, any other below base_url."""

    path: str
    names: Mapping[str, str]
    """The server's own names of temperature, top_p, seed and max_tokens."""
    neutral: Mapping[str, float]
    """Values that leave the model's distribution as it is, sent for every parameter that is not set. Otherwise an
    engine takes it from the model's generation_config.json, and samples from another distribution than the one of its
    log-probabilities."""
    paused_path: str | None
    """The path that tells whether generation is stopped; None where there is none."""
    weights_paths: Sequence[str]
    """Paths that may tell the version of the weights; releases of a server differ in which of them they have."""

    def body(self, sampling: Sampling, config: ServerConfig) -> dict[str, Any]:
        """Write the request's JSON."""
        ...

    def read(self, data: Any) -> Sampled:
        """Read the answer's JSON; raises `Malformed`."""
        ...


def generated(ids: Any, logprobs: Any, finish: Any, version: Any = None, model: Any = None) -> Sampled:
    """Check an answer and make a `Sampled` of it.

    Raises:
        Malformed: lengths differ, a value is no number, a log-probability is None, positive or a sentinel, or the
            server ended the answer for a reason of its own.
    """
    if not _is_list(ids) or not all(isinstance(one, int) and one >= 0 for one in ids):
        raise Malformed("the answer has no list of token ids")
    if not _is_list(logprobs) or len(logprobs) != len(ids):
        count = len(logprobs) if _is_list(logprobs) else "no"
        raise Malformed(f"the answer has {len(ids)} tokens and {count} log-probabilities")
    values = [_logprob(value) for value in logprobs]
    reason = _FINISH.get(str(finish))
    if reason is None:
        raise Malformed(f"the server broke its answer off ({finish})")
    if not ids and reason != ABORT:
        raise Malformed("the answer has no tokens")
    return Sampled(list(ids), values, reason, version_of(version), model if isinstance(model, str) else None)


def version_of(value: Any) -> int | None:
    """Read a version as a number; ``default``, the name of the weights that a server started with, is 0."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        return int(value) if value.isdecimal() else 0 if value == "default" else None
    return None


def _logprob(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise Malformed(f"a sampled token has the log-probability {value!r}")
    if value > 0 or value <= SENTINEL:
        raise Malformed(f"a sampled token has the log-probability {value}, which no token can have")
    return float(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
