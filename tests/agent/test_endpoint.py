"""The endpoint of a program at a port: what it answers, and that requests which overlap are trained exactly.

In whatever order answers come, each sampled token is trained once, in its context, or left out by name.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import pytest

from hermes_rl import Group, Policy, Rollout, Sampled, Sampling, StopReason, attach_provenance
from hermes_rl.agent import endpoint
from hermes_rl.agent.conversations import Kind
from hermes_rl.agent.endpoint import AT_ONCE, Endpoint
from hermes_rl.agent.program import record_run
from hermes_rl.agent.recorder import LoopOptions, PolicyRecorder, TimeIntervals
from hermes_rl.agent.result import AgentResult, Message, ProgramRun
from hermes_rl.data.rows import Row
from hermes_rl.rollouts.rollout import RolloutKey
from hermes_rl.runs.store import rollout_of, rollout_record
from hermes_rl.tokens.transcript import Transcript
from tests.api.summing import CALL, END, TOKENIZER
from tests.tokens.families import adder
from tests.waiting import stays, turns, until

EVERY: tuple[Kind, ...] = ("main", "subagents", "summaries", "side_calls", "rejected", "changed")


class Engine:
    """Answers when it is told to, in any order; `log` has what it was asked and what it has sampled."""

    def __init__(self, seed: int, longer: str = "") -> None:
        self.random, self.longer = random.Random(seed), longer
        self.pending: list[asyncio.Future[None]] = []
        self.log: list[tuple[list[int], Sampled]] = []
        self.seeds: list[int | None] = []

    async def __call__(self, ids: list[int], sampling: Sampling) -> Sampled:
        self.seeds.append(sampling.seed)
        allowed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pending.append(allowed)
        await allowed
        said = [f"Answer {self.random.randrange(3)}, all of it.", CALL.format(len(self.log), 2), " Sure.\n"]
        tokens = TOKENIZER.encode(self.random.choice(said) + self.longer + END)
        self.log.append((ids, Sampled(tokens, [-self.random.random() for _ in tokens], "stop")))
        return self.log[-1][1]

    def release(self) -> None:
        self.pending.pop(self.random.randrange(len(self.pending))).set_result(None)


@dataclass
class Asking:
    """A rollout's endpoint at a port of this machine, and a program that asks there."""

    engine: Engine
    options: LoopOptions = field(default_factory=LoopOptions)
    train: tuple[Kind, ...] = EVERY
    policy: Policy | None = None
    prompt: list[Message] = field(default_factory=list)
    conversations: list[list[Message]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self.result = AgentResult(messages=self.prompt, transcript=Transcript(), program=ProgramRun())
        policy = self.policy or Policy.sampling(self.engine, None)
        self.endpoint = Endpoint(PolicyRecorder(self.result, policy.role, self.options), "r")
        await self.endpoint.__aenter__()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)  # an answer that nobody reads fills it
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        self.endpoint.serve(listener)
        self.session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await self.endpoint.__aexit__()
        record_run(self.endpoint, self.result, self.train)

    async def ask(self, messages: list[Message], **more: Any) -> None:
        """Ask, and keep the conversation with the answer and the results of its calls."""
        body = {"model": "m", "messages": messages, "tools": adder(), **more}
        async with self.session.post(f"{self.address}/chat/completions", json=body) as response:
            self.statuses.append(response.status)
            if response.status == 200:
                answer = (await response.json())["choices"][0]["message"]
                calls = answer.get("tool_calls") or ()
                results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
                self.conversations.append([*messages, answer, *results])

    async def until_asked(self, count: int) -> None:
        await until(lambda: len(self.engine.pending) >= count)

    @property
    def rollout(self) -> Rollout:
        assert self.result.transcript is not None
        key = RolloutKey(Row("row", {}, 0, "digest"), "g", 0, 1)
        rollout = Rollout(key, 0, StopReason.FINISHED, self.result, score=1.0)
        rollout.sequences = self.result.transcript.sequences()
        return rollout


