"""What a rollout's terminal remembers between commands: the working directory and exported variables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ShellState:
    """Empty until a command has changed something."""

    cwd: str | None = None
    exports: str = ""
