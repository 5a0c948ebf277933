"""Adapt server objects with an OpenAI-style `chat_completion(**kwargs)`, such as Atropos' ServerManager."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

from hermes_rl.errors import Failure, ServerFailure
from hermes_rl.servers.base import (
    ChatReply,
    ChatRequest,
    ChatServer,
    ContextLengthExceeded,
    ServerConfig,
    Timing,
    chat_body,
    require_parts,
)
from hermes_rl.servers.transport import is_context_overflow
from hermes_rl.spec.server_types import CHAT_PARTS, TEXT_PARTS


def as_chat_server(server: Any) -> ChatServer:
    """Return `server` itself if it has `chat(ChatRequest)`, else an adapter around its `chat_completion`.

    Raises:
        TypeError: it has neither method.
    """
    if callable(getattr(server, "chat", None)):
        return cast(ChatServer, server)
    if callable(getattr(server, "chat_completion", None)):
        return CompletionAdapter(server)
    raise TypeError(f"{type(server).__name__} is not a model server: it has neither chat() nor chat_completion()")


class CompletionAdapter:
    """Adapter of a server object from other code, such as Atropos' ServerManager or a stub in a test."""

    def __init__(self, server: Any) -> None:
        self._server = server

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Call the server; any exception is its failure, except for a conversation that is too long."""
        require_parts(request, self.parts, type(self._server).__name__)
        started = time.perf_counter()
        try:
            completion = await self._server.chat_completion(**arguments(request))
            return self._reply(completion, time.perf_counter() - started)
        except (Failure, ContextLengthExceeded):
            raise
        except Exception as error:
            status = getattr(error, "status_code", None)
            if isinstance(status, int) and is_context_overflow(status, str(error)):
                raise ContextLengthExceeded(str(error)) from error
            raise ServerFailure(f"{type(error).__name__}: {error}") from error

    def _reply(self, completion: Any, seconds: float) -> ChatReply:
        completion_data = _to_builtins(completion)
        choice = completion_data["choices"][0]
        usage = completion_data.get("usage")
        return ChatReply(
            message=dict(choice["message"]),
            finish_reason=choice.get("finish_reason"),
            usage=usage if isinstance(usage, dict) else {},
            model=str(completion_data.get("model") or ""),
            server_type=type(self._server).__name__,
            timing=Timing(generating=seconds),
        )

    @property
    def parts(self) -> frozenset[str]:
        """Types of content parts that a request may contain: only text if it is converted to tokens."""
        return TEXT_PARTS if callable(getattr(self._server, "get_state", None)) else CHAT_PARTS

    def state(self) -> Mapping[str, Any] | None:
        """Return the token state of a server that tracks tokens, or None."""
        get_state = getattr(self._server, "get_state", None)
        return get_state() if callable(get_state) else None

    async def close(self) -> None:
        """Leave the server open: its owner closes it."""


def arguments(request: ChatRequest) -> dict[str, Any]:
    """Return the request as keyword arguments of an OpenAI client, omitting unset ones."""
    names = ("tools", "temperature", "top_p", "max_tokens", "seed", "stop")
    fields = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    if request.logprobs:
        fields["logprobs"] = True
    extra = chat_body(ChatRequest((), extra_body=request.extra_body, reasoning=request.reasoning), ServerConfig(""))
    del extra["messages"]
    if extra:
        fields["extra_body"] = extra
    return {"messages": list(request.messages), "n": 1, **fields}


def _to_builtins(value: Any) -> Any:
    """Return pydantic objects, mappings and simple namespaces as dicts and lists, recursively."""
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {key: _to_builtins(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_builtins(item) for item in value]
    if isinstance(value, str | int | float | None):
        return value
    return {key: _to_builtins(item) for key, item in vars(value).items()}
