"""What doctor finds out about a token-level server by asking it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.exactness import Finding, examine
from hermes_rl.servers.factory import token_server
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.servers.token_policy import TokenPolicy

SMALL = load_tokenizer()


class Sampler(TokenPolicy):
    """Samples one of two tokens; its log-probabilities are `raw` or those at the temperature it was asked for."""

    def __init__(self, logprob: Callable[[float, int], float]) -> None:
        super().__init__(SMALL, lambda prompt, chance: "ab"[chance.randrange(2)])
        self._of = logprob

    async def _sample(self, body: dict[str, Any], prompt: list[int], limit: int, seed: int | None) -> Any:
        sampled, finish = await super()._sample(body, prompt, limit, seed)
        sampled.logprobs[:] = [self._of(body["temperature"], token) for token in sampled.ids]
        return sampled, finish


async def found(logprob: Callable[[float, int], float], temperature: float = 1.0) -> list[Finding]:
    async with Sampler(logprob).running() as url:
        config = ServerConfig("vllm", url, "m", tokenizer=str(small_tokenizer_path()))
        server = token_server(config)
        findings = await examine(server, temperature, None)
        await server.close()
    return findings


def raw(temperature: float, token: int) -> float:
    return -0.5


async def test_raw_logprobs_break_exactness_at_another_temperature() -> None:
    assert all(finding.ok for finding in await found(raw))
    (bad,) = [finding for finding in await found(raw, 0.7) if not finding.ok]
    assert "are raw" in bad.detail
    assert "--logprobs-mode processed_logprobs" in str(bad.remedy)


async def test_processed_logprobs_fit_any_temperature() -> None:
    findings = await found(lambda temperature, token: -0.5 * temperature, 0.7)
    assert all(finding.ok for finding in findings)
    assert any("at any temperature" in finding.detail for finding in findings)


async def test_a_server_that_contradicts_itself_is_found() -> None:
    chance = random.Random(1)
    findings = await found(lambda temperature, token: -chance.random())
    assert any("differs by" in finding.detail and not finding.ok for finding in findings)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1"])
async def test_a_server_that_is_not_there_is_one_finding(url: str) -> None:
    server = token_server(ServerConfig("vllm", url, "m", tokenizer=str(small_tokenizer_path())))
    (finding,) = await examine(server, 1.0, None)
    await server.close()
    assert not finding.ok
