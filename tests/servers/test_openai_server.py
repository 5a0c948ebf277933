"""The transport against real sockets: what is sent, what each fault leads to, what is never shown."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from hermes_rl.errors import ServerFailure
from hermes_rl.servers.base import ChatRequest, ContextLengthExceeded, ReasoningOptions, Secret, ServerConfig
from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.factory import create_client
from hermes_rl.servers.transport import RetryPolicy
from hermes_rl.servers.usage import Meter, Usage
from tests.servers.loopback_server import Answer, Loopback, Naps, completion, error
from tests.waiting import until

Start = Callable[[], Awaitable[Loopback]]
KEY = "key-that-must-not-be-seen"
HI = ChatRequest([{"role": "user", "content": "hi"}])


def role(server: Loopback, policy: RetryPolicy | None = None, **fields: Any) -> ModelClient:
    return create_client("policy", [ServerConfig("openai", server.url, "m", **fields)], policy)


async def test_a_plain_call(loopback: Start) -> None:
    server = await loopback()
    async with role(server) as policy:
        reply = await policy.chat(HI)
    assert reply.message == {"role": "assistant", "content": "hello"}
    assert (reply.finish_reason, reply.model, reply.server_type, reply.attempts) == (
        "stop",
        "served",
        "openai",
        1,
    )
    assert reply.usage["total_tokens"] == 4
    assert reply.timing.generating > 0
    assert server.seen[0].path == "/v1/chat/completions"
    assert server.seen[0].body == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert "Authorization" not in server.seen[0].headers


async def test_context_length_is_the_shortest_of_all_servers(loopback: Start) -> None:
    servers = [await loopback() for _ in range(3)]
    models = [{"id": "m", "max_model_len": 4096}, {"id": "m", "max_model_len": 2048}, {"id": "m"}]
    for server, model in zip(servers, models, strict=True):
        server.otherwise = Answer(body=json.dumps({"data": [model]}).encode())
    configs = [
        ServerConfig(kind, server.url, "m") for kind, server in zip(("vllm", "openai", "openai"), servers, strict=True)
    ]
    async with create_client("policy", configs) as policy:
        assert [await policy.context_length(), await policy.context_length()] == [2048, 2048]
    assert [server.seen[0].path for server in servers] == ["/v1/models"] * 3
    assert [len(server.seen) for server in servers] == [1, 1, 1]  # it is asked once
    async with role(servers[2]) as policy:
        assert await policy.context_length() is None


async def test_only_what_is_set_is_sent(loopback: Start) -> None:
    server = await loopback()
    tools = [{"type": "function", "function": {"name": "t", "parameters": {}}}]
    request = ChatRequest(
        HI.messages, tools, temperature=0.0, top_p=0.9, max_tokens=7, seed=5, stop=["x"], logprobs=True
    )
    async with role(server) as policy:
        await policy.chat(request)
    body = server.seen[0].body
    assert body["tools"] == tools
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.0, 0.9, 7, 5)
    assert (body["stop"], body["logprobs"]) == (["x"], True)


async def test_extra_body_is_merged_at_the_top_level_and_overrides(loopback: Start) -> None:
    server = await loopback()
    extra = {"temperature": 0.3, "chat_template_kwargs": {"enable_thinking": False}}
    async with role(server) as policy:
        await policy.chat(ChatRequest(HI.messages, temperature=1.0, extra_body=extra))
    assert extra.items() <= server.seen[0].body.items()


@pytest.mark.parametrize(
    ("reasoning", "sent"),
    [
        (ReasoningOptions(), {"enabled": True}),
        (ReasoningOptions(effort="high", max_tokens=9), {"enabled": True, "effort": "high"}),
        (ReasoningOptions(max_tokens=9), {"enabled": True, "max_tokens": 9}),
    ],
)
async def test_thinking_fields(loopback: Start, reasoning: ReasoningOptions, sent: dict[str, Any]) -> None:
    server = await loopback()
    async with role(server) as policy:
        await policy.chat(ChatRequest(HI.messages, reasoning=reasoning))
    assert server.seen[0].body["reasoning"] == sent


def test_thinking_fields_of_openai_itself() -> None:
    from hermes_rl.servers.base import chat_body

    config = ServerConfig("openai", "https://api.openai.com/v1", "o")
    body = chat_body(ChatRequest([], temperature=0.2, max_tokens=50, reasoning=ReasoningOptions()), config)
    assert body == {
        "model": "o",
        "messages": [],
        "temperature": 1.0,
        "max_completion_tokens": 50,
        "reasoning_effort": "medium",
    }


async def test_keys_and_headers(loopback: Start) -> None:
    server = await loopback()
    async with role(server, api_key=Secret(KEY), headers={"X-Team": Secret("blue-team")}) as policy:
        await policy.chat(HI)
    assert server.seen[0].headers["Authorization"] == f"Bearer {KEY}"
    assert server.seen[0].headers["X-Team"] == "blue-team"


@pytest.mark.parametrize("way", ["", "off", "own"])
async def test_each_call_of_a_rollout_names_its_session(loopback: Start, way: str) -> None:
    server = await loopback()
    own = {"x-session-id": Secret("mine")} if way == "own" else {}
    async with role(server, session_header=way != "off", headers=own) as policy:
        for rollout in ("row\n7:0-1@white", "row\n7:0-1@white", None):
            await policy.chat(replace(HI, rollout_id=rollout))
    told = [{k.lower(): v for k, v in seen.headers.items()}.get("x-session-id") for seen in server.seen]
    name = "row%0A7:0-1%40white"
    assert told == {"": [name, name, None], "off": [None] * 3, "own": ["mine"] * 3}[way]


async def test_extra_message_fields_of_the_server_are_retained(loopback: Start) -> None:
    server = await loopback()
    message = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "reasoning_details": [{"type": "x"}],
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "t", "arguments": "{"}}],
    }
    logprobs = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1}]}
    server.answers = [completion(message=message, finish_reason="tool_calls", logprobs=logprobs)]
    async with role(server) as policy:
        reply = await policy.chat(ChatRequest(HI.messages, logprobs=True))
    assert reply.message == message
    assert (reply.logprobs, reply.tokens) == ([-0.5, -1.0], ["a", "b"])


FAULTS = {
    "429": error(429, Retry_After="3"),
    "500": error(500),
    "reset": Answer(fault="reset"),
    "broken JSON": Answer(body=b'{"choices": [{"mess'),
    "not an object": Answer(body=b"[]"),
    "truncated body": Answer(body=b'{"choices"', fault="truncate"),
    "empty choices": Answer(body=b'{"choices": []}'),
    "no message": Answer(body=b'{"choices": [{}]}'),
    "error with status 200": Answer(body=b'{"error": {"code": 502, "message": "upstream"}}'),
    "error in a choice": completion(error={"message": "upstream"}),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_faults_are_survived(loopback: Start, policy: RetryPolicy, naps: Naps, fault: str) -> None:
    server = await loopback()
    server.answers = [FAULTS[fault], FAULTS[fault]]
    async with role(server, policy) as asked:
        reply = await asked.chat(HI)
    assert reply.message["content"] == "hello"
    assert (reply.attempts, len(server.seen), len(naps.seconds)) == (3, 3, 2)
    assert naps.seconds[0] >= (3 if fault == "429" else 0)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_lasting_fault_is_a_failure_with_its_cause(loopback: Start, policy: RetryPolicy, fault: str) -> None:
    server = await loopback()
    server.otherwise = FAULTS[fault]
    async with role(server, policy) as asked:
        with pytest.raises(ServerFailure, match=r"8 attempts.*\[1-8\]"):
            await asked.chat(HI)
    assert len(server.seen) == 8


async def test_a_server_that_hangs(loopback: Start, policy: RetryPolicy) -> None:
    server = await loopback()
    server.answers = [Answer(fault="hang")]
    async with role(server, policy, timeout=0.2) as asked:
        reply = await asked.chat(HI)
        assert reply.attempts == 2
        assert reply.timing.retrying >= 0.2 > reply.timing.generating
        server.otherwise = Answer(fault="hang")
        with pytest.raises(ServerFailure, match=r"3 attempts.*no answer within 0.2 s"):
            await asked.chat(HI)


async def test_unreachable_server_raises_a_server_failure_with_its_url(policy: RetryPolicy) -> None:
    config = ServerConfig("openai", "http://127.0.0.1:9/v1", "m")
    async with create_client("judge", [config], policy) as asked:
        with pytest.raises(ServerFailure, match=r"'judge'.*http://127.0.0.1:9/v1/chat/completions.*connection"):
            await asked.chat(HI)


async def test_a_wrong_key_is_not_tried_again(loopback: Start, policy: RetryPolicy) -> None:
    server = await loopback()
    server.otherwise = error(401, f"Incorrect API key provided: {KEY}")
    async with role(server, policy, api_key=Secret(KEY)) as asked:
        with pytest.raises(ServerFailure, match="status 401"):
            await asked.chat(HI)
    assert len(server.seen) == 1


async def test_a_redirect_is_not_followed(loopback: Start, policy: RetryPolicy) -> None:
    server, other = await loopback(), await loopback()
    server.otherwise = Answer(status=307, headers={"Location": f"{other.url}/chat/completions"})
    async with role(server, policy, api_key=Secret(KEY)) as asked:
        with pytest.raises(ServerFailure, match="status 307"):
            await asked.chat(HI)
    assert other.seen == []


async def test_context_overflow_is_not_a_server_failure_and_not_retried(loopback: Start, policy: RetryPolicy) -> None:
    server = await loopback()
    server.otherwise = error(400, "This model's maximum context length is 10 tokens.")
    async with role(server, policy) as asked:
        with pytest.raises(ContextLengthExceeded, match="maximum context length"):
            await asked.chat(HI)
    assert len(server.seen) == 1


def _everything_shown(caught: BaseException) -> str:
    import traceback

    shown, todo = [], [caught]
    while todo:
        one = todo.pop()
        shown += [str(one), repr(one), *traceback.format_exception(one)]
        todo += [linked for linked in (one.__cause__, one.__context__) if linked is not None]
        todo += getattr(one, "exceptions", ())
    return "\n".join(shown)


@pytest.mark.parametrize("fault", ["echo", "reset", "dead", "broken"])
async def test_secrets_are_never_shown(
    loopback: Start, policy: RetryPolicy, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    caplog.set_level(logging.DEBUG)
    server = await loopback()
    password, team = "pass-word-1", "team-secret"
    shown = f"{KEY} {password} {team} query-secret"
    server.otherwise = {
        "echo": error(500, shown),
        "broken": Answer(body=shown.encode()),
        "reset": Answer(fault="reset"),
        "dead": Answer(),
    }[fault]
    host = server.url.removeprefix("http://") if fault != "dead" else "127.0.0.1:9/v1"
    config = ServerConfig(
        "openai",
        f"http://me:{password}@{host}?k=query-secret",
        "m",
        api_key=Secret(KEY),
        headers={"X-Team": Secret(team)},
    )
    async with create_client("policy", [config], policy) as asked:
        with pytest.raises(ServerFailure) as caught:
            await asked.chat(HI)
    text = _everything_shown(caught.value) + caplog.text + repr(config.headers) + repr(config.api_key)
    assert not [secret for secret in (KEY, password, team, "query-secret") if secret in text]


@pytest.mark.parametrize("form", [KEY, KEY.replace("-", "/"), f"Bearer {KEY}"])
@pytest.mark.parametrize("packed", [False, True])
async def test_a_reply_that_repeats_a_secret_has_a_mask_instead(loopback: Start, form: str, packed: bool) -> None:
    server = await loopback()
    answer = completion(f"I was sent {form} and EMPTY for application/json.")
    server.otherwise = (
        Answer(body=gzip.compress(answer.body), headers={"Content-Encoding": "gzip"}) if packed else answer
    )
    headers = {"X-Auth": Secret(form)} if form.startswith("Bearer") else {"Accept": Secret("application/json")}
    key = Secret("EMPTY" if form.startswith("Bearer") else form)
    async with role(server, api_key=key, headers=headers) as asked:
        reply = await asked.chat(HI)
    assert reply.message["content"] == "I was sent *** and EMPTY for application/json.", "what may be any word stays"


def test_a_secret_hides_itself() -> None:
    import pickle

    secret = Secret(KEY)
    assert KEY not in f"{secret} {secret!r} {[secret]}"
    assert secret.reveal() == KEY
    with pytest.raises(TypeError):
        pickle.dumps(secret)


async def test_credentials_in_the_address_are_sent_but_a_key_wins(loopback: Start) -> None:
    server = await loopback()
    url = server.url.replace("//", "//me:pw@")
    for key in (None, Secret(KEY)):
        async with create_client("policy", [ServerConfig("openai", url, api_key=key)]) as asked:
            await asked.chat(HI)
    assert [seen.headers["Authorization"].split()[0] for seen in server.seen] == ["Basic", "Bearer"]


async def test_concurrency_is_bounded_and_queueing_is_timed_separately(loopback: Start) -> None:
    server = await loopback()
    server.otherwise.delay = 0.2
    async with role(server, max_concurrency=4) as asked:
        replies = await asyncio.gather(*(asked.chat(HI) for _ in range(12)))
    assert server.peak == 4
    last = max(replies, key=lambda reply: reply.timing.queued).timing
    assert last.queued >= 0.38
    assert last.generating < last.queued, "which is no part of it"


async def test_a_pause_holds_no_place(loopback: Start) -> None:
    server = await loopback()
    server.answers = [error(500)]
    policy = RetryPolicy(random=lambda: 1.0, base=2)
    async with role(server, policy, max_concurrency=1) as asked:
        failing = asyncio.create_task(asked.chat(HI))
        await until(lambda: server.seen)
        await asked.chat(HI)
        assert not failing.done()
        assert (await failing).attempts == 2


async def test_cancelled_calls_release_their_connections(loopback: Start) -> None:
    server = await loopback()
    server.otherwise = Answer(fault="hang")
    async with role(server, max_concurrency=2) as asked:
        calls = [asyncio.create_task(asked.chat(HI)) for _ in range(6)]
        await until(lambda: server.in_flight >= 2)
        for call in calls:
            call.cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        await until(lambda: not server.in_flight)
        assert server.lost == 2
        server.otherwise = completion()
        assert (await asked.chat(HI)).message["content"] == "hello"


async def test_a_lone_surrogate_does_not_break_a_call(loopback: Start) -> None:
    server = await loopback()
    async with role(server) as asked:
        await asked.chat(ChatRequest([{"role": "user", "content": "\ud800 größer"}]))
    assert server.seen[0].body["messages"][0]["content"] == "\ud800 größer"


def counted(**usage: float) -> Answer:
    answer = completion()
    return Answer(body=json.dumps({**json.loads(answer.body), "usage": usage}).encode())


@pytest.mark.parametrize("content", ["NaN", "-Infinity", "1e999"])
async def test_a_number_that_json_cannot_hold_is_none(loopback: Start, content: str) -> None:
    server = await loopback()
    server.answers = [Answer(body=completion("here").body.replace(b'"here"', content.encode()))]
    async with role(server) as policy:
        assert (await policy.chat(HI)).message["content"] is None


async def test_counts_that_nothing_can_hold_are_not_counted(loopback: Start) -> None:
    server = await loopback()
    counts = {"prompt_tokens": 10**400, "completion_tokens": -1, "cost": 1e999}
    server.answers = [counted(**counts), counted(prompt_tokens=7, completion_tokens=2.0)]
    used = Usage()
    with Meter().counting() as meter:
        async with role(server, prices={"prompt": 1.0, "completion": 1.0}) as policy:
            for _ in range(2):
                used.add((await policy.chat(HI)).usage)
    known = {"prompt_tokens": 7, "completion_tokens": 2, "calls": 2, "known_cost": 9e-6, "unpriced": 1, "uncounted": 1}
    assert used.record() == meter.roles["policy"].record() == known


@pytest.mark.parametrize("content", ["[" * 300 + "]" * 300, "9" * 5000])
async def test_response_that_is_not_json_is_retried(
    loopback: Start, policy: RetryPolicy, naps: Naps, content: str
) -> None:
    server = await loopback()
    whole = completion("here").body
    server.answers = [Answer(body=whole.replace(b'"here"', content.encode()))]
    async with role(server, policy) as asked:
        assert (await asked.chat(HI)).message["content"] == "hello"


async def test_no_request_but_the_calls_is_made(loopback: Start) -> None:
    server = await loopback()
    async with role(server) as asked:
        await asked.chat(HI)
        await asyncio.sleep(0.1)
    assert len(server.seen) == 1


def test_a_role_outlives_an_event_loop() -> None:
    async def ask(asked: ModelClient | None) -> ModelClient:
        server = await Loopback().start()
        asked = asked or role(server, RetryPolicy(attempts=1))
        config = asked.configs[0]
        assert config.base_url is not None
        reply = await asked.chat(HI) if config.base_url == server.url else None
        assert reply is None or reply.message["content"] == "hello"
        await server.stop()
        return asked

    asked = asyncio.run(ask(None))

    async def again() -> None:
        with pytest.raises(ServerFailure):
            await asked.chat(HI)  # its server is gone: a failure, not an error about event loops
        await asked.close()

    asyncio.run(again())