def check(played: Asking) -> None:
    """Each answer that came is one span of one sequence, in the context that the engine was sent, or left out by
    name."""
    rollout = played.rollout
    proof = attach_provenance(Group("g", rollout.key.row, [rollout]))
    assert proof.exact, proof.problems
    assert proof.trained + proof.excluded == proof.sampled
    assert proof.turns == len(played.result.replies) == len(played.result.reasoning_per_turn)
    assert rollout.sequences is not None
    spans = [
        (line.tokens[: span.start], line.tokens[span.start : span.stop], logprobs)
        for line in rollout.sequences
        for span, logprobs in zip(line.spans, spread(line), strict=True)
    ]
    sampled = [(ids, answer.ids, answer.logprobs) for ids, answer in played.engine.log]
    assert len(spans) <= len(sampled)
    for span in spans:
        sampled.remove(span)  # fails where it was sampled nowhere, or is trained twice
    assert sum(len(ids) for _, ids, _ in sampled) >= proof.excluded
    again = rollout_of(json.loads(json.dumps(rollout_record(rollout))), rollout.key)
    assert attach_provenance(Group("g", rollout.key.row, [again])) == proof


def spread(line: Any) -> list[list[float]]:
    taken, parts = 0, []
    for span in line.spans:
        parts.append(line.sampled[taken : taken + span.stop - span.start].tolist())
        taken += span.stop - span.start
    return parts


def some_request(chance: random.Random, conversations: list[list[Message]]) -> list[Message]:
    """What a program may ask next: something new, an earlier conversation again, or one that goes on or back."""
    if not conversations or chance.random() < 0.25:
        return [{"role": "user", "content": f"Task {chance.randrange(4)}"}]
    messages = chance.choice(conversations)
    way = chance.randrange(4)
    if way == 0:  # the same request again, which may be a retry
        return [each for place, each in enumerate(messages) if place < first_answer(messages)]
    if way == 1:  # back to an earlier answer
        answers = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
        return [*messages[: chance.choice(answers) + 1], {"role": "user", "content": "Otherwise."}]
    if way == 2:  # the answer in other words
        messages = [{**each, "content": (each["content"] or "").strip()} for each in messages]
    return [*messages, {"role": "user", "content": "Go on."}] if messages[-1]["role"] == "assistant" else messages


def first_answer(messages: list[Message]) -> int:
    return next(place for place, each in enumerate(messages) if each["role"] == "assistant")


@pytest.mark.parametrize("seed", range(60))
async def test_answers_in_any_order_are_trained_once_in_their_contexts(seed: int) -> None:
    chance, engine = random.Random(seed), Engine(seed)
    train = EVERY if seed % 2 else ("main", "subagents")
    played = Asking(engine, LoopOptions(max_turns=chance.choice([6, 100]), seed=seed), train)
    async with played:
        requests: set[asyncio.Task[None]] = set()
        for _ in range(40):
            if len(requests) < 4 and chance.random() < 0.6:
                requests.add(asyncio.create_task(played.ask(some_request(chance, played.conversations))))
                await asyncio.sleep(0.005)
            elif engine.pending:
                engine.release()
                await asyncio.wait([*requests, asyncio.create_task(asyncio.sleep(0.2))], return_when="FIRST_COMPLETED")
            if requests and chance.random() < 0.05:  # a program that does not wait
                requests.pop().cancel()
            requests = {each for each in requests if not each.done()}
        leaving = chance.random() < 0.5
        while requests and not leaving:
            if engine.pending:
                engine.release()
            await asyncio.wait(requests, timeout=0.2, return_when="FIRST_COMPLETED")
            requests = {each for each in requests if not each.done()}
        for request in requests:
            request.cancel()
        while engine.pending:
            engine.release()  # what is on its way when the program has ended
    check(played)
    assert played.result.turns_used <= played.options.max_turns
    assert len(set(engine.seeds)) == len(engine.seeds)


async def test_endpoint_serves_requests_concurrently_up_to_its_limit() -> None:
    engine = Engine(0)
    async with Asking(engine, LoopOptions(max_turns=AT_ONCE + 2)) as played:
        asked = [played.ask([{"role": "user", "content": f"Task {number}"}]) for number in range(AT_ONCE + 4)]
        requests = [asyncio.create_task(each) for each in asked]
        await until(lambda: played.endpoint.requests == len(requests))
        await played.until_asked(AT_ONCE)
        await turns()
        assert len(engine.pending) == AT_ONCE
        while not all(each.done() for each in requests):
            assert len(engine.pending) <= AT_ONCE
            if engine.pending:
                engine.release()
            await asyncio.sleep(0.005)
    assert sorted(played.statuses) == [200] * (AT_ONCE + 2) + [400] * 2
    assert (played.result.turns_used, played.endpoint.stop_reason) == (AT_ONCE + 2, StopReason.MAX_TURNS)
    check(played)


