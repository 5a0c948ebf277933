"""The model as an agent program finds it: an address on the loopback of its own sandbox, which leads to the runner.

This module serves one rollout: it takes requests at a port that the sandbox's helper has opened, asks the policy
through the rollout's recorder, several requests at a time, and answers in the program's dialect. No key is there:
whoever reaches the port is in this sandbox. What a program may cost the runner is bounded: connections, requests and
bytes. A program outside of the sandbox finds it at a port of this machine, under a path that nobody else can guess.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from aiohttp import web
from aiohttp.http import HttpProcessingError

from hermes_rl.agent.conversations import Conversations, ProgramCall
from hermes_rl.agent.dialects import CHAT, COUNT_TOKENS, PATHS, dialect_at, written_count, written_model, written_models
from hermes_rl.agent.dialects.base import (
    ProgramAnswer,
    ProgramDialect,
    ProgramRequest,
    RefusedRequestError,
    addresses_in,
)
from hermes_rl.agent.history import kept_message
from hermes_rl.agent.recorder import OverError, PolicyAnswer, PolicyRecorder
from hermes_rl.agent.result import Message, first_answer, tokens_of
from hermes_rl.agent.tool_server import PATH as TOOLS_PATH
from hermes_rl.agent.tool_server import ToolServer
from hermes_rl.endings import Ending
from hermes_rl.errors import HermesRLError
from hermes_rl.server_types import CHAT_PARTS, refused_part
from hermes_rl.servers.base import ContextLengthExceeded
from hermes_rl.servers.transport import AttemptFailed
from hermes_rl.threads import end_tasks, one_at_a_time
from hermes_rl.values import count_of, read_bounded, write_message

log = logging.getLogger(__name__)
_http_log = logging.getLogger(f"{__name__}.http")


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether an error of the HTTP library is to be logged: a program that sends no HTTP, or is gone, could fill the
    log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, ConnectionError | HttpProcessingError)


_http_log.addFilter(_is_ours)

POLICY = "policy"
"""Name of a model that has none."""
AT_ONCE = 8
"""Requests of one program that the policy answers at the same time; further ones wait."""
CONNECTIONS = 64
"""Open connections of one program."""
MOST_REQUESTS = 10_000
"""Requests of one program, those included that are refused; then nobody answers any more."""
LARGEST = 16 << 20
"""Bytes of a request."""
HELD = 2 * LARGEST
"""Bytes of all requests of one program that are being read, or wait for their answer."""
IN_LOOP = 1 << 16
"""Bytes of a request up to which it is read on the event loop."""
LONGEST_REFUSAL = 500
"""Characters that are kept of what is wrong with a request."""
ACCEPT_PAUSE = 0.1
WRITE_SECONDS = 60.0
"""Seconds in which a program has to read a streamed answer."""
MOST_TOO_LONG = 20
"""Requests that do not fit the model's context, from which on the rollout is over."""


@dataclass(frozen=True)
class EndpointCall:
    """One request that the policy has answered."""

    request: ProgramRequest
    answer: PolicyAnswer
    message: Message
    """The answer as the program was given it."""
    sampled: Mapping[int, int] = field(default_factory=dict)
    """Places of the request's messages that are answers of the policy → the calls that gave them."""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """What the answer calls."""
        return list(self.message.get("tool_calls") or ())


