"""Thousands of draws show that a token-level server samples as it reports."""

from __future__ import annotations

import pytest

from hermes_rl.servers.base import Sampled, ServerConfig
from hermes_rl.servers.exactness import Finding
from hermes_rl.servers.factory import token_server
from hermes_rl.servers.sampling_check import distribution, measure
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.servers.token_policy import Drawing

DRAWS = 600


async def found(server: Drawing, temperature: float = 1.0, top_p: float | None = None) -> list[Finding]:
    async with server.running() as url:
        asked = token_server(ServerConfig("vllm", url, "m", tokenizer=str(small_tokenizer_path())))
        findings = await measure(asked, temperature, top_p, DRAWS)
        await asked.close()
    return findings


async def test_a_server_that_does_as_asked_is_right() -> None:
    findings = await found(Drawing(lambda seed, number: seed))
    assert [finding.detail for finding in findings if not finding.ok] == []
    assert f"{DRAWS} draws of one token with temperature 1: total variation 0.0" in findings[0].detail


SETTINGS = [(0.5, None, "temperature 0.5"), (3.0, None, "temperature 3"), (1.0, 0.6, "top_p 0.6")]


@pytest.mark.parametrize(("temperature", "top_p", "words"), SETTINGS)
async def test_raw_logprobs_are_found_where_something_shapes_the_distribution(
    temperature: float, top_p: float | None, words: str
) -> None:
    bad = [one for one in await found(Drawing(lambda seed, n: seed), temperature, top_p) if not one.ok]
    assert [f"{DRAWS} draws of one token with {words}: total variation" in one.detail for one in bad] == [True]
    assert "--logprobs-mode" in str(bad[0].remedy)


@pytest.mark.parametrize(("temperature", "top_p", "words"), SETTINGS)
async def test_processed_logprobs_are_right_however_the_distribution_is_shaped(
    temperature: float, top_p: float | None, words: str
) -> None:
    server = Drawing(lambda seed, number: seed, processed=True)
    findings = await found(server, temperature, top_p)
    assert [one.detail for one in findings if not one.ok] == []
    assert f"with {words}: total variation 0.0" in findings[0].detail


async def test_at_temperature_0_there_is_nothing_to_measure() -> None:
    server = Drawing(lambda seed, number: seed)
    assert [one.ok for one in await found(server, 0.0)] == [True]
    assert server.asked == []


async def test_server_that_omits_rare_tokens_is_detected() -> None:
    bad = [one for one in await found(Drawing(lambda seed, number: seed, (0.5, 0.5, 0, 0))) if not one.ok]
    assert ["total variation 0.3" in finding.detail for finding in bad] == [True]
    assert "generation_config.json" in str(bad[0].remedy)


async def test_requests_that_share_their_noise_are_found() -> None:
    # Eight requests look for a context before the draws begin.
    bad = [one for one in await found(Drawing(lambda seed, number: (number - 9) // 2)) if not one.ok]
    assert any("members of a group do not draw independently" in finding.detail for finding in bad)


async def test_turns_that_share_their_noise_are_found() -> None:
    # What a rollout's turns have in common is their place among the requests: those of all second turns come later.
    bad = [one for one in await found(Drawing(lambda seed, number: (number - 9) % (DRAWS // 2))) if not one.ok]
    assert any("turns of a rollout do not draw independently" in finding.detail for finding in bad)


async def test_a_server_that_is_not_there_is_one_finding() -> None:
    server = token_server(ServerConfig("vllm", "http://127.0.0.1:9/v1", "m", tokenizer=str(small_tokenizer_path())))
    (finding,) = await measure(server, 1.0, None, 10)
    await server.close()
    assert not finding.ok


@pytest.mark.parametrize(("given", "variation"), [((-1.0, -1.0), 0.632), ((0.0, 0.0), 0.0)])
def test_the_variation_of_a_certain_token(given: tuple[float, ...], variation: float) -> None:
    assert distribution([Sampled([1], [value]) for value in given * 50]).variation == pytest.approx(variation, abs=1e-3)