async def test_concurrent_continuations_of_one_reply_branch_the_transcript() -> None:
    engine = Engine(3)
    async with Asking(engine) as played:
        first = asyncio.create_task(played.ask([{"role": "user", "content": "Begin."}]))
        await played.until_asked(1)
        engine.release()
        await first
        (begun,) = played.conversations
        both = [
            asyncio.create_task(played.ask([*begun, {"role": "user", "content": f"Way {number}."}]))
            for number in range(2)
        ]
        await played.until_asked(2)
        engine.pending.pop().set_result(None)  # the later one is answered first
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        engine.release()
        await asyncio.gather(*both)
    check(played)
    assert played.result.transcript is not None
    assert [each.how for each in played.result.transcript.turns] == ["first", "extended", "branched"]
    assert [call["continues"] for call in played.result.program.calls] == [None, 0, 0]  # type: ignore[union-attr]


async def test_endpoint_distinguishes_a_retry_from_a_concurrent_request() -> None:
    for beside, kinds in ((True, ["main", "main"]), (False, ["rejected", "main"])):
        engine = Engine(1)
        async with Asking(engine) as played:
            asked = [{"role": "user", "content": "Begin."}]
            requests = [asyncio.create_task(played.ask(asked))]
            await played.until_asked(1)
            if not beside:
                engine.release()
                await requests[0]
            requests.append(asyncio.create_task(played.ask(asked)))
            await played.until_asked(1 + beside)
            while engine.pending:
                engine.release()
            await asyncio.gather(*requests)
        assert [call["kind"] for call in played.result.program.calls] == kinds  # type: ignore[union-attr]
        check(played)


@pytest.mark.parametrize("connected", [True, False])
async def test_no_answer_comes_once_the_program_has_ended(connected: bool) -> None:
    engine = Engine(2)
    async with Asking(engine) as played:
        request = asyncio.create_task(played.ask([{"role": "user", "content": "Begin."}]))
        await played.until_asked(1)
        if not connected:
            request.cancel()
            with suppress(asyncio.CancelledError):
                await request
            await asyncio.sleep(0.05)
        await played.endpoint.__aexit__()
        assert engine.pending[0].cancelled()
        request.cancel()
    assert (played.result.turns_used, played.endpoint.answered) == (0, False)
    assert played.result.transcript is not None
    assert played.result.transcript.turns == []


def test_seconds_that_overlap_count_once() -> None:
    stretches = TimeIntervals()
    assert stretches.add(10.0, 4.0) == 4.0
    assert stretches.add(12.0, 1.0) == 1.0
    assert stretches.add(12.5, 9.0) == pytest.approx(4.0)  # from 3.5 on: all but six to ten and eleven to twelve
    assert stretches.add(12.5, 9.0) == 0.0


async def test_time_that_is_waited_for_several_answers_counts_once() -> None:
    engine = Engine(4)
    async with Asking(engine) as played:
        began = time.monotonic()
        requests = [asyncio.create_task(played.ask([{"role": "user", "content": f"{n}"}])) for n in range(4)]
        await played.until_asked(4)
        await asyncio.sleep(0.3)
        while engine.pending:
            engine.release()
        await asyncio.gather(*requests)
        spent = time.monotonic() - began
        await asyncio.sleep(0.2)
        waiting = played.endpoint.waiting
    assert 0.3 <= waiting <= spent
    assert 0.3 <= played.result.timings.generation <= spent


async def trickle(program: socket.socket) -> None:
    """Read a byte now and then, until the other side has ended it."""
    program.setblocking(False)
    while await asyncio.get_running_loop().sock_recv(program, 1):
        await asyncio.sleep(0.01)


IDLE: dict[str, tuple[str, dict[str, Any], Callable[[socket.socket], Any]]] = {
    "nothing": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "go"}]}, lambda _: None),
    "of messages": ("/v1/messages", {"messages": [{"role": "user", "content": "go"}]}, lambda _: None),
    "of responses": ("/v1/responses", {"input": "go"}, lambda _: None),
    "of Google": (
        "/v1beta/models/m:streamGenerateContent",
        {"contents": [{"parts": [{"text": "go"}]}]},
        lambda _: None,
    ),
    "a byte now and then": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "go"}]}, trickle),
    "the other half closed": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "go"}]},
        lambda program: program.shutdown(socket.SHUT_WR),
    ),
}
"""What a client reads of a streamed answer: hardly anything."""


