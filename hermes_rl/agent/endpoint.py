"""Serve the model to an agent program at a loopback address of its sandbox, which leads to the runner.

This module serves one rollout: it accepts requests on a port that the sandbox helper opened, calls the policy through
the rollout's recorder, several requests at a time, and replies in the program's dialect. No API key is needed, because
only processes in this sandbox can reach the port. Connections, requests and bytes are bounded to limit the load on the
runner. A program outside the sandbox uses a port of the host, under a path that cannot be guessed.
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
from hermes_rl.agent.recorder import BudgetExhausted, PolicyAnswer, PolicyRecorder
from hermes_rl.agent.result import Message, first_answer, tokens_of
from hermes_rl.agent.tool_server import PATH as TOOLS_PATH
from hermes_rl.agent.tool_server import ToolServer
from hermes_rl.errors import HermesRLError
from hermes_rl.servers.base import ContextLengthExceeded
from hermes_rl.servers.transport import AttemptFailed
from hermes_rl.spec.server_types import CHAT_PARTS, refused_part
from hermes_rl.stop_reasons import StopReason
from hermes_rl.threads import end_tasks, run_exclusively
from hermes_rl.values import parse_count, read_bounded, write_message

log = logging.getLogger(__name__)
_http_log = logging.getLogger(f"{__name__}.http")


def _is_ours(record: logging.LogRecord) -> bool:
    """Return True if an error of the HTTP library should be logged.

    A program that does not send HTTP, or has disconnected, could fill the log.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, ConnectionError | HttpProcessingError)


_http_log.addFilter(_is_ours)

POLICY = "policy"
"""Name of a model without a name."""
AT_ONCE = 8
"""Maximum number of concurrent policy calls for one program; further requests wait."""
CONNECTIONS = 64
"""Maximum number of open connections of one program."""
MOST_REQUESTS = 10_000
"""Maximum number of requests of one program, refused ones included; afterwards all requests are rejected."""
LARGEST = 16 << 20
"""Maximum bytes of a request."""
HELD = 2 * LARGEST
"""Maximum bytes of all requests of one program that are being read or wait for a reply."""
IN_LOOP = 1 << 16
"""Bytes of a request up to which it is parsed on the event loop."""
LONGEST_REFUSAL = 500
"""Characters of an error message about a refused request that are recorded."""
ACCEPT_PAUSE = 0.1
WRITE_SECONDS = 60.0
"""Seconds that a program may take to read a streamed reply."""
MOST_TOO_LONG = 20
"""Number of successive requests exceeding the model's context after which the rollout stops."""


