"""Taking any model server into the loop: one of ours, or one with OpenAI-style `chat_completion(**kwargs)`."""

from __future__ import annotations

import time
from typing import Any, cast

from hermes_rl.errors import Failure, ServerFailure
from hermes_rl.servers.base import ChatReply, ChatRequest, ChatServer, ContextLengthExceeded, Timing


def as_chat_server(server: Any) -> ChatServer:
    """`server` itself if it speaks `chat(ChatRequest)`, else an adapter around its `chat_completion`.

    Raises:
        TypeError: it has neither.
    """
    if hasattr(server, "chat"):
        return cast(ChatServer, server)
    if hasattr(server, "chat_completion"):
        return CompletionAdapter(server)
    raise TypeError(f"{type(server).__name__} is no model server: it has neither chat() nor chat_completion()")


class CompletionAdapter:
    """A foreign server object, such as Atropos' ServerManager or a stub in a test."""

    def __init__(self, server: Any) -> None:
        self._server = server

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Ask it; whatever it raises is a failure of the server."""
        started = time.perf_counter()
        try:
            completion = await self._server.chat_completion(**arguments(request))
        except (Failure, ContextLengthExceeded):
            raise
        except Exception as error:
            raise ServerFailure(f"{type(error).__name__}: {error}") from error
        choice = completion.choices[0]
        usage = getattr(completion, "usage", None)
        return ChatReply(
            message=_plain(choice.message),
            finish_reason=getattr(choice, "finish_reason", None),
            usage=_plain(usage) if usage is not None else {},
            model=str(getattr(completion, "model", "")),
            server_type=type(self._server).__name__,
            timing=Timing(generating=time.perf_counter() - started),
        )

    async def close(self) -> None:
        """Its owner closes it."""


def arguments(request: ChatRequest) -> dict[str, Any]:
    """The request as keyword arguments of an OpenAI client; what is not set is left out."""
    names = ("tools", "temperature", "top_p", "max_tokens", "seed", "stop", "extra_body")
    given = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    if request.logprobs:
        given["logprobs"] = True
    return {"messages": list(request.messages), "n": 1, **given}


def _plain(value: Any) -> dict[str, Any]:
    """A dict of a pydantic object, a mapping, or a simple namespace."""
    if hasattr(value, "model_dump"):
        return dict(value.model_dump(exclude_none=True))
    return dict(value) if isinstance(value, dict) else dict(vars(value))
