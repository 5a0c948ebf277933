"""Model Context Protocol: one session with one server. This is the only module that imports the SDK.

Sources: the MCP specification of 2025-11-25 (stdio: one JSON-RPC message a line) and the SDK `mcp` 2.3, whose client
belongs to the task that opened it; so each session has a separate task.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hermes_rl.errors import UserError, install_command
from hermes_rl.plugins import Code
from hermes_rl.sandbox.base import Conversation
from hermes_rl.spec.json_schema import CompiledSchema
from hermes_rl.threads import run_exclusively
from hermes_rl.tools.host_process import LineTooLongError, lines_of
from hermes_rl.tools.mcp_exchange import EXCHANGE, Exchange
from hermes_rl.user_code.failures import EndedError, ForeignError
from hermes_rl.user_code.pool import POOL
from hermes_rl.values import MOST_VALUES, too_many_values

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import TransportStreams
    from mcp_types import CallToolResult, JSONRPCMessage

LINE_LIMIT = 16 << 20
"""Maximum bytes of one message."""
FLOOD_LIMIT = 64 << 20
"""Bytes that a server may send between two requests before it counts as gone."""
MOST_BLOCKS = 1000
"""Maximum parts of a result, such as texts and pictures, that the model receives."""
THREAD_MESSAGE_BYTES = 1 << 16
"""Bytes from which a message is parsed in a thread."""
MOST_PAGES = 100
MOST_TOOLS = 1000
CLOSE_SECONDS = 5.0
CHECK_SECONDS = 1.0
"""Timeout in seconds for checking a structured result against the schema that its server has declared."""
PROBLEM = 200
"""Maximum characters of the problem of a result that the model receives."""


class McpTransport(AbstractAsyncContextManager["TransportStreams"]):
    """A connection to one server, which `connect` opens; it reports if the other side has ended it."""

    def __init__(self, connect: Callable[[McpTransport], AbstractAsyncContextManager[TransportStreams]]) -> None:
        self._streams = connect(self)
        self.ended = False

    async def __aenter__(self) -> TransportStreams:
        return await self._streams.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._streams.__aexit__(*error)


class McpLostError(Exception):
    """The session is over, or never started; the message gives the reason."""


class McpUnansweredError(Exception):
    """The HTTP layer, and not the server itself, responded to a call. `executed`: it may have been executed; `ended`:
    the server no longer knows the session.
    """

    def __init__(self, problem: str, *, executed: bool, ended: bool) -> None:
        super().__init__(problem)
        self.executed, self.ended = executed, ended


class McpTooLargeError(Exception):
    """The result of a call exceeds the limit."""


class McpTimeoutError(Exception):
    """The server did not start, or respond to a call, in time."""


@dataclass(frozen=True)
class Listed:
    """One tool in its server's list; `parameters` is its JSON Schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    answer: Mapping[str, Any] | None = None
    """The JSON Schema of its structured results, or None if it declares none."""


def fingerprint(listed_tools: tuple[Listed, ...]) -> str:
    """Return the SHA-256 over names, descriptions and schemas, independent of the order of the list."""
    tools = sorted([tool.name, tool.description, json.dumps(tool.parameters, sort_keys=True)] for tool in listed_tools)
    return hashlib.sha256(json.dumps(tools).encode()).hexdigest()


def require_mcp() -> None:
    """Raise `UserError` if the SDK is not installed."""
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise UserError(f"MCP servers need the extra `mcp`: {install_command('mcp')}") from error


