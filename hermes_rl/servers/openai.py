"""`type: openai`: one chat-completions server.

Owns the order of one attempt. Leaves the JSON to `wire`, the bytes to `transport`, and repeating to `retry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hermes_rl.servers.base import (
    ChatReply,
    ChatRequest,
    ErrorBody,
    Malformed,
    ServerConfig,
    Timing,
    chat_body,
    encode,
    read_reply,
)
from hermes_rl.servers.transport import HttpAnswer, Transport, excerpt

PATH = "chat/completions"

HeadersFor = Callable[[ChatRequest], Mapping[str, str]]


class OpenAIServer:
    """One chat-completions server; used from one event loop at a time."""

    def __init__(self, config: ServerConfig, headers_for: HeadersFor | None = None) -> None:
        self._config = config
        self._transport = Transport(config)
        self._headers_for = headers_for

    @property
    def config(self) -> ServerConfig:
        return self._config

    async def attempt(self, request: ChatRequest) -> ChatReply:
        """Wait for a free place, send once, and read the answer."""
        payload = encode(chat_body(request, self._config.current()))
        headers = self._headers_for(request) if self._headers_for is not None else None
        answer = await self._transport.post(PATH, payload, headers)
        if answer.status == 200:
            return self._reply(answer)
        raise self._transport.refused(PATH, answer)

    async def close(self) -> None:
        await self._transport.close()

    def _reply(self, answer: HttpAnswer) -> ChatReply:
        timing = Timing(queued=answer.sent - answer.asked, generating=answer.received - answer.sent)
        try:
            return read_reply(answer.raw, self._config, timing)
        except ErrorBody as error:
            if error.status is not None:
                raise self._transport.refused(PATH, answer, error.status) from None
            raise self._transport.failed(PATH, f"{error}: {excerpt(answer.raw)}") from None
        except Malformed as error:
            raise self._transport.failed(PATH, f"{error}: {excerpt(answer.raw)}") from None