@pytest.mark.parametrize("kind", IDLE)
async def test_endpoint_stops_waiting_for_a_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path, asked, act = IDLE[kind]
    monkeypatch.setattr("hermes_rl.agent.endpoint.WRITE_SECONDS", 0.5)
    engine = Engine(1, longer=" word" * 30_000)
    async with Asking(engine, LoopOptions(max_tokens=100_000)) as played:
        host, _, port = played.address.removeprefix("http://").removesuffix("/v1").partition(":")
        program = socket.socket()
        program.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        before = asyncio.all_tasks()
        program.connect((host, int(port)))
        body = json.dumps({**asked, "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        program.sendall(head.encode() + body)
        await played.until_asked(1)
        acting = asyncio.ensure_future(act(program)) if act is trickle else act(program)
        engine.release()
        await until(lambda: played.result.turns_used == 1)
        await until(stays(lambda: played.endpoint.waiting, 2))  # although nothing is read
        await until(lambda: asyncio.all_tasks() <= {*before, acting})  # and in the end nobody waits for the reader
        if acting is not None:
            acting.cancel()
        program.close()
    assert [call["kind"] for call in played.result.program.calls] == ["undelivered"]  # type: ignore[union-attr]


async def test_requests_that_wait_may_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_rl.agent.endpoint.HELD", 100_000)
    engine = Engine(6)
    async with Asking(engine, LoopOptions(max_turns=1)) as played:
        long = [{"role": "user", "content": "x" * 40_000}]
        requests = [asyncio.create_task(played.ask(long)) for _ in range(2)]  # the second waits for the only turn
        await played.until_asked(1)
        await asyncio.sleep(0.1)
        await played.ask(long)
        assert played.statuses == [400]
        engine.release()
        await asyncio.gather(*requests)
        assert sorted(played.statuses) == [200, 400, 400]
        assert (played.endpoint.refused, played.endpoint.stop_reason) == (1, StopReason.MAX_TURNS)
        await played.ask([{"role": "user", "content": "x" * 90_000}])  # what has been answered counts no longer
        assert played.endpoint.refused == 1
    check(played)


PICTURES = {
    "http://10.0.0.1/?what=the-secret": 400, "file:///etc/passwd": 400, "HTTPS://evil.example/": 400,
    "data:image/png;base64,AA==": 200, "https://example.org/of-the-prompt.png": 200,
}  # fmt: skip


async def test_the_models_server_fetches_nothing_for_a_program() -> None:
    shown: list[Any] = []

    async def chat(messages: list[dict[str, Any]], tools: Any) -> str:
        shown.append(messages[-1]["content"])
        return "So."

    def picture(url: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": url}}

    own = [{"role": "user", "content": [picture("https://example.org/of-the-prompt.png")]}]
    async with Asking(Engine(0), LoopOptions(max_turns=9), policy=Policy.chat(chat), prompt=own) as played:
        for url in PICTURES:
            for part in (picture(url), {"type": "image_url", "image_url": url}):
                await played.ask([{"role": "user", "content": [{"type": "text", "text": "look"}, part]}])
        assert played.statuses == [status for status in PICTURES.values() for _ in range(2)]
        for part in ({"type": "video_url", "video_url": {"url": "http://10.0.0.1"}}, {"image_url": {"url": "x"}},
                     {"type": "file", "file": {"file_id": "file-1"}}, {"type": "image_url"}):  # fmt: skip
            await played.ask([{"role": "user", "content": [part]}])
        assert played.statuses[10:] == [400] * 4
        beside = {"type": "text", "text": "look", "image_url": {"url": "http://10.0.0.1"}}
        await played.ask([{"role": "user", "content": [beside, picture("data:image/png;base64,AA==")]}])
    assert played.statuses[14:] == [200] and len(shown) == 5
    assert shown[-1] == [{"type": "text", "text": "look"}, picture("data:image/png;base64,AA==")]


@pytest.mark.parametrize("policy", [None, "openai"])
async def test_picture_of_program_is_refused_where_tokens_are_sampled(policy: str | None) -> None:
    async def chat(messages: list[dict[str, Any]], tools: Any) -> str:
        return "So."

    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    async with Asking(Engine(0), LoopOptions(), policy=Policy.chat(chat) if policy else None) as played:
        await played.ask([{"role": "user", "content": [{"type": "text", "text": "look"}, picture]}])
    assert played.statuses == [200 if policy else 400]
    assert (played.endpoint.refused, played.result.turns_used) == ((0, 1) if policy else (1, 0))
    assert policy or "'image_url'" in played.endpoint.refusal


async def test_count_tokens_matches_the_prompt_and_records_nothing() -> None:
    engine = Engine(5)
    async with Asking(engine) as played:
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "How long is this?"}]}
        for _ in range(2):  # behind an answer too
            async with played.session.post(f"{played.address}/messages/count_tokens?beta=true", json=body) as response:
                counted = await response.json()
            asked = asyncio.create_task(played.session.post(f"{played.address}/messages", json=body).__aenter__())
            await played.until_asked(1)
            engine.release()
            answer = await (await asked).json()
            assert counted == {"input_tokens": answer["usage"]["input_tokens"]}
            assert counted["input_tokens"] == len(engine.log[-1][0])
            said = {"role": "assistant", "content": answer["content"]}
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "3"}
                for block in answer["content"]
                if block["type"] == "tool_use"
            ]
            further = {"role": "user", "content": results or "Go on."}
            body = {**body, "messages": [*body["messages"], said, further]}  # type: ignore[misc]
        assert played.endpoint.answered
        picture = {"type": "image", "source": {"type": "base64", "data": "AA=="}}
        body = {**body, "messages": [{"role": "user", "content": [picture]}]}
        async with played.session.post(f"{played.address}/messages/count_tokens", json=body) as response:
            assert response.status == 400
    assert played.result.turns_used == 2


