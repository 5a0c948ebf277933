"""Give a reward access to the model of a role.

This module owns the narrow interface for user code; `servers.client` makes the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.usage import Usage
from hermes_rl.user_code.proxies import lives_in_runner


@lives_in_runner("hermes_rl.user_code.proxies:RoleStandIn")
class ModelHandle:
    """Call the model of a role from a reward.

    Attributes:
        verdicts: verdicts of the model, by the hash of the question; see `hermes_rl.scoring.judge`.
    """

    def __init__(self, client: ModelClient) -> None:
        self.name = client.name
        self.scripted = client.scripted
        self.verdicts: dict[str, Future[Mapping[str, Any]]] = {}
        self._client = client

    def stand_in_fields(self) -> dict[str, Any]:
        """Return the fields that its proxy in a process of user code gets immediately."""
        return {"name": self.name, "scripted": self.scripted}

    async def chat(self, messages: list[dict[str, Any]], schema: Mapping[str, Any] | None = None) -> str:
        """Return the text of the reply; a JSON Schema is sent as `response_format`. Raises ServerFailure."""
        return await self._client.chat_text(messages, schema)

    async def answer(
        self, messages: Sequence[dict[str, Any]], schema: Mapping[str, Any], temperature: float
    ) -> tuple[str, Mapping[str, float]]:
        """Return the text and its usage: prompt_tokens, completion_tokens, and the cost if the server reports it."""
        text, reply = await self._client.answer(messages, schema, temperature=temperature)
        usage = Usage()
        usage.add(reply.usage)
        counts = usage.record()
        return text, {name: counts[name] for name in ("prompt_tokens", "completion_tokens", "cost") if name in counts}

    async def rate(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        """Return the numbers of a reward model for a conversation. Raises ServerFailure or ContextLengthExceeded."""
        return list(await self._client.rated(messages))
