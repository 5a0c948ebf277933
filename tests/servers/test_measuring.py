"""What thousands of draws show about a token-level server."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from token_policy import Logged, TokenPolicy

from hermes_rl.servers.base import Sampled, ServerConfig
from hermes_rl.servers.exactness import Finding
from hermes_rl.servers.factory import token_server
from hermes_rl.servers.measuring import distribution, measure
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import small_tokenizer_path

SMALL = load_tokenizer()
LETTERS = [SMALL.encode(letter)[0] for letter in "abcd"]
SHARES = (0.4, 0.3, 0.2, 0.1)
DRAWS = 600


class Drawing(TokenPolicy):
    """Draws one of four letters with the chances `SHARES`; `noise` says from what a request's randomness comes."""

    def __init__(self, noise: Callable[[int | None, int], Any], drawn_from: tuple[float, ...] = SHARES) -> None:
        super().__init__(SMALL, lambda prompt, chance: "a")
        self._noise, self._from, self._requests = noise, drawn_from, 0

    async def _sample(
        self, body: dict[str, Any], prompt: list[int], limit: int, seed: int | None
    ) -> tuple[Logged, str]:
        self._requests += 1
        chance = random.Random(repr(self._noise(seed, self._requests)))
        ids = chance.choices(LETTERS, self._from, k=limit)
        return Logged(prompt, ids, [math.log(SHARES[LETTERS.index(one)]) for one in ids], seed, 1), "length"


async def found(server: Drawing) -> list[Finding]:
    async with server.running() as url:
        asked = token_server(ServerConfig("vllm", url, "m", tokenizer=str(small_tokenizer_path())))
        findings = await measure(asked, 1.0, None, DRAWS)
        await asked.close()
    return findings


async def test_a_server_that_does_as_asked_is_right() -> None:
    findings = await found(Drawing(lambda seed, number: seed))
    assert [finding.detail for finding in findings if not finding.ok] == []
    assert f"{DRAWS} draws of one token: total variation 0.0" in findings[0].detail


async def test_a_server_that_leaves_out_rare_tokens_is_found() -> None:
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
