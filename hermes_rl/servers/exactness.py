"""Test with a few sampled tokens if a token-level server allows token-exact training.

No conclusion goes beyond these tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from hermes_rl.errors import RunError, UserError
from hermes_rl.servers.base import ContextLengthExceeded, Sampled, Sampling, ServerConfig
from hermes_rl.servers.token_level import TokenServer
from hermes_rl.servers.transport import AttemptFailed, Transport, proxy_of, public_url, with_version
from hermes_rl.tokens.tokenizer import TemplateRefused

PROBES = 16
"""Number of single tokens sampled at each of two temperatures, so that one token occurs at both."""
NOISE = 0.02
"""Maximum difference of two log-probabilities of one token that counts as numerical noise."""
_COLD = 0.5
_CALLS_AT_ONCE = 64


@dataclass(frozen=True)
class Finding:
    """One result of the test; `remedy` is the recommended action if it breaks exactness."""

    ok: bool
    detail: str
    remedy: str | None = None


async def examine(server: TokenServer, temperature: float, top_p: float | None) -> list[Finding]:
    """Test the server; a server that does not respond gives one finding."""
    try:
        renderer = await server.renderer()
        prompt = renderer.first([{"role": "user", "content": "Name a colour."}], None)
        return await _check_sampling(
            server, Sampling(prompt, 1, renderer.stop_ids, 1.0), describe_sampling(temperature, top_p)
        )
    except (UserError, AttemptFailed, ContextLengthExceeded, TemplateRefused) as error:
        return [Finding(False, str(error), "is it running, and of this type?")]


def describe_sampling(temperature: float, top_p: float | None) -> str:
    """Return the settings that change the model's own distribution; empty if there are none."""
    differing = {"temperature": temperature, "top_p": 1.0 if top_p is None else top_p}
    return ", ".join(f"{name} {value:g}" for name, value in differing.items() if value != 1)


async def _check_sampling(server: TokenServer, sampling: Sampling, shaping: str) -> list[Finding]:
    warm = await _sample_probes(server, sampling)
    cold = await _sample_probes(server, replace(sampling, temperature=_COLD))
    findings = [Finding(True, f"{len(warm)} single tokens came with ids and log-probabilities")]
    findings += _check_noise(warm)
    findings.append(_check_shaping(warm, cold, shaping))
    version = await server.weights()
    version_shown = (
        "not told; set weights_path, or max_staleness cannot be checked" if version is None else str(version)
    )
    return [*findings, Finding(True, f"version of the weights: {version_shown}")]


async def _sample_probes(server: TokenServer, sampling: Sampling) -> list[Sampled]:
    return await sample_all(server, [replace(sampling, seed=seed) for seed in range(PROBES)])


async def sample_all(server: TokenServer, requests: Iterable[Sampling]) -> list[Sampled]:
    """Sample each request, and return the results in order; at most `max_concurrency` requests are in flight."""
    room = asyncio.Semaphore(min(_CALLS_AT_ONCE, server.config.max_concurrency))

    async def one(request: Sampling) -> Sampled:
        async with room:
            return await server.sample(request)

    return await asyncio.gather(*map(one, requests))


def _check_noise(answers: Sequence[Sampled]) -> list[Finding]:
    """Compare the log-probabilities of one token in one context, which should differ only by numerical noise."""
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


def _check_shaping(warm: Sequence[Sampled], cold: Sequence[Sampled], shaping: str) -> Finding:
    """Determine if log-probabilities are the model's own, which match only unmodified sampling."""
    at_one, at_less = _by_token(warm), _by_token(cold)
    both = [(at_one[token][0], at_less[token][0]) for token in at_one.keys() & at_less.keys()]
    differing = [pair for pair in both if abs(pair[0] - pair[1]) > NOISE]
    if differing:
        return Finding(True, "log-probabilities are of the sampled distribution, at any temperature")
    certain = bool(both) and any(value < -NOISE for value, _ in both)
    description = (
        "are raw (before temperature and top_p)" if certain else "may be raw: this server samples without doubt"
    )
    if not shaping or not certain:
        return Finding(True, f"log-probabilities {description}; sampling with {shaping or 'temperature 1'}")
    return Finding(
        False,
        f"log-probabilities {description}, and the spec samples with {shaping}",
        "set agent.temperature and top_p to 1, or start vLLM with --logprobs-mode processed_logprobs",
    )


