"""A server role as a reward sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from hermes_rl.agent.result import Usage
from hermes_rl.servers.client import ModelClient


class ModelHandle:
    """What a reward can ask of a role.

    Attributes:
        verdicts: what it judged, by the hash of what it was asked; see `hermes_rl.scoring.judge`.
    """

    def __init__(self, role: ModelClient) -> None:
        self.name = role.name
        self.scripted = role.scripted
        self.verdicts: dict[str, Future[Mapping[str, Any]]] = {}
        self._role = role

    async def chat(self, messages: list[dict[str, Any]], schema: Mapping[str, Any] | None = None) -> str:
        """The text of the answer; with a JSON Schema the server is held to it. Raises ServerFailure."""
        return await self._role.chat_text(messages, schema)

    async def answer(
        self, messages: Sequence[dict[str, Any]], schema: Mapping[str, Any], temperature: float
    ) -> tuple[str, Mapping[str, float]]:
        """The text of the answer, and its usage: prompt_tokens, completion_tokens, cost where the server tells it."""
        text, reply = await self._role.answer(messages, schema, temperature=temperature)
        usage = Usage()
        usage.add(reply.usage)
        return text, usage.record()
