"""A short way to call tools in tests, as a model does."""

from __future__ import annotations

import json
from typing import Any

from hermes_rl.tools.base import ToolRuntime
from hermes_rl.tools.execute import ToolOutcome, execute_calls


class Player:
    """Calls tools as a model does: by name, with JSON arguments."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self.runtime = runtime

    async def outcomes(self, *calls: dict[str, Any], timeout: float | None = 20) -> list[ToolOutcome]:
        return await execute_calls(calls, self.runtime.toolkit, self.runtime, turn=1, tool_timeout=timeout)

    async def outcome(self, name: str, arguments: object, timeout: float | None = 20) -> ToolOutcome:
        return (await self.outcomes(call(name, arguments), timeout=timeout))[0]

    async def __call__(self, name: str, **arguments: Any) -> Any:
        """The answer to a call that is in order."""
        outcome = await self.outcome(name, json.dumps(arguments))
        assert outcome.error is None, outcome.error
        return json.loads(outcome.content)


def call(name: str, arguments: object, identity: str = "id") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
