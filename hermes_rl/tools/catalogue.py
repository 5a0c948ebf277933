"""Which toolsets there are, and which tools a list of their names stands for."""

from __future__ import annotations

from hermes_rl.errors import UserError
from hermes_rl.tools.base import Tool


def find_tool(name: str) -> Tool:
    """A built-in tool by its name."""
    raise UserError(f"no tool is named {name!r}")
