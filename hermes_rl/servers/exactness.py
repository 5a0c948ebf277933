"""Whether a token-level server allows exact training: a few sampled tokens tell.

Owns the questions and the meaning of their answers. It judges nothing that the answers do not show. Leaves sampling to
`token_level`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hermes_rl.errors import UserError
from hermes_rl.servers.base import ContextLengthExceeded
from hermes_rl.servers.generation import Sampled, Sampling
from hermes_rl.servers.retry import AttemptFailed
from hermes_rl.servers.token_level import TokenServer
from hermes_rl.tokens.tokenizer import TemplateRefused

PROBES = 16
"""How many single tokens are sampled at each of two temperatures, so that one token occurs at both."""
NOISE = 0.02
"""A difference of two log-probabilities of one token up to this is noise of the machine."""
_COLD = 0.5


@dataclass(frozen=True)
class Finding:
    """One result of the examination; `remedy` says what to do where it breaks exactness."""

    ok: bool
    detail: str
    remedy: str | None = None


async def examine(server: TokenServer, temperature: float, top_p: float | None) -> list[Finding]:
    """Examine the server; a server that does not answer is one finding."""
    try:
        renderer = await server.renderer()
        prompt = renderer.first([{"role": "user", "content": "Name a colour."}], None)
        return await _asked(server, prompt, renderer.stop_ids, temperature, top_p)
    except (UserError, AttemptFailed, ContextLengthExceeded, TemplateRefused) as error:
        return [Finding(False, str(error), "is it running, and of this type?")]


async def _asked(
    server: TokenServer, prompt: array[int], stops: tuple[int, ...], temperature: float, top_p: float | None
) -> list[Finding]:
    sampling = Sampling(prompt, 1, stops, temperature=1.0)
    warm = await _many(server, sampling)
    cold = await _many(server, replace(sampling, temperature=_COLD))
    findings = [Finding(True, f"{len(warm)} single tokens came with ids and log-probabilities")]
    findings += _noise(warm)
    findings.append(_raw(warm, cold, temperature, top_p))
    version = await server.weights()
    told = "not told; set weights_path, or max_staleness cannot be checked" if version is None else str(version)
    return [*findings, Finding(True, f"version of the weights: {told}")]


async def _many(server: TokenServer, sampling: Sampling) -> list[Sampled]:
    return list(await asyncio.gather(*(server.sample(replace(sampling, seed=seed)) for seed in range(PROBES))))


def _noise(answers: Sequence[Sampled]) -> list[Finding]:
    """Compare the log-probabilities of one token in one context; they differ only by the noise of the machine."""
    spread = max((max(values) - min(values) for values in _by_token(answers).values()), default=0.0)
    if spread <= NOISE:
        return [Finding(True, f"one token has one log-probability (to {spread:.1e})")]
    return [
        Finding(
            False,
            f"the log-probability of one token in one context differs by {spread:.2g} between calls",
            "lower precision of the cache, speculative decoding or a model that is being updated can do this",
        )
    ]


def _raw(warm: Sequence[Sampled], cold: Sequence[Sampled], temperature: float, top_p: float | None) -> Finding:
    """Find out whether log-probabilities are those before temperature, which fit only sampling at 1."""
    at_one, at_less = _by_token(warm), _by_token(cold)
    both = [(at_one[token][0], at_less[token][0]) for token in at_one.keys() & at_less.keys()]
    differing = [pair for pair in both if abs(pair[0] - pair[1]) > NOISE]
    plain = temperature == 1.0 and (top_p is None or top_p == 1.0)
    if differing:
        return Finding(True, "log-probabilities are those that were sampled from, at any temperature")
    certain = bool(both) and any(value < -NOISE for value, _ in both)
    what = "are raw (before temperature and top_p)" if certain else "may be raw: this server samples without doubt"
    if plain or not certain:
        return Finding(True, f"log-probabilities {what}; sampling at temperature {temperature:g}")
    return Finding(
        False,
        f"log-probabilities {what}, and the spec samples at temperature {temperature:g}, top_p {top_p or 1.0:g}",
        "set agent.temperature and top_p to 1, or start vLLM with --logprobs-mode processed_logprobs",
    )


def _by_token(answers: Sequence[Sampled]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for answer in answers:
        if answer.ids:
            found.setdefault(answer.ids[0], []).append(answer.logprobs[0])
    return found
