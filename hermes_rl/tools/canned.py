"""Tools that reach outside, as a demo has them: each always gives the answer that the spec wrote down for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.tools.base import DescribedTool, Tool, ToolRuntime

_TEXT = {"type": "string"}
PARAMETERS: dict[str, dict[str, Any]] = {
    "web_search": {"query": _TEXT, "limit": {"type": "integer"}},
    "web_extract": {"urls": {"type": "array", "items": _TEXT}},
}
"""Of the tools that models know best; any other takes whatever it is given."""


class Canned(DescribedTool):
    """One tool with one answer."""

    outside = True

    def __init__(self, name: str, answer: str) -> None:
        accepted = {"type": "object", "properties": PARAMETERS.get(name, {}), "additionalProperties": True}
        super().__init__(name, f"A stand-in for {name}: it always gives the same answer.", accepted)
        self._answer = answer

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
