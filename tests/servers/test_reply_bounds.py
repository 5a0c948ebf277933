"""Replies that are larger than what was asked for can need, and numbers that no model can have given."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hermes_rl.errors import ServerFailure
from hermes_rl.servers.base import LARGEST_REPLY, ChatReply, ChatRequest, ReplyBound, ServerConfig
from hermes_rl.servers.factory import create_client
from hermes_rl.servers.transport import IN_THREAD, RetryPolicy
from tests.servers.loopback_server import Answer, Loopback, completion

Start = Callable[[], Awaitable[Loopback]]
HI = [{"role": "user", "content": "hi"}]


async def asked(server: Loopback, policy: RetryPolicy | None = None, **options: Any) -> ChatReply:
    async with create_client("policy", [ServerConfig("openai", server.url, "m")], policy) as client:
        return await client.chat(ChatRequest(HI, **options))


def packed(answer: Answer, pack: Callable[[bytes], bytes], encoding: str) -> Answer:
    return Answer(body=pack(answer.body), headers={"Content-Encoding": encoding})


BOMB = packed(completion("x" * (80 << 20)), lambda body: gzip.compress(body, 1), "gzip")


@pytest.mark.parametrize(
    ("answer", "most"),
    [(BOMB, 100), (BOMB, None), (completion("x" * (1 << 20)), 100), (completion(reasoning="x" * (1 << 20)), 100)],
    ids=["gzip", "gzip, whatever the tokens", "content", "an unknown field"],
)
async def test_a_reply_that_is_too_large_is_a_failed_attempt(
    loopback: Start, policy: RetryPolicy, answer: Answer, most: int | None
) -> None:
    server = await loopback()
    server.answers = [answer]
    assert (await asked(server, policy, max_tokens=most)).attempts == 2
    server.otherwise = answer
    bound = ReplyBound.of_chat({"max_tokens": most})
    with pytest.raises(ServerFailure, match=rf"127\.0\.0\.1.*more than {bound.size} bytes after decompression"):
        await asked(server, RetryPolicy(attempts=1), max_tokens=most)


@pytest.mark.parametrize("message", [{"reasoning_content": "x" * (1 << 20)}, {"tool_calls": [{}] * 150_000}])
async def test_reasoning_and_values_count(loopback: Start, policy: RetryPolicy, message: dict[str, Any]) -> None:
    server = await loopback()
    server.answers = [completion(message={"role": "assistant", "content": "a", **message})]
    assert (await asked(server, policy, max_tokens=1000)).attempts == 2


async def test_what_a_policy_can_write_is_below_the_bound(loopback: Start) -> None:
    server = await loopback()
    long = "\u4e00" * 12_000  # six bytes for each character as an escape
    server.otherwise = completion(long)
    assert (await asked(server, RetryPolicy(attempts=1), max_tokens=200)).message["content"] == long


@pytest.mark.parametrize(
    ("pack", "encoding"),
    [
        (gzip.compress, "gzip"),
        (zlib.compress, "deflate"),
        (lambda body: gzip.compress(body[:20]) + gzip.compress(body[20:]), "gzip"),
        (lambda body: body, "identity"),
    ],
    ids=["gzip", "deflate", "two parts", "identity"],
)
async def test_a_reply_may_be_compressed(loopback: Start, pack: Callable[[bytes], bytes], encoding: str) -> None:
    server = await loopback()
    server.otherwise = packed(completion("hello"), pack, encoding)
    assert (await asked(server)).message["content"] == "hello"
    assert server.seen[0].headers["Accept-Encoding"] == "gzip, deflate"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (packed(completion(), gzip.compress, "br"), "encoding 'br', which was not asked for"),
        (packed(completion(), lambda body: b"no gzip", "gzip"), "cannot be decompressed"),
        (packed(completion(), lambda body: gzip.compress(body)[:-4], "gzip"), "it ends too early"),
    ],
)
async def test_a_reply_that_cannot_be_decompressed_is_a_failed_attempt(
    loopback: Start, answer: Answer, problem: str
) -> None:
    server = await loopback()
    server.otherwise = answer
    with pytest.raises(ServerFailure, match=problem):
        await asked(server, RetryPolicy(attempts=1))


async def test_a_large_reply_is_read_off_the_event_loop(loopback: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from hermes_rl.servers import openai

    threads: list[bool] = []

    def watching(raw: bytes, **more: Any) -> ChatReply:
        try:
            asyncio.get_running_loop()
            threads.append(False)
        except RuntimeError:
            threads.append(True)
        return read(raw, **more)

    read = openai.read_reply
    monkeypatch.setattr(openai, "read_reply", watching)
    server = await loopback()
    server.answers = [completion("x" * IN_THREAD), completion("x")]
    await asked(server)
    await asked(server)
    assert threads == [True, False]


def test_reply_size_limit_depends_on_the_request() -> None:
    assert ReplyBound.of_chat({}).size == ReplyBound.of_chat({"max_tokens": 10**9}).size == LARGEST_REPLY
    assert ReplyBound.of_chat({"max_tokens": 10}).size < ReplyBound.of_chat({"max_completion_tokens": 1000}).size
    assert ReplyBound.of_chat({"max_tokens": 10}).size < ReplyBound.of_chat({"max_tokens": 10, "logprobs": True}).size
    assert ReplyBound.of_chat({"max_tokens": "10"}).tokens is None
    assert ReplyBound.of_scores(32_000, 20).size > ReplyBound.of_tokens(32_000).size


def entries(*values: object) -> dict[str, Any]:
    return {"content": [{"token": "a", "logprob": value} for value in values]}


@pytest.mark.parametrize("wrong", [entries(0.5), entries(-1e99), entries(*[-0.5] * 300)])
async def test_log_probabilities_that_no_model_has_given_are_a_failed_attempt(
    loopback: Start, policy: RetryPolicy, wrong: dict[str, Any]
) -> None:
    server = await loopback()
    server.answers = [completion(logprobs=wrong), completion(logprobs=entries(1e-7, -0.5))]
    reply = await asked(server, policy, max_tokens=200, logprobs=True)
    assert (reply.attempts, reply.logprobs) == (2, [0.0, -0.5])


async def test_sentinel_of_an_unlikely_token_is_not_a_logprob(loopback: Start) -> None:
    server = await loopback()
    server.otherwise = completion(logprobs=entries(-9999.0, -0.5))
    assert (await asked(server, logprobs=True)).logprobs is None
