"""Running the tool calls of one turn: checked, together where the tools allow it, answered in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl.tools.errors import ToolError
from hermes_rl.tools.machine import ToolRuntime
from hermes_rl.tools.toolkit import Toolkit


@dataclass(frozen=True)
class ToolOutcome:
    """The answer to one call."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    """As executed; the text of the model where it could not be read."""
    content: str
    """What the model is told."""
    error: ToolError | None
    seconds: float


async def execute_calls(
    calls: Sequence[Mapping[str, Any]],
    toolkit: Toolkit,
    runtime: ToolRuntime,
    *,
    turn: int,
    tool_timeout: float | None = None,
) -> list[ToolOutcome]:
    """Run each call exactly once and give its answer, in the order of `calls`."""
    raise NotImplementedError
