"""Odd replies of servers of every kind: a failure in words or a right value, and no token trained that is out of range.

The seed is printed: ``ODD_SEED=…`` repeats a failure.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import random
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hermes_rl.agent.history import kept_message
from hermes_rl.agent.loop import HermesAgentLoop
from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.errors import ServerFailure
from hermes_rl.servers.base import ChatRequest, ContextLengthExceeded, ServerConfig
from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.factory import create_client
from hermes_rl.servers.token_level import PADDING
from hermes_rl.servers.transport import RetryPolicy
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from hermes_rl.tools.base import Toolkit
from hermes_rl.tools.python_tools import python_tool
from tests.servers.loopback_server import Answer, Loopback
from tests.test_boundary import CHAT, GENERATED, SAMPLED, python_json, spoiled
from tests.thorough import THOROUGH

DRAWS = 2000 if THOROUGH else 60
LARGEST = max(load_tokenizer().vocabulary.values()) + PADDING
MOST = 8
"""Tokens that are asked for."""
HI = [{"role": "user", "content": "hi"}]
RIGHT: dict[str, Any] = {
    "openai": CHAT,
    "vllm": SAMPLED,
    "sglang": GENERATED,
    "vllm-score": {"model": "m", "data": [{"score": 0.5}], "usage": {"prompt_tokens": 3}},
    "vllm-classify": {"model": "m", "data": [{"probs": [0.25, 0.75]}]},
    "vllm-pooling": {"model": "m", "data": [{"data": [[0.1], [0.2]]}]},
}


def f(x: int = 0) -> str:
    """Return the number."""
    return str(x)


TOOLKIT = Toolkit([python_tool(f)])


def out_of_range(right: Any, chance: random.Random) -> Any:
    """Return a reply whose ids or log-probabilities no engine can have sampled, or not for what was asked."""
    ids = [[LARGEST + 1], [-1], [2**31], [5] * (MOST + 1), [10**30], [5.0], [True], []]
    values = [0.5, 1e-7, -1e99, math.nan, -math.inf, None, "x"]
    tokens, value = (chance.choice(ids), -0.5) if chance.random() < 0.5 else ([5], chance.choice(values))
    changed = json.loads(json.dumps(right))
    if "choices" in changed:
        choice = changed["choices"][0]
        choice["token_ids"] = tokens
        pairs = [{"token": "a", "logprob": value}] * len(tokens)
        choice["logprobs"] = {"token_logprobs": [value] * len(tokens), "content": pairs}
        choice["prompt_logprobs"] = [None, {str(tokens[0] if tokens else 7): {"logprob": value}}]
    elif "meta_info" in changed:
        changed["meta_info"]["output_token_logprobs"] = [[value, token, None] for token in tokens]
        changed["meta_info"]["input_token_logprobs"] = [[value, token, None] for token in tokens]
    else:
        changed["data"][0] = {"score": value, "probs": [value], "data": [value]}
    return changed


def odd(kind: str, chance: random.Random) -> Answer:
    """Return an odd answer of a server of this type."""
    right = RIGHT[kind]
    shape = chance.randrange(10)
    value = out_of_range(right, chance) if shape < 4 else spoiled(right, chance)
    body = python_json(value)
    if shape == 7:
        return Answer(body=body[: chance.randrange(len(body))])
    if shape == 8:
        packed = gzip.compress(chance.choice([body, b" " * (1 << 20) + body]))
        cut = packed[: chance.choice([len(packed), len(packed) // 2])]
        return Answer(body=cut, headers={"Content-Encoding": chance.choice(["gzip", "deflate", "br", "nonsense"])})
    if shape == 9:
        raw = chance.choice([b"", b"null", b"[]", b"\xff\xfe", b"[" * 5000, b'{"error": {"code": 1e99}}', b"1" * 5000])
        status = chance.choice([200, 200, 204, 302, 400, 404, 500])
        return Answer(status, raw, {"Retry-After": chance.choice(["0", "-1", "nan", "soon"])})
    return Answer(body=body)


Use = Callable[[ModelClient], Awaitable[None]]


async def as_policy(client: ModelClient) -> None:
    result = await HermesAgentLoop(client, TOOLKIT.schemas, options=LoopOptions(max_turns=2, max_tokens=MOST)).run(HI)
    for sequence in result.transcript.sequences() if result.transcript is not None else ():
        assert all(0 <= token <= LARGEST for token in sequence.tokens)
        assert all(math.isfinite(value) and value <= 0 for value in sequence.sampled)
        assert len(sequence.trained) <= 2 * MOST


async def as_user(client: ModelClient) -> None:
    reply = await client.chat(ChatRequest(HI, max_tokens=MOST, logprobs=True))
    json.dumps(kept_message(reply.message, 1))
    assert all(-9999 < value <= 0 for value in reply.logprobs or ())


async def as_judge(client: ModelClient) -> None:
    text, _ = await client.answer(HI, {"type": "object"}, max_tokens=MOST)
    assert isinstance(text, str)


async def as_teacher(client: ModelClient) -> None:
    scores = await client.scored(array("i", [6, 7, 8]), 1)
    assert all(math.isfinite(value) and value <= 0 for value in (*scores.token_logprobs, *scores.top_logprobs))
    assert all(token >= 0 for token in scores.top_ids)


async def as_reward_model(client: ModelClient) -> None:
    assert all(map(math.isfinite, await client.rated(HI)))


USES: list[tuple[Use, str]] = [
    (as_policy, "openai"), (as_policy, "vllm"), (as_policy, "sglang"), (as_user, "openai"), (as_judge, "openai"),
    (as_teacher, "vllm"), (as_teacher, "sglang"), (as_reward_model, "vllm-score"),
    (as_reward_model, "vllm-classify"), (as_reward_model, "vllm-pooling"),
]  # fmt: skip


@pytest.mark.generated
async def test_an_odd_reply_is_a_failure_or_a_right_value(loopback: Callable[[], Awaitable[Loopback]]) -> None:
    seed = int(os.environ.get("ODD_SEED") or random.randrange(2**31))
    chance = random.Random(seed)
    server = await loopback()
    clients = {kind: client_of(kind, server) for kind in RIGHT}
    taken = 0
    for number in range(DRAWS):
        use, kind = USES[number % len(USES)]
        server.otherwise = odd(kind, chance)
        try:
            await use(clients[kind])
            taken += 1
        except (ServerFailure, ContextLengthExceeded):
            continue
        except Exception as error:
            error.add_note(f"ODD_SEED={seed}, draw {number}: {use.__name__} of {kind}: {server.otherwise.body[:500]!r}")
            raise
    for client in clients.values():
        await client.close()
    assert 0 < taken < DRAWS, f"ODD_SEED={seed}: some replies are right, and some are not"


def client_of(kind: str, server: Loopback) -> ModelClient:
    config = ServerConfig(kind, server.url, "m", tokenizer=str(small_tokenizer_path()))
    return create_client("policy", [config], RetryPolicy(attempts=1, outage=0.0))
