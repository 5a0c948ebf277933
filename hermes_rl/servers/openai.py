"""`type: openai`: one chat-completions server."""

from __future__ import annotations

from functools import partial

from hermes_rl.servers.base import (
    ChatReply,
    ChatRequest,
    HeadersFor,
    ReplyBound,
    ServerConfig,
    Timing,
    chat_body,
    encode,
    read_reply,
)
from hermes_rl.servers.transport import Transport

PATH = "chat/completions"


class OpenAIServer:
    """One chat-completions server; used from one event loop at a time."""

    def __init__(self, config: ServerConfig, headers_for: HeadersFor | None = None) -> None:
        self.config = config
        self._transport = Transport(config)
        self._headers_for = headers_for

    async def attempt(self, request: ChatRequest) -> ChatReply:
        """Wait for a free place, send once, and read the answer."""
        body = chat_body(request, self.config.current())
        bound = ReplyBound.of_chat(body)
        headers = self._headers_for(request) if self._headers_for is not None else None
        answer = await self._transport.post(PATH, encode(body), headers, bound.size)
        if answer.status != 200:
            raise self._transport.refused(PATH, answer)
        timing = Timing(queued=answer.sent - answer.asked, generating=answer.received - answer.sent)
        return await self._transport.read(
            PATH, answer, partial(read_reply, config=self.config, timing=timing, bound=bound)
        )

    async def context_length(self) -> int | None:
        """Return the longest conversation, where the server tells it."""
        return await self._transport.context_length()

    async def close(self) -> None:
        await self._transport.close()