def _by_token(answers: Sequence[Sampled]) -> dict[int, list[float]]:
    logprobs: dict[int, list[float]] = {}
    for answer in answers:
        if answer.ids:
            logprobs.setdefault(answer.ids[0], []).append(answer.logprobs[0])
    return logprobs


# The checks of a run's servers before it starts: is a server listening, and which release is the engine.

CONNECT_SECONDS = 10.0
"""Maximum seconds for a connection."""
ANSWER_SECONDS = 5.0
"""Maximum seconds for an engine to report its version; a run's record is not worth a longer wait."""
_PATHS = ("/version", "/get_server_info")
"""vLLM responds to the first with ``{"version": …}``; SGLang's response to the second contains ``version``."""


async def require_reachable(role: str, configs: Sequence[ServerConfig]) -> None:
    """Connect to each server once; raise RunError if none responds.

    Without this check a wrong address would be detected only after all retries of the first rollouts.
    """

    listening = [config for config in configs if config.base_url is not None and proxy_of(config.base_url) is None]
    if len(listening) < len(configs):
        return
    problems = await asyncio.gather(*(_connection_error(str(config.base_url)) for config in listening))
    if all(problems):
        raise RunError(
            f"no server of the role {role!r} can be reached ({'; '.join(filter(None, problems))}). "
            "Is it running, and is its base_url right?"
        )
    await require_address(role, [each for each, problem in zip(listening, problems, strict=True) if problem is None])


async def require_address(role: str, configs: Sequence[ServerConfig]) -> None:
    """Raise `UserError` if a chat server responds only below `/v1`, and its base_url omits that.

    A server that does not respond is accepted: a judge may have a fallback.
    """
    elsewhere = await asyncio.gather(*map(_answers_elsewhere, configs))
    for config, other in zip(configs, elsewhere, strict=True):
        if other is not None:
            address = public_url(str(config.base_url))
            raise UserError(
                f"servers.{role}.base_url: {address} has no list of models (status 404), and {other} has one: write "
                f"base_url: {other}"
            )


async def _connection_error(base_url: str) -> str | None:
    """Connect and return the error, or None on success. The text contains no credentials."""
    parts = urlsplit(base_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = f"{parts.hostname}:{port}"
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except TimeoutError:
        return f"{address}: no answer within {CONNECT_SECONDS:g} s"
    except OSError as error:
        return f"{address}: {error.strerror or type(error).__name__}"
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return None


async def _answers_elsewhere(config: ServerConfig) -> str | None:
    """Return the address with `/v1` if a chat server responds there and not at its base_url."""
    has_fixed_url = config.base_url is None or config.kind.token_level
    other = None if has_fixed_url else with_version(str(config.base_url))
    if other is None:
        return None
    statuses = []
    for each in (config, replace(config, base_url=other)):
        transport = Transport(each)
        try:
            statuses.append((await transport.get_json("models", ANSWER_SECONDS))[0])
        finally:
            await transport.close()
    return public_url(other) if statuses == [404, 200] else None


async def engines(configs: Sequence[ServerConfig]) -> list[str | None]:
    """Return the version of each server in order; None for a server that reports none, such as hosted models."""
    return list(await asyncio.gather(*map(_engine_name, configs)))


async def _engine_name(config: ServerConfig) -> str | None:
    if config.base_url is None:
        return None
    transport = Transport(config)
    try:
        for path in _PATHS:
            status, data = await transport.get_json(path, ANSWER_SECONDS)
            version = data.get("version") if status == 200 and isinstance(data, dict) else None
            if isinstance(version, str):
                return version
        return None
    finally:
        await transport.close()
