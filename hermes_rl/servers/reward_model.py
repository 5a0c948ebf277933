"""Call reward models: servers that return numbers for a conversation, via vLLM's ``/score``, ``/classify`` and
``/pooling``.

This module owns the request body and the parsing of numbers for each path. Calls are retried and accounted for as
usual; a value that is not a number is a failed attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hermes_rl.servers.base import (
    ChatReply,
    ChatRequest,
    Malformed,
    Message,
    ReplyBound,
    ServerConfig,
    Timing,
    encode,
    read_answer,
)
from hermes_rl.servers.transport import Transport
from hermes_rl.values import is_number

_BOUND = ReplyBound()


class RewardModel:
    """One server; used from one event loop at a time."""

    path: str

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._transport = Transport(config)

    def body(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Return the body in addition to the model's name."""
        return {"messages": messages}

    def numbers(self, entry: Mapping[str, Any]) -> Any:
        """Return the numbers of the only entry of a response, not yet validated."""
        raise NotImplementedError

    async def attempt(self, request: ChatRequest) -> ChatReply:
        """Send once, and parse the numbers; raises as `hermes_rl.servers.base.Backend`."""
        config = self.config.current()
        body = encode({"model": config.model, **self.body(request.messages)})
        answer = await self._transport.post(self.path, body, max_bytes=_BOUND.size)
        if answer.status != 200:
            raise self._transport.refused(self.path, answer)
        timing = Timing(generating=answer.received - answer.sent)

        def read(data: Any) -> ChatReply:
            values = self.numbers(data["data"][0])
            if not isinstance(values, list) or not values or not all(map(is_number, values)):
                raise Malformed("the answer of a reward model cannot be read: there are no numbers in it")
            usage, model = data.get("usage"), data.get("model")
            return ChatReply(
                message={"role": "assistant", "content": None},
                finish_reason=None,
                usage=usage if isinstance(usage, dict) else {},
                model=model if isinstance(model, str) else config.model,
                server_type=config.type,
                numbers=tuple(map(float, values)),
                timing=timing,
            )

        return await self._transport.read(self.path, answer, lambda raw: read_answer(raw, read, _BOUND))

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()


class ScorePath(RewardModel):
    """A cross-encoder, which scores the last message against the texts before it."""

    path = "/score"

    def body(self, messages: Sequence[Message]) -> dict[str, Any]:
        *before, last = [_content_text(message.get("content")) for message in messages]
        return {"text_1": "\n\n".join(before), "text_2": last}

    def numbers(self, entry: Mapping[str, Any]) -> Any:
        return [entry["score"]]


def _content_text(content: Any) -> str:
    """Return the text of a message content, which may be None, a string, or a list of parts."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))


class ClassifyPath(RewardModel):
    """A classifier of conversations, which returns a number for each class."""

    path = "/classify"

    def numbers(self, entry: Mapping[str, Any]) -> Any:
        return entry["probs"]


class PoolingPath(RewardModel):
    """A model with its own head; if it returns numbers for each token or step, the last ones count."""

    path = "/pooling"

    def numbers(self, entry: Mapping[str, Any]) -> Any:
        data = entry["data"]
        return data[-1] if isinstance(data[-1], list) else data
