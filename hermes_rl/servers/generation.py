"""Token ids in, token ids and log-probabilities out: what the dialects of token-level servers have in common.

Owns the types, the checks of an answer, and reading numbers that may be wrong. A wrong answer is a failure: it is
asked for again, and never trained on.
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
"""vLLM's log-probability of a token that it could not give one for."""
PROMPT = "@prompt ids@"
"""Stands in a body for the list of ids of the prompt."""
NAMES = {"temperature": "temperature", "top_p": "top_p", "seed": "seed", "max_tokens": "max_tokens"}
"""What most servers call the parameters of `Sampling`."""
ABORT = "abort"
"""The server broke off, to take new weights; what it sampled so far is good."""
_FINISH = {"stop": "stop", "eos": "stop", "length": "length", "abort": ABORT, "aborted": ABORT, "cancelled": ABORT}


@dataclass(frozen=True, slots=True)
class Sampling:
    """One request: a prompt, and how to sample from it."""

    prompt: array[int]
    max_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    further: Mapping[str, Any] = field(default_factory=dict)
    """A request's `extra_body`, under the server's own names; of it only what the dialect knows is sent."""
    text: tuple[bytes, ...] = ()
    """The prompt as parts of a JSON list without its brackets, where they were made already."""

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
        """The same, when some tokens are there already: another request, which has a seed of its own."""
        return replace(
            self,
            prompt=self.prompt + ids,
            max_tokens=self.max_tokens - len(ids),
            seed=drawn_seed(self.seed, "after", len(ids)),
            text=(),
        )

    def written(self, body: Mapping[str, Any]) -> bytes:
        """A body as bytes; the list of ids, most of it, is not made anew for every turn of a long rollout."""
        before, _, behind = json.dumps(body).encode("ascii").partition(f'"{PROMPT}"'.encode("ascii"))
        ids = b", ".join(filter(None, self.text or (listed(self.prompt),)))
        return b"".join((before, b"[", ids, b"]", behind))

    def parameters(self, dialect: Dialect) -> dict[str, Any]:
        """How to sample, under the server's own names: neutral values, over them what is set."""
        given = {theirs: value for ours, theirs in dialect.names.items() if (value := getattr(self, ours)) is not None}
        further = {name: value for name, value in self.further.items() if name in dialect.neutral}
        return {**dialect.neutral, **given, **further}

    def policy(self, dialect: Dialect) -> dict[str, Any]:
        """What the server is asked for that shapes the distribution it samples from."""
        apart = {dialect.names["seed"], dialect.names["max_tokens"]}
        return {name: value for name, value in self.parameters(dialect).items() if name not in apart}


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer; ids and log-probabilities have one length.

    The token that ended the turn is the last of the ids where the model sampled it.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str = "stop"
    """stop; length, at `Sampling.max_tokens`; abort: broken off to take new weights, it is asked to go on."""
    version: int | None = None
    """Of the weights, where the answer tells it."""
    model: str | None = None


class Dialect(Protocol):
    """How one type of server is asked; paths that begin with ``/`` are below the root, others below base_url."""

    path: str
    names: Mapping[str, str]
    """What the server calls temperature, top_p, seed and max_tokens."""
    neutral: Mapping[str, float]
    """Values that leave the model's distribution as it is. They are sent for all that is not set: an engine takes what
    is absent from the model's generation_config.json, and then samples from another distribution than the one that
    its log-probabilities tell of."""
    paused_path: str | None
    """Answers whether generation is stopped."""
    weights_paths: Sequence[str]
    """Where the server may tell the version of its weights; releases differ in which of them they have."""

    def body(self, sampling: Sampling, config: ServerConfig) -> dict[str, Any]:
        """The request's JSON."""
        ...

    def read(self, data: Any) -> Sampled:
        """The answer's JSON; raises `Malformed`."""
        ...


def generated(ids: Any, logprobs: Any, finish: Any, version: Any = None, model: Any = None) -> Sampled:
    """An answer that was checked.

    Raises:
        Malformed: lengths differ, something is no number, a log-probability is None, positive or a sentinel, or the
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
    """A version as a number; the name that servers give to the weights they started with is 0."""
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
