"""Tools that reach outside, as a demo has them: each always gives the answer that the spec wrote down for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.tools.base import Tool, ToolRuntime

_TEXT = {"type": "string"}
PARAMETERS: dict[str, dict[str, Any]] = {
    "web_search": {"query": _TEXT, "limit": {"type": "integer"}},
    "web_extract": {"urls": {"type": "array", "items": _TEXT}},
}
"""Of the tools that models know best; any other takes whatever it is given."""


class Canned(Tool):
    """One tool with one answer."""

    outside = True

    def __init__(self, name: str, answer: str) -> None:
        self.name = name
        self._answer = answer

    @property
    def description(self) -> str:
        return f"A stand-in for {self.name}: it always gives the same answer."

    @property
    def parameters(self) -> dict[str, Any]:
        return {"type": "object", "properties": PARAMETERS.get(self.name, {}), "additionalProperties": True}

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        return self._answer


def canned_tools(toolset: str, answers: Mapping[str, str]) -> tuple[Tool, ...]:
    """Return the stand-ins; raises `UserError` where the spec wrote none down."""
    if not answers:
        raise UserError(
            f"toolset {toolset} reaches outside, which --demo does not: give its tools answers in toolsets.canned, "
            'such as {web_search: \'{"data": {"web": []}}\'}'
        )
    return tuple(Canned(name, answer) for name, answer in answers.items())
