"""Notes of the HTTP layer below the MCP SDK about one call; `mcp_wire` writes them, and `mcp_client` reads them."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Exchange:
    """Notes of the HTTP layer about one call."""

    problem: str | None = None
    """Reason why the server itself did not respond, or None if it did, or nothing was sent over HTTP."""
    executed: bool = True
    """True if it may have executed the call nevertheless."""
    ended: bool = False
    """True if it no longer knows the session."""
    retried: bool = False
    """True if the call was sent before, in a session that has ended."""
    large: bool = False
    """True if a response exceeded the limit."""

    def fail(self, problem: str, *, executed: bool = True, ended: bool = False) -> None:
        self.problem, self.executed, self.ended = problem, executed, ended


EXCHANGE: ContextVar[Exchange | None] = ContextVar("exchange", default=None)
"""Exchange of the call in whose context the SDK sends a request; None for all other requests."""
