"""What a rollout's terminal remembers between commands: the working directory and exported variables.

Owns the script around a command that takes up this state and reports it back. Every command gets a shell of
its own, so that commands can run side by side and one that hangs harms no other; the state is kept on the
host, where nothing in the sandbox can change it behind the model's back.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from hermes_rl.sandbox.base import STATE

STATE_LIMIT = 100_000
"""Bytes of exported variables that are remembered; a shell that exports more keeps its former state."""


@dataclass
class ShellState:
    """Empty until a command has run."""

    cwd: str | None = None
    exports: str = ""

    def script(self, command: str, workdir: str | None, *, report: bool = True) -> str:
        """The command, for `Sandbox.run_reporting` with `exports`; `workdir` is for this command alone.

        Without `report` it is to be run with `variables`, and tells nothing of how it ended.
        """
        parts = [f'eval "${STATE}"; unset {STATE}', self._enter(workdir)]
        parts.append(f"eval {shlex.quote(command)}" + (" 3>&-" if report else ""))
        return "; ".join(part for part in parts if part)

    def variables(self) -> dict[str, str]:
        """What a script without report needs in its environment."""
        return {STATE: self.exports}

    def learn(self, report: bytes, *, keep_cwd: bool) -> None:
        """Take over what a command reported; one that was killed reports nothing and changes nothing."""
        text = report.decode("utf-8", "surrogateescape")
        cwd, _, exports = text.partition("\n")
        if len(report) >= STATE_LIMIT or not cwd.startswith("/") or not exports.endswith("\n.\n"):
            return
        self.exports = exports.removesuffix(".\n").rstrip("\n")
        if not keep_cwd:
            self.cwd = cwd

    def _enter(self, workdir: str | None) -> str:
        if workdir is not None:
            return f"cd -- {shlex.quote(workdir)} || exit 126"
        if self.cwd is None:
            return ""
        # A folder that was removed meanwhile is no reason to refuse every command from now on.
        return f"cd -- {shlex.quote(self.cwd)} 2>/dev/null || true"