class McpSession:
    """A session that is open from `open` until `close` or until the server is gone."""

    def __init__(self, transport: McpTransport) -> None:
        self.tools: tuple[Listed, ...] = ()
        self.calls = 0
        """Calls that wait for their results."""
        self._transport = transport
        self._client: Client | None = None
        self._ready = asyncio.Event()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, transport: McpTransport, seconds: float) -> McpSession:
        """Perform the handshake and list the tools.

        Raises `McpLostError`, or `McpTimeoutError` if that takes longer.
        """
        session = cls(transport)
        session._task = asyncio.create_task(session._keep_open(transport))
        try:
            async with asyncio.timeout(seconds):
                await session._ready.wait()
                session.tools = await session._list_tools()
        except TimeoutError:
            await session.close()
            raise McpTimeoutError(f"it did not start within start_timeout, {seconds:g} s") from None
        except BaseException:  # on cancellation too: the caller has no session to close
            await session.close()
            raise
        return session

    @property
    def alive(self) -> bool:
        """False once a call has found the server gone, or the session is closed."""
        return self._client is not None

    async def call(
        self, name: str, arguments: Mapping[str, Any], seconds: float, *, retried: bool = False
    ) -> tuple[str, bool]:
        """Return the result as text, and True if the tool reports it as an error.

        `retried`: the call has been sent in a session that has ended.

        Raises `McpTimeoutError`, `McpLostError`, `McpUnansweredError` or `McpTooLargeError`; the transport and the
        clock decide, since a server may use the numbers of the SDK's errors too.
        """
        from mcp.shared.exceptions import MCPError
        from pydantic import ValidationError

        client = self._open_client()
        exchange = Exchange(retried=retried)
        context = EXCHANGE.set(exchange)
        self.calls += 1
        try:
            async with asyncio.timeout(seconds):
                result = await client.call_tool(name, dict(arguments))
        except TimeoutError:
            raise McpTimeoutError(f"no answer within {seconds:g} s") from None
        except MCPError as error:
            if exchange.large:
                raise McpTooLargeError(f"more than {LINE_LIMIT} bytes or {MOST_VALUES} values") from None
            if exchange.problem is not None:
                problem = f"{exchange.problem} in answer to a call of {name}"
                raise McpUnansweredError(problem, executed=exchange.executed, ended=exchange.ended) from None
            if self._transport.ended:
                self._client = None
                raise McpLostError("it ended during the call") from None
            return error.message, True
        except (RuntimeError, ValidationError) as error:
            # The SDK checks results against the schemas that the server declared.
            return f"the tool server's answer is not what it promised: {str(error).splitlines()[0]}", True
        finally:
            self.calls -= 1
            EXCHANGE.reset(context)
        return _result_text(result), result.is_error

    def retire(self) -> None:
        """Accept no further calls; waiting calls may still get a result."""
        self._client = None

    async def close(self) -> None:
        """End the session and all resources of its transport; may be called twice."""
        self._closing.set()
        self._client = None
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _keep_open(self, transport: McpTransport) -> None:
        from mcp import Client

        try:
            async with Client(transport, cache=None) as client:
                # The SDK's check blocks the event loop while it evaluates a pattern of the server.
                client.session.validate_tool_result = self._check_answer  # type: ignore[method-assign]
                self._client = client
                self._ready.set()
                await self._closing.wait()
        finally:
            self._client = None
            self._ready.set()

    def _open_client(self) -> Client:
        if self._client is not None:
            return self._client
        error = self._task.exception() if self._task is not None and self._task.done() else None
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise McpLostError("it has ended" if error is None else str(error) or type(error).__name__)

    async def _check_answer(self, name: str, result: CallToolResult) -> None:
        """Raise `RuntimeError` if a result does not fit the schema that the server has declared."""
        schema = next((tool.answer for tool in self.tools if tool.name == name), None)
        if schema is None:
            return
        if result.structured_content is None:
            raise RuntimeError("it has no structured content")
        arguments = {"content": result.structured_content, "schema": schema}
        try:
            problem: object = await POOL.call(
                Code.from_ref(f"{__name__}:problem_of"), arguments, "hermes_rl.plugins:identity", CHECK_SECONDS
            )
        except EndedError as error:
            raise RuntimeError(f"checking it {error}") from None
        except ForeignError as error:
            raise RuntimeError(f"it cannot be checked: {error}") from None
        if problem is not None:
            raise RuntimeError(problem)

    async def _list_tools(self) -> tuple[Listed, ...]:
        from mcp.shared.exceptions import MCPError
        from pydantic import ValidationError

        tools: list[Listed] = []
        cursor: str | None = None
        try:
            for _ in range(MOST_PAGES):
                page = await self._open_client().list_tools(cursor=cursor)
                tools += [
                    Listed(tool.name, tool.description or "", tool.input_schema, tool.output_schema)
                    for tool in page.tools
                ]
                cursor = page.next_cursor
                if cursor is None and len(tools) <= MOST_TOOLS:
                    return tuple(tools)
        except (MCPError, RuntimeError, ValidationError) as error:
            raise McpLostError(f"its tools cannot be listed: {str(error).splitlines()[0]}") from None
        raise McpLostError(f"it lists more than {MOST_TOOLS} tools")


