"""The background processes of one rollout, by the ids that its model knows."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hermes_rl.sandbox.base import BackgroundProcess
from hermes_rl.tools.errors import ToolInputError


@dataclass
class ListedProcess:
    """A process and what the model called it into being with."""

    id: str
    command: str
    cwd: str
    process: BackgroundProcess
    began: float = field(default_factory=time.monotonic)
    killed: bool = False

    @property
    def status(self) -> str:
        return "running" if self.process.poll() is None else "exited"

    @property
    def uptime(self) -> int:
        return int(time.monotonic() - self.began)


class ProcessTable:
    """Each rollout has its own, so that an id of another rollout means nothing here."""

    def __init__(self) -> None:
        self._entries: dict[str, ListedProcess] = {}

    def add(self, command: str, cwd: str, process: BackgroundProcess) -> ListedProcess:
        entry = ListedProcess(f"proc_{len(self._entries) + 1}", command, cwd, process)
        self._entries[entry.id] = entry
        return entry

    def all(self) -> list[ListedProcess]:
        return list(self._entries.values())

    def get(self, identity: str) -> ListedProcess:
        """The process with this id; raises `ToolInputError` that names those there are."""
        if identity not in self._entries:
            known = ", ".join(self._entries) or "none"
            raise ToolInputError(f"no process has the session_id {identity!r} (there are: {known})")
        return self._entries[identity]
