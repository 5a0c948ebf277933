"""Implement `type: openai`: one chat-completions server."""

from __future__ import annotations

from functools import partial

from hermes_rl.servers.base import (
    ChatReply,
    ChatRequest,
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

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._transport = Transport(config)

    async def attempt(self, request: ChatRequest) -> ChatReply:
        """Send once, and parse the response."""
        body = chat_body(request, self.config.current())
        bound = ReplyBound.of_chat(body)
        call = self._transport.post(PATH, encode(body), request.rollout_id, bound.size)
        del body  # thousands of calls may wait for their responses
        answer = await call
        if answer.status != 200:
            raise self._transport.refused(PATH, answer)
        timing = Timing(generating=answer.received - answer.sent)
        return await self._transport.read(
            PATH, answer, partial(read_reply, config=self.config, timing=timing, bound=bound)
        )

    async def context_length(self) -> int | None:
        """Return the maximum tokens of a conversation, if the server reports it."""
        return await self._transport.context_length()

    async def close(self) -> None:
        await self._transport.close()