def problem_of(content: Any, schema: Mapping[str, Any]) -> str | None:
    """Return the problem of a structured result, or None if there is none; runs in a user code process."""
    problems = CompiledSchema(schema).problems(content)
    return problems[0][:PROBLEM] if problems else None


problem_of.imports = ("jsonschema", "referencing")  # type: ignore[attr-defined]


def _result_text(result: CallToolResult) -> str:
    """Return the text for the model: texts unchanged, a placeholder for other parts; structured content alone as
    JSON.
    """
    parts = [_placeholder(block.model_dump(by_alias=True, exclude_none=True)) for block in result.content[:MOST_BLOCKS]]
    if len(result.content) > MOST_BLOCKS:
        parts.append(f"[... {len(result.content) - MOST_BLOCKS} parts omitted ...]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _placeholder(block: dict[str, Any]) -> str:
    if "text" in block:
        return str(block["text"])
    resource = block.get("resource", {})
    if "text" in resource:
        return str(resource["text"])
    label = block.get("mimeType") or resource.get("mimeType") or block.get("uri") or resource.get("uri") or "content"
    return f"[{block.get('type', 'content')}: {label}]"


def _parse_message(line: bytes) -> JSONRPCMessage | None:
    """Return the message of a line, or None for one with too many values; raises ValueError for an invalid message."""
    from mcp_types import jsonrpc_message_adapter

    return None if too_many_values(line) else jsonrpc_message_adapter.validate_json(line, by_name=False)


def over_http(url: str, headers: Mapping[str, str]) -> McpTransport:
    """Return the transport to a server at a streamable HTTP endpoint."""
    return McpTransport(lambda transport: _http_streams(url, headers))


@contextlib.asynccontextmanager
async def _http_streams(url: str, headers: Mapping[str, str]) -> AsyncIterator[TransportStreams]:
    from mcp.client.streamable_http import streamable_http_client

    from hermes_rl.tools.mcp_wire import BoundedClient

    async with (
        BoundedClient(dict(headers)) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=None) as streams,
    ):
        yield streams


def over_process(conversation: Conversation) -> McpTransport:
    """Return the transport to a server whose standard input and output are `conversation`, which it closes."""
    return McpTransport(lambda transport: _process_streams(conversation, transport))


@contextlib.asynccontextmanager
async def _process_streams(conversation: Conversation, transport: McpTransport) -> AsyncIterator[TransportStreams]:
    import anyio
    from mcp.shared.message import SessionMessage

    to_session, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    pump = _Pump(conversation, transport, to_session, from_session)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(pump.receive)
            group.start_soon(pump.send)
            yield incoming, outgoing
            group.cancel_scope.cancel()
    finally:
        for stream in (to_session, incoming, outgoing, from_session):
            stream.close()
        with anyio.CancelScope(shield=True):  # a cancelled session must end its process
            await conversation.close()


class _Pump:
    """Transfers messages between a process and a session, one a line; a flood ends it."""

    def __init__(self, conversation: Conversation, transport: McpTransport, to_session: Any, from_session: Any) -> None:
        self._conversation, self._transport = conversation, transport
        self._to_session = to_session
        self._from_session = from_session
        self._received = 0

    async def receive(self) -> None:
        import anyio
        from mcp.shared.message import SessionMessage

        with (
            self._to_session,
            self._record_end(),
            contextlib.suppress(LineTooLongError, OSError, anyio.BrokenResourceError),
        ):
            async for line in lines_of(self._conversation, LINE_LIMIT):
                self._received += len(line) + 1
                if self._received > FLOOD_LIMIT:
                    return
                try:
                    message = (
                        _parse_message(line)
                        if len(line) <= THREAD_MESSAGE_BYTES
                        else await run_exclusively(_parse_message, line)
                    )
                except ValueError:
                    continue  # a server that prints to its standard output; no caller needs that
                if message is None:
                    return
                await self._to_session.send(SessionMessage(message))

    @contextlib.contextmanager
    def _record_end(self) -> Iterator[None]:
        """Record at the end that the process is gone, before the session learns that no more messages come."""
        try:
            yield
        finally:
            self._transport.ended = True

    async def send(self) -> None:
        with contextlib.suppress(OSError):
            async for message in self._from_session:
                self._received = 0
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                await self._conversation.write(text.encode() + b"\n")
        # Reading has stopped: the session must know that, or its calls would wait forever.
        self._transport.ended = True
        self._to_session.close()
