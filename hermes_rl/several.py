"""Which environment is at work, where several play in one process: its name stands before what the user reads."""

from __future__ import annotations

from contextvars import ContextVar

ENVIRONMENT: ContextVar[str] = ContextVar("environment", default="")
"""Its name; empty where one plays alone."""


def with_environment(line: str) -> str:
    """Return the line behind the name of the environment that says it."""
    name = ENVIRONMENT.get()
    return f"{name}: {line}" if name else line
