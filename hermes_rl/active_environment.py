"""Prefix user messages with the name of the active environment if several run in one process."""

from __future__ import annotations

from contextvars import ContextVar

ENVIRONMENT: ContextVar[str] = ContextVar("environment", default="")
"""Name of the active environment; empty if there is only one."""


def with_environment(line: str) -> str:
    """Return the line, prefixed with the name of the environment that logs it."""
    name = ENVIRONMENT.get()
    return f"{name}: {line}" if name else line