@dataclass(frozen=True)
class EndpointCall:
    """One request to which the policy replied."""

    request: ProgramRequest
    answer: PolicyAnswer
    message: Message
    """The reply as delivered to the program."""
    sampled: Mapping[int, int] = field(default_factory=dict)
    """Index of each message of the request that is a policy reply → the call that returned it."""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Tool calls of the reply."""
        return list(self.message.get("tool_calls") or ())


class Endpoint:
    """Serve one program; see the module. Use it as ``async with``."""

    def __init__(
        self, recorder: PolicyRecorder, rollout_id: str, secret: str = "", tools: ToolServer | None = None
    ) -> None:
        self._recorder = recorder
        self._rollout_id = rollout_id
        self.tools = tools
        """Server for the tool path; None if the spec offers no tools."""
        self._prefix = f"/r/{secret}/" if secret else ""
        """Required prefix of a request path; empty if only this rollout can reach the port."""
        self._model = POLICY
        self._addresses = frozenset(addresses_in(recorder.result.messages))
        """Image addresses of the prompt, which a program may send as well."""
        self.conversations = Conversations()
        self._last_calls: dict[bytes, EndpointCall] = {}
        """Last delivered call of each conversation that may be graded, by root. Earlier requests are not kept: each
        request contains the conversation before it.
        """
        self.sampling: dict[str, Any] = {}
        """Most recent sampling options requested by the program, by name."""
        self._held_bytes = 0
        self._prompt: list[Message] = []
        self.requests = 0
        self.refused = 0
        """Number of requests rejected with an error message."""
        self.refusal = ""
        """Error message of the last rejected request."""
        self.stop_reason: StopReason | None = None
        """Stop reason that prevents further replies; None while requests are served."""
        self.answered = False
        """True if the last completion request received a reply."""
        self.failure: HermesRLError | None = None
        """Infrastructure failure that stops the rollout."""
        self.too_long = 0
        """Number of requests exceeding the model's context since the last one that fitted."""
        self._waited, self._waiting, self._since = 0.0, 0, 0.0
        """Seconds with at least one pending request; number of requests pending now; start of the current wait."""
        self._asking = 0
        """Number of requests that the policy is processing."""
        self._freed = asyncio.Event()
        self._noting = asyncio.Lock()
        self._notes = set[asyncio.Task[tuple[ProgramCall, EndpointCall]]]()
        self._handlers = set[asyncio.Task[Any]]()
        self._closed = False
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._server = web.Server(self._handle, auto_decompress=False, access_log=None, logger=_http_log)

    def serve(self, listener: socket.socket) -> None:
        """Serve connections of a listening socket and take ownership of it."""
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
        for handler in self._handlers:  # the server would forget handlers whose connections are closed
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        await self._server.shutdown(0)
        await asyncio.gather(*self._notes)

    @property
    def waiting(self) -> float:
        """Seconds that the program has waited for replies, including the current wait.

        Seconds during which it waits for several replies count once.
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
                await asyncio.sleep(ACCEPT_PAUSE)  # no descriptors are left, or the client disconnected

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
            return _json_response(404, CHAT.error("there is nothing here", "not_found"), close=True)
        self.requests += 1
        path = request.path.rstrip("/")
        counting = path.endswith(COUNT_TOKENS)
        spoken = dialect_at(path.removesuffix(COUNT_TOKENS) if counting else path)
        dialect = spoken or CHAT
        if self.requests > MOST_REQUESTS or self._closed:
            return _json_response(429, dialect.error("there were too many requests", "rollout_over"), close=True)
        if request.method == "HEAD":  # checks that the server is reachable
            return _json_response(200, b"")
        if request.method == "GET" and path.endswith("/models"):
            return _json_response(200, written_models(self._model))
        if request.method == "GET" and "/models/" in path:
            return _json_response(200, written_model(path.partition("/models/")[2]))
        if self.tools is not None and path.endswith(TOOLS_PATH):
            return await self._serve_tools(request, self.tools)
        if request.method != "POST" or spoken is None:
            return self._unknown_path(dialect, request.method, path)
        answered, size = False, 0
        try:
            body, size = await self._body(request)
            came = self.conversations.tick()
            read = partial(self._read, dialect, body)
            query = read() if size <= IN_LOOP else await run_exclusively(read)
            if counting:
                answered = self.answered
                return await self._answer_count(dialect, query, size)
            response = await self._answer_request(request, dialect, query, size, came)
            answered = response.status == 200
            return response
        except RefusedRequestError as error:
            return self._refuse_request(dialect, str(error))
        finally:
            self._held_bytes -= size
            self.answered = answered

    def _unknown_path(self, dialect: ProgramDialect, method: str, path: str) -> web.Response:
        """Return an error for an unknown path; clients also probe with methods other than the one for model calls."""
        short_path = re.sub("^/r/[^/]*", "", path)[:200]  # without the prefix that is unique to this rollout
        problem = f"there is no {method} {short_path} here, but POST {', '.join(PATHS)}"
        if method == "POST":
            return self._refuse_request(dialect, problem, 404)
        return _json_response(404, dialect.error(problem, "not_found"))

    def _refuse_request(self, dialect: ProgramDialect, problem: str, status: int = 400) -> web.Response:
        """Return an error to the program and record it for readers of the rollout."""
        self.refused, self.refusal = self.refused + 1, problem[:LONGEST_REFUSAL]
        kind = "not_found" if status == 404 else "invalid_request"
        return _json_response(status, dialect.error(problem, kind), close=True)

    def _read(self, dialect: ProgramDialect, body: Any) -> ProgramRequest:
        query = dialect.read(body)
        if (refused := refused_part(query.messages, getattr(self._recorder.server, "parts", CHAT_PARTS))) is not None:
            raise RefusedRequestError(refused)
        if any(address not in self._addresses for address in addresses_in(query.messages)):
            # The model server would fetch it, so a sandbox without network access could reach the network.
            raise RefusedRequestError("unknown address of a picture; expected a `data:` URL or a picture of the prompt")
        return query

    async def _serve_tools(self, request: web.BaseRequest, tools: ToolServer) -> web.Response:
        if request.method != "POST":  # neither streams nor sessions are supported
            return _json_response(405, b"")
        if self.stop_reason is not None or self.failure is not None:
            return _json_response(400, CHAT.error("the rollout is over", "rollout_over"), close=True)
        size = 0
        try:
            message, size = await self._body(request)
            answer = await tools.answer(message)
        except RefusedRequestError as error:
            return self._refuse_request(CHAT, str(error))
        except HermesRLError as error:
            self.failure = error
            return _json_response(500, CHAT.error("the tools cannot be reached", "server_error"), close=True)
        finally:
            self._held_bytes -= size
        return _json_response(202, b"") if answer is None else _json_response(200, write_message(answer))

    async def _answer_count(self, dialect: ProgramDialect, query: ProgramRequest, size: int) -> web.Response:
        """Return the token count of a request; nothing is recorded."""
        try:
            count = await self._recorder.count(query.messages, query.tools, size)
        except AttemptFailed as error:
            raise RefusedRequestError(str(error)) from None
        if count is None:
            return _json_response(404, dialect.error("the tokenizer of the model is not known here", "not_found"))
        return _json_response(200, written_count(count))

    @asynccontextmanager
    async def _hold_slot(self) -> AsyncIterator[None]:
        """Wait until another request may be sent to the policy, and hold its slot until it finishes.

        The last turns of the rollout are assigned one by one, since requests in flight may need them.
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
        """Return the parsed body and its size, which counts towards the limit until the request is finished."""
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise RefusedRequestError("the body must not be compressed")
        data = bytearray()
        try:
            async for chunk in request.content.iter_chunked(1 << 16):
                data += chunk
                self._held_bytes += len(chunk)
                if len(data) > LARGEST or self._held_bytes > HELD:
                    raise RefusedRequestError(f"a request may have {LARGEST} bytes, all together {HELD}")
            if len(data) <= IN_LOOP:
                return read_bounded(bytes(data), LARGEST), len(data)
            return await run_exclusively(read_bounded, bytes(data), LARGEST), len(data)
        except BaseException as error:
            self._held_bytes -= len(data)
            if isinstance(error, ValueError):
                raise RefusedRequestError(f"the request body {error}") from None
            raise

    async def _answer_request(
        self, request: web.BaseRequest, dialect: ProgramDialect, query: ProgramRequest, size: int, came: int
    ) -> web.StreamResponse:
        if self.failure is not None:
            return _json_response(500, dialect.error("the model cannot be reached", "server_error"), close=True)
        if self.stop_reason is None:
            try:
                async with self._hold_slot():  # later waits are caused by the program's own reading
                    noted, call, answer = await self._ask_policy(query, size, came)
                return await self._send(request, dialect, noted, call, answer)
            except ContextLengthExceeded as error:
                self.too_long += 1
                if self.too_long < MOST_TOO_LONG:
                    return _json_response(400, dialect.error(_too_long(error), "context_length_exceeded"))
                self.stop_reason = StopReason.TOKEN_BUDGET
            except BudgetExhausted as budget_error:
                self.stop_reason = budget_error.stop_reason
            except HermesRLError as error:
                self.failure = error
                return _json_response(500, dialect.error("the model cannot be reached", "server_error"), close=True)
        reason = f"the rollout is over ({self.stop_reason}): no further request is answered"
        return _json_response(400, dialect.error(reason, "rollout_over"), close=True)

    async def _send(
        self,
        request: web.BaseRequest,
        dialect: ProgramDialect,
        noted: ProgramCall,
        call: EndpointCall,
        answer: ProgramAnswer,
    ) -> web.StreamResponse:
        """Send a reply to the program."""
        query = call.request
        if not query.stream:
            if request.transport is not None:
                self._record_delivery(noted, call)
            return _json_response(200, dialect.written(answer, query))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await stream.prepare(request)
                await stream.write_eof(b"".join(dialect.events(answer, query)))  # the whole reply is available at once
        except TimeoutError:  # the program does not read it
            stream.force_close()
            return stream
        self._record_delivery(noted, call)
        return stream

    def _record_delivery(self, noted: ProgramCall, call: EndpointCall) -> None:
        """Record a delivery, and keep the call if its conversation may be graded."""
        self.conversations.deliver(noted)
        may_be_graded = {*self.conversations.early, *self.conversations.main_line()[-1:]}
        self._last_calls[noted.root] = call
        self._last_calls = {root: call for root, call in self._last_calls.items() if root in may_be_graded}

    @property
    def prompt(self) -> list[Message]:
        """Prompt of the graded conversation: the program's messages before any reply, when the policy could not act."""
        first = self._last_calls.get(next(iter(self.conversations.main_line()), b""))
        return [] if first is None else first.request.messages[: first_answer([*first.request.messages, first.message])]

    @property
    def main(self) -> EndpointCall | None:
        """Last delivered call of the graded conversation."""
        line = self.conversations.main_line()
        return self._last_calls.get(line[-1]) if line else None

    async def _ask_policy(
        self, query: ProgramRequest, size: int, came: int
    ) -> tuple[ProgramCall, EndpointCall, ProgramAnswer]:
        recorder, before = self._recorder, self._recorder.result.turns_used
        # The server's response to the first request shows whether it refuses this conversation or every request. If an
        # agent may have changed the program's messages, the spec's own prompt is used for the test.
        first = recorder.result.messages if recorder.by_agents else query.messages[: first_answer(query.messages)]
        prompt = self._prompt or first
        policy_answer = await recorder.ask(
            query.messages, query.tools, prompt=prompt, rollout_id=self._rollout_id, resent=size
        )
        self._prompt, turn, reply = self._prompt or prompt, policy_answer.index + 1, policy_answer.reply
        message = kept_message(reply.message, turn)
        calls = message.get("tool_calls") or []
        for index, call in enumerate(calls):
            call["id"] = f"c{turn:04d}{index:04d}"  # unique in the rollout
            call.pop("error", None)
        # Record a sampled reply even if the request is cancelled, in the order of the replies.
        note = asyncio.ensure_future(self._note_call(EndpointCall(query, policy_answer, message), size, before, came))
        self._notes.add(note)
        note.add_done_callback(self._notes.discard)
        noted, endpoint_call = await asyncio.shield(note)
        finish = reply.finish_reason or ("tool_calls" if calls else "stop")
        prompted, written = (tokens_of(reply.usage, name) for name in ("prompt_tokens", "completion_tokens"))
        details = reply.usage.get("completion_tokens_details")
        thought = parse_count(details.get("reasoning_tokens")) if isinstance(details, dict) else None
        name, model = f"{self._rollout_id}-{turn}", reply.model or POLICY
        return (
            noted,
            endpoint_call,
            ProgramAnswer(name, int(time.time()), model, message, finish, prompted, written, thought),
        )

    async def _note_call(
        self, call: EndpointCall, size: int, before: int, came: int
    ) -> tuple[ProgramCall, EndpointCall]:
        """Record a call that arrived at time `came`, when `before` calls had a reply."""
        self._model, self.too_long = call.answer.reply.model or POLICY, 0
        self.sampling |= call.request.sampling
        add = partial(self.conversations.add, call.request.messages, call.request.tools, call.message, before, came)
        async with self._noting:
            noted = add() if size <= IN_LOOP else await run_exclusively(add)
            return noted, replace(call, sampled=self.conversations.sampled)


def _too_long(error: ContextLengthExceeded) -> str:
    """Return a message that agent programs recognize as a request to shorten the conversation."""
    if error.size is None:
        return "prompt is too long: it exceeds the model's maximum context length. Please reduce the messages."
    return (
        f"prompt is too long: {error.size} tokens > {error.context} maximum. This model's maximum context length is "
        f"{error.context} tokens. Please reduce the length of the messages."
    )


def _json_response(status: int, body: bytes, *, close: bool = False) -> web.Response:
    response = web.Response(status=status, body=body, content_type="application/json")
    if close:
        response.force_close()
    return response
