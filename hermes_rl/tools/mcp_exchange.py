"""What the HTTP layer below the MCP SDK notes about one call; `mcp_wire` writes it, and `mcp_client` reads it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Exchange:
    """What the HTTP layer did with one call."""

    problem: str | None = None
    """Why the server itself gave no answer; None where it gave one, or nothing was sent over HTTP."""
    executed: bool = True
    """Whether it may have executed the call all the same."""
    ended: bool = False
    """Whether it no longer knows the session."""
    large: bool = False
    """Whether an answer was larger than is read."""

    def fail(self, problem: str, *, executed: bool = True, ended: bool = False) -> None:
        self.problem, self.executed, self.ended = problem, executed, ended


EXCHANGE: ContextVar[Exchange | None] = ContextVar("exchange", default=None)
"""That of the call in whose context the SDK sends a request; None for all other requests."""