class Endpoint:
    """Serves one program; see above. Use it as ``async with``."""

    def __init__(
        self, recorder: PolicyRecorder, rollout_id: str, secret: str = "", tools: ToolServer | None = None
    ) -> None:
        self._recorder = recorder
        self._rollout_id = rollout_id
        self.tools = tools
        """What answers at the path of tools; None: the spec offers none."""
        self._prefix = f"/r/{secret}/" if secret else ""
        """How the path of a request has to begin; empty where only this rollout can reach the port."""
        self._model = POLICY
        self._addresses = frozenset(addresses_in(recorder.result.messages))
        """Of the prompt's pictures, which a program may send on."""
        self.conversations = Conversations()
        self._last_calls: dict[bytes, EndpointCall] = {}
        """The last call that was answered to the program of each conversation that may be graded, by its root. Other
        requests are not kept: each has all that was said before."""
        self.sampling: dict[str, Any] = {}
        """What was asked for of sampling at last, by name."""
        self._held_bytes = 0
        self._prompt: list[Message] = []
        self.requests = 0
        self.refused = 0
        """Requests that were told what is wrong with them."""
        self.refusal = ""
        """What the last of these was told."""
        self.ending: Ending | None = None
        """Why no request is answered any more; None as long as they are."""
        self.answered = False
        """Whether the last request for an answer was given one."""
        self.failure: HermesRLError | None = None
        """What failed on our side, which ends the rollout."""
        self.ended = asyncio.Event()
        self.too_long = 0
        """Requests that did not fit the model's context, since the last one that did."""
        self._waited, self._waiting, self._since = 0.0, 0, 0.0
        """Seconds in which there were requests without an answer; how many there are now, and since when."""
        self._asking = 0
        """Requests that the policy is answering."""
        self._freed = asyncio.Event()
        self._noting = asyncio.Lock()
        self._notes = set[asyncio.Task[tuple[ProgramCall, EndpointCall]]]()
        self._handlers = set[asyncio.Task[Any]]()
        self._closed = False
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._server = web.Server(self._handle, auto_decompress=False, access_log=None, logger=_http_log)

    def serve(self, listener: socket.socket) -> None:
        """Serve what comes in at a listening socket, which is ours to close from now on."""
        listener.setblocking(False)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._accepting is not None:
            await end_tasks([self._accepting])
        if self._listener is not None:
            self._listener.close()
        self._closed = True
        for handler in self._handlers:  # the server would forget those whose connections are gone
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        await self._server.shutdown(0)
        await asyncio.gather(*self._notes)

    @property
    def waiting(self) -> float:
        """Seconds for which the program has waited for answers, the present wait included.

        Those in which it has waited for several count once.
        """
        return self._waited + (time.monotonic() - self._since if self._waiting else 0.0)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while self.requests < MOST_REQUESTS:
            if len(self._server.connections) >= CONNECTIONS:
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            try:
                connection, _ = await loop.sock_accept(listener)
                await loop.connect_accepted_socket(self._server, connection)
            except OSError:
                await asyncio.sleep(ACCEPT_PAUSE)  # no descriptors are left, or who asked is gone

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        try:
            return await self._respond(request)
        finally:
            self._handlers.discard(handler)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        if not hmac.compare_digest(request.path[: len(self._prefix)].encode(), self._prefix.encode()):
            return _response(404, CHAT.error("there is nothing here", "not_found"), close=True)
        self.requests += 1
        path = request.path.rstrip("/")
        counting = path.endswith(COUNT_TOKENS)
        spoken = dialect_at(path.removesuffix(COUNT_TOKENS) if counting else path)
        dialect = spoken or CHAT
        if self.requests > MOST_REQUESTS or self._closed:
            return _response(429, dialect.error("there were too many requests", "rollout_over"), close=True)
        if request.method == "HEAD":  # whether anybody is there
            return _response(200, b"")
        if request.method == "GET" and path.endswith("/models"):
            return _response(200, written_models(self._model))
        if request.method == "GET" and "/models/" in path:
            return _response(200, written_model(path.partition("/models/")[2]))
        if self.tools is not None and path.endswith(TOOLS_PATH):
            return await self._serve_tools(request, self.tools)
        if request.method != "POST" or spoken is None:
            return self._missing(dialect, request.method, path)
        answered, size = False, 0
        try:
            body, size = await self._body(request)
            came = self.conversations.tick()
            read = partial(self._read, dialect, body)
            query = read() if size <= IN_LOOP else await one_at_a_time(read)
            if counting:
                answered = self.answered
                return await self._count(dialect, query, size)
            response = await self._answer(request, dialect, query, size, came)
            answered = response.status == 200
            return response
        except RefusedRequestError as error:
            return self._refused(dialect, str(error))
        finally:
            self._held_bytes -= size
            self.answered = answered

    def _missing(self, dialect: ProgramDialect, method: str, path: str) -> web.Response:
        """Say that nothing is there; clients look around with other methods than that by which they ask the model."""
        own = re.sub("^/r/[^/]*", "", path)[:200]  # without what is this rollout's alone
        problem = f"there is no {method} {own} here, but POST {', '.join(PATHS)}"
        if method == "POST":
            return self._refused(dialect, problem, 404)
        return _response(404, dialect.error(problem, "not_found"))

    def _refused(self, dialect: ProgramDialect, problem: str, status: int = 400) -> web.Response:
        """Tell a program what is wrong with its request, and take note of it for who reads the rollout."""
        self.refused, self.refusal = self.refused + 1, problem[:LONGEST_REFUSAL]
        kind = "not_found" if status == 404 else "invalid_request"
        return _response(status, dialect.error(problem, kind), close=True)

    def _read(self, dialect: ProgramDialect, body: Any) -> ProgramRequest:
        query = dialect.read(body)
        if (refused := refused_part(query.messages, getattr(self._recorder.server, "parts", CHAT_PARTS))) is not None:
            raise RefusedRequestError(refused)
        if any(address not in self._addresses for address in addresses_in(query.messages)):
            # The model's server would fetch it, which is a way out of a sandbox without network.
            raise RefusedRequestError("a picture must be in the request, as a `data:` URL, or one of the prompt's own")
        return query

    async def _serve_tools(self, request: web.BaseRequest, tools: ToolServer) -> web.Response:
        if request.method != "POST":  # there are no streams, and no sessions that could be ended
            return _response(405, b"")
        if self.ending is not None or self.failure is not None:
            return _response(400, CHAT.error("the rollout is over", "rollout_over"), close=True)
        size = 0
        try:
            message, size = await self._body(request)
            answer = await tools.answer(message)
        except RefusedRequestError as error:
            return self._refused(CHAT, str(error))
        except HermesRLError as error:
            self.failure = error
            self.ended.set()
            return _response(500, CHAT.error("the tools cannot be reached", "server_error"), close=True)
        finally:
            self._held_bytes -= size
        return _response(202, b"") if answer is None else _response(200, write_message(answer))

    async def _count(self, dialect: ProgramDialect, query: ProgramRequest, size: int) -> web.Response:
        """Say how many tokens a request has; nothing of that is recorded."""
        try:
            count = await self._recorder.count(query.messages, query.tools, size)
        except AttemptFailed as error:
            raise RefusedRequestError(str(error)) from None
        if count is None:
            return _response(404, dialect.error("the tokenizer of the model is not known here", "not_found"))
        return _response(200, written_count(count))

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Wait until a further request may be sent to the policy, and count it while it is.

        The last turns of the rollout are given away one by one, since requests that are under way may need them.
        """
        self._since = self._since if self._waiting else time.monotonic()
        self._waiting += 1
        try:
            while self._asking and self._asking >= min(AT_ONCE, self._recorder.turns_left):
                self._freed.clear()
                await self._freed.wait()
            self._asking += 1
            try:
                yield
            finally:
                self._asking -= 1
                self._freed.set()
        finally:
            self._waited, self._waiting = self.waiting, self._waiting - 1
            self._since = time.monotonic()

    async def _body(self, request: web.BaseRequest) -> tuple[Any, int]:
        """Return what was sent, and its bytes, which count until the request is answered."""
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise RefusedRequestError("the body must not be compressed")
        data = bytearray()
        try:
            async for piece in request.content.iter_chunked(1 << 16):
                data += piece
                self._held_bytes += len(piece)
                if len(data) > LARGEST or self._held_bytes > HELD:
                    raise RefusedRequestError(f"a request may have {LARGEST} bytes, all together {HELD}")
            if len(data) <= IN_LOOP:
                return read_bounded(bytes(data), LARGEST), len(data)
            return await one_at_a_time(read_bounded, bytes(data), LARGEST), len(data)
        except BaseException as error:
            self._held_bytes -= len(data)
            if isinstance(error, ValueError):
                raise RefusedRequestError(f"what was sent {error}") from None
            raise

    async def _answer(
        self, request: web.BaseRequest, dialect: ProgramDialect, query: ProgramRequest, size: int, came: int
    ) -> web.StreamResponse:
        if self.failure is not None:
            return _response(500, dialect.error("the model cannot be reached", "server_error"), close=True)
        if self.ending is None:
            try:
                async with self._place():  # what it waits for behind this is its own reading
                    noted, call, answer = await self._ask(query, size, came)
                return await self._send(request, dialect, noted, call, answer)
            except ContextLengthExceeded as error:
                self.too_long += 1
                if self.too_long < MOST_TOO_LONG:
                    return _response(400, dialect.error(_too_long(error), "context_length_exceeded"))
                self.ending = Ending.TOKEN_BUDGET
                self.ended.set()
            except OverError as over:
                self.ending = over.ending
                self.ended.set()
            except HermesRLError as error:
                self.failure = error
                self.ended.set()
                return _response(500, dialect.error("the model cannot be reached", "server_error"), close=True)
        reason = f"the rollout is over ({self.ending}): no further request is answered"
        return _response(400, dialect.error(reason, "rollout_over"), close=True)

    async def _send(
        self,
        request: web.BaseRequest,
        dialect: ProgramDialect,
        noted: ProgramCall,
        call: EndpointCall,
        answer: ProgramAnswer,
    ) -> web.StreamResponse:
        """Give the program an answer."""
        query = call.request
        if not query.stream:
            if request.transport is not None:
                self._delivered(noted, call)
            return _response(200, dialect.written(answer, query))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await stream.prepare(request)
                await stream.write_eof(b"".join(dialect.events(answer, query)))  # all of it is there at once
        except TimeoutError:  # nobody reads it
            stream.force_close()
            return stream
        self._delivered(noted, call)
        return stream

    def _delivered(self, noted: ProgramCall, call: EndpointCall) -> None:
        """Note that the program was given an answer, and keep the call where it may be graded."""
        self.conversations.deliver(noted)
        may_be_graded = {*self.conversations.early, *self.conversations.main_line()[-1:]}
        self._last_calls[noted.root] = call
        self._last_calls = {root: call for root, call in self._last_calls.items() if root in may_be_graded}

    @property
    def prompt(self) -> list[Message]:
        """What the program had asked, before any answer, in the graded conversation before the policy could act."""
        first = self._last_calls.get(next(iter(self.conversations.main_line()), b""))
        return [] if first is None else first.request.messages[: first_answer([*first.request.messages, first.message])]

    @property
    def main(self) -> EndpointCall | None:
        """The last call of the conversation that is graded which the program was given the answer of."""
        line = self.conversations.main_line()
        return self._last_calls.get(line[-1]) if line else None

    async def _ask(
        self, query: ProgramRequest, size: int, came: int
    ) -> tuple[ProgramCall, EndpointCall, ProgramAnswer]:
        recorder, before = self._recorder, self._recorder.result.turns_used
        # What the server answered first tells whether it refuses this conversation alone, or everything. Where an agent
        # may have changed what the program sends, that is the spec's own prompt.
        first = recorder.result.messages if recorder.by_agents else query.messages[: first_answer(query.messages)]
        prompt = self._prompt or first
        given = await recorder.ask(query.messages, query.tools, prompt=prompt, rollout_id=self._rollout_id, resent=size)
        self._prompt, turn, reply = self._prompt or prompt, given.number + 1, given.reply
        message = kept_message(reply.message, turn)
        calls = message.get("tool_calls") or []
        for number, call in enumerate(calls):
            call["id"] = f"c{turn:04d}{number:04d}"  # no other call of the rollout has it
            call.pop("error", None)
        # Whatever becomes of the request: an answer that was sampled is known, in the order in which answers come.
        note = asyncio.ensure_future(self._note(EndpointCall(query, given, message), size, before, came))
        self._notes.add(note)
        note.add_done_callback(self._notes.discard)
        noted, kept = await asyncio.shield(note)
        finish = reply.finish_reason or ("tool_calls" if calls else "stop")
        prompted, written = (tokens_of(reply.usage, name) for name in ("prompt_tokens", "completion_tokens"))
        details = reply.usage.get("completion_tokens_details")
        thought = count_of(details.get("reasoning_tokens")) if isinstance(details, dict) else None
        name, model = f"{self._rollout_id}-{turn}", reply.model or POLICY
        return noted, kept, ProgramAnswer(name, int(time.time()), model, message, finish, prompted, written, thought)

    async def _note(self, call: EndpointCall, size: int, before: int, came: int) -> tuple[ProgramCall, EndpointCall]:
        """Take a call into account, which came at that time, when so many had been answered."""
        self._model, self.too_long = call.answer.reply.model or POLICY, 0
        self.sampling |= call.request.sampling
        add = partial(self.conversations.add, call.request.messages, call.request.tools, call.message, before, came)
        async with self._noting:
            noted = add() if size <= IN_LOOP else await one_at_a_time(add)
            return noted, replace(call, sampled=self.conversations.sampled)


def _too_long(error: ContextLengthExceeded) -> str:
    """Say it in words by which programs know that they have to shorten the conversation."""
    if error.size is None:
        return "prompt is too long: it exceeds the model's maximum context length. Please reduce the messages."
    return (
        f"prompt is too long: {error.size} tokens > {error.context} maximum. This model's maximum context length is "
        f"{error.context} tokens. Please reduce the length of the messages."
    )


def _response(status: int, body: bytes, *, close: bool = False) -> web.Response:
    response = web.Response(status=status, body=body, content_type="application/json")
    if close:
        response.force_close()
    return response