async def test_a_chat_server_without_a_tokenizer_counts_nothing() -> None:
    async def chat(messages: list[dict[str, Any]], tools: Any) -> str:
        return "So."

    async with Asking(Engine(0), policy=Policy.chat(chat)) as played:
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": "How long is this?"}]}
        async with played.session.post(f"{played.address}/messages/count_tokens", json=body) as response:
            assert (response.status, (await response.json())["error"]["type"]) == (404, "not_found_error")


async def test_what_clients_look_for_first_is_there() -> None:
    async with Asking(Engine(0)) as played:
        base = played.address.removesuffix("/v1")
        for path in ("", "/v1", "/v1/models", "/v1/messages"):
            async with played.session.head(base + path) as response:
                assert (response.status, await response.read()) == (200, b"")
        for name in ("policy", "org/any-model"):
            async with played.session.get(f"{base}/v1/models/{name}") as response:
                assert (response.status, (await response.json())["id"]) == (200, name)
        async with played.session.get(f"{base}/api/show") as response:
            assert response.status == 404
    assert (played.endpoint.refused, played.result.turns_used) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_connections_that_are_closed_half_way_are_not_reported(
    caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """A program could fill the log of the run."""
    engine = Engine(7)
    async with Asking(engine) as played:
        port = int(played.address.rpartition(":")[2].partition("/")[0])
        body = json.dumps({"messages": [{"role": "user", "content": "Begin."}], "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        for sent in (head, head + body[:9], head + body):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.transport.abort()
        await played.until_asked(1)
        engine.release()
        await until(lambda: played.result.turns_used == 1)
    assert [record.getMessage() for record in caplog.records] == []
    assert [call["kind"] for call in played.result.program.calls] == ["undelivered"]  # type: ignore[union-attr]


async def test_large_requests_are_read_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop: list[tuple[str, bool]] = []
    for name in ("read_bounded", "run_exclusively"):
        original = getattr(endpoint, name)

        def watched(*arguments: Any, name: str = name, original: Callable[..., Any] = original) -> Any:
            on_loop.append((name, threading.current_thread() is threading.main_thread()))
            return original(*arguments)

        monkeypatch.setattr(endpoint, name, watched)
    engine = Engine(0)
    async with Asking(engine) as asking:
        for text in ("small", "large " * 200_000):
            asked = asyncio.create_task(asking.ask([{"role": "user", "content": text}]))
            await asking.until_asked(1)
            engine.release()
            await asked
            reads = [by_loop for name, by_loop in on_loop if name == "read_bounded"]
            handed_over = [name for name, _ in on_loop if name == "run_exclusively"]
            assert (reads, len(handed_over)) == (([True], 0) if text == "small" else ([False], 3))
            on_loop.clear()
