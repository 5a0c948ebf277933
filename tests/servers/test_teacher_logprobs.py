"""How probable given tokens are: three dialects over HTTP, answers that are wrong, servers that cannot say it."""

from __future__ import annotations

import json
import math
from array import array
from typing import Any

import pytest
from aiohttp import web

from hermes_rl.errors import ServerFailure, UserError
from hermes_rl.servers.base import Malformed, Sampled, Sampling, ServerConfig, scores_of, scores_of_prompt
from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.factory import create_client
from hermes_rl.servers.policy import Policy
from hermes_rl.servers.scripted.server import ScriptedServer
from hermes_rl.servers.sglang import Generate
from hermes_rl.servers.transport import RetryPolicy
from hermes_rl.servers.vllm import Completions
from hermes_rl.spec.server_types import SERVER_TYPES
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.transcript import MASKED_LOGPROB, TokenLogprobs, ids
from tests.servers.token_policy import TokenPolicy

IDS = ids([7, 300, 0, 7])
EXACT = [name for name, kind in SERVER_TYPES.items() if kind.exact]


def client_of(kind: str, url: str | None) -> ModelClient:
    config = ServerConfig(kind, None if kind == "scripted" else url, "m", tokenizer=None if kind == "scripted" else "t")
    return create_client("teacher", [config], RetryPolicy(attempts=3, random=lambda: 0.0))


@pytest.mark.parametrize("kind", [name for name in EXACT if name != "scripted"])
@pytest.mark.parametrize("top_k", [0, 1, 5])
async def test_every_dialect_returns_teacher_logprobs(kind: str, top_k: int) -> None:
    async with (
        TokenPolicy(load_tokenizer(), lambda prompt, chance: "").running() as url,
        client_of(kind, url) as client,
    ):
        found = await client.scored(IDS, top_k)
    assert found.reference == [MASKED_LOGPROB, *(-0.25 if token % 2 == 0 else -3.0 for token in IDS[1:])]
    assert [len(row) for row in found.distill_ids] == [len(row) for row in found.distill_logprobs] == [0, *[top_k] * 3]
    for token, own, row, values in zip(
        IDS[1:], found.token_logprobs, found.distill_ids[1:], found.distill_logprobs[1:], strict=True
    ):
        assert values == sorted(values, reverse=True)
        assert len(set(row)) == top_k
        assert all(one == token for one, logprob in zip(row, values, strict=True) if logprob == own)


async def test_the_scripted_server_makes_up_a_distribution() -> None:
    async with client_of("scripted", None) as client:
        found = await client.scored(IDS, 4)
    assert found.reference == [MASKED_LOGPROB, *[math.log(0.5)] * 3]
    assert [row[0] for row in found.distill_ids[1:]] == list(IDS[1:])
    assert all(sum(map(math.exp, row)) <= 1 for row in found.distill_logprobs)


def test_what_was_said_is_the_same_after_a_way_through_a_file() -> None:
    said = TokenLogprobs(array("d", [-0.1, -2 / 3]), 2, ids([1, 2, 3, 4]), array("d", [-0.1, -3.0, -1e-9, -9999.0]))
    assert TokenLogprobs.unpacked(json.loads(json.dumps(said.packed()))) == said
    with pytest.raises(ValueError, match="2 places with 3 tokens each"):
        TokenLogprobs(said.token_logprobs, 3, said.top_ids, said.top_logprobs)
    with pytest.raises(ValueError, match="not packed log-probabilities: error"):
        TokenLogprobs.unpacked({"own": ""})


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (None, "at no places, and 2 tokens"),
        ([None], "at 1 places, and 2 tokens"),
        ([None, None], "no log-probability of the token 6"),
        ([None, {5: -1.0}], "no log-probability of the token 6"),
        ([None, {6: None}], "the log-probability None"),
        ([None, {6: float("nan")}], "the log-probability nan"),
        ([None, {6: -1.0, 5: 0.5}], "0.5 is above 0"),
        ([None, {6: -1.0}], "1 candidate tokens at a position; 2 were requested"),
    ],
)
def test_a_wrong_answer_is_never_taken(places: Any, said: str) -> None:
    with pytest.raises(Malformed, match=said):
        scores_of(places, ids([5, 6]), 2)


def test_token_outside_the_top_k_is_not_among_them() -> None:
    found = scores_of([None, {6: -7.0, 1: -0.5, 2: -1.0}], ids([5, 6]), 2)
    assert (found.token_logprobs.tolist(), found.distill_ids, found.distill_logprobs) == (
        [-7.0],
        [[], [1, 2]],
        [[], [-0.5, -1.0]],
    )


def test_minus_infinity_is_the_least_number_however_a_server_writes_it() -> None:
    found = scores_of([None, {6: -1.0, 1: None, 2: -math.inf, 3: -10000.0}], ids([5, 6]), 4)
    assert found.distill_logprobs[1] == [-1.0, -9999.0, -9999.0, -9999.0]


def test_both_forms_of_vllm_and_that_of_sglang() -> None:
    long = [None, {"6": {"logprob": -1.0, "rank": 2, "decoded_token": "a"}, "9": {"logprob": -0.5, "rank": 1}}]
    assert scores_of_prompt(long, ids([5, 6]), 2) == scores_of_prompt([None, {"6": -1.0, "9": -0.5}], ids([5, 6]), 2)
    choice = {"choices": [{"prompt_logprobs": long}]}
    meta = {
        "input_token_logprobs": [[None, 5, None], [-1.0, 6, None]],
        "input_top_logprobs": [None, [[-0.5, 9, None], [-1.0, 6, None]]],
    }
    ours = Completions().read_scores(choice, ids([5, 6]), 2)
    assert Generate().read_scores({"meta_info": meta}, ids([5, 6]), 2) == ours
    with pytest.raises(Malformed, match="no prompt_logprobs"):
        Completions().read_scores({"choices": [{}]}, ids([5, 6]), 2)
    with pytest.raises(Malformed, match="no input_token_logprobs"):
        Generate().read_scores({"meta_info": {}}, ids([5, 6]), 2)


async def test_a_failure_is_repeated_and_then_told() -> None:
    answers: list[int] = []

    class Broken(ScriptedServer):
        good = 2

        async def _completions(self, request: web.Request) -> web.Response:
            answers.append(len(answers))
            if len(answers) <= self.good:
                return web.json_response({"choices": [{"text": ""}]})
            return await super()._completions(request)

    server = Broken("m", load_tokenizer())
    url = await server.start()
    try:
        async with client_of("vllm", url) as client:
            assert len((await client.scored(IDS, 1)).token_logprobs) == 3
            assert (client.retries, len(answers)) == (2, 3)
            server.good = 100
            with pytest.raises(ServerFailure, match=r"'teacher' gave no usable answer in 3 attempts.*prompt_logprobs"):
                await client.scored(IDS, 1)
    finally:
        await server.close()


async def test_servers_that_cannot_say_it_are_refused() -> None:
    async with client_of("openai", "http://127.0.0.1:9/v1") as client:
        with pytest.raises(UserError, match="a server of type openai does not report"):
            await client.scored(IDS, 1)

    async def sample(prompt: list[int], sampling: Sampling) -> Sampled:
        raise AssertionError("it is not asked")

    policy = Policy.sampling(sample, None)
    with pytest.raises(UserError, match="a server of type callable does not report"):
        await policy.role.scored(IDS, 1)
