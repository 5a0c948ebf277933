"""The interface of a tool, and of a group of tools with a name.

Owns `Tool` and `Toolset`. Which toolsets there are is `hermes_rl.tools.catalogue`, how a model's calls are
checked, run and answered is `hermes_rl.tools.execute`, what a tool acts on is `hermes_rl.tools.machine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hermes_rl.tools.errors import ToolInputError

if TYPE_CHECKING:
    from hermes_rl.tools.machine import ToolRuntime

__all__ = ["CALL_TIMEOUT", "Tool", "ToolInputError", "Toolset", "function_schema"]

CALL_TIMEOUT: ContextVar[float | None] = ContextVar("CALL_TIMEOUT", default=None)
"""Seconds that the call now running may take, so that a tool can end its own work in time and say so."""


class Tool(ABC):
    """Something that the model can call. One object serves all rollouts: what differs is in the runtime."""

    name: str
    parallel: bool = True
    """May run beside other calls of the same turn. One that may not waits for those before it, and those
    after it wait for it, so that its effects keep their order."""
    on_sandbox: bool = False
    """Acts on the sandbox. It is started before the call's time begins: a slow start is not the policy's doing."""
    outside: bool = False
    """Acts on the world outside of the rollout's machine, so that its answers may be recorded and replayed."""
    timeout: float | None = None
    """Seconds for one call, where the tool has a bound of its own; the smaller of it and the spec's wins."""

    @property
    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """JSON Schema of the arguments, always of type object."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What the model is told about it."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as OpenAI's chat API takes it: ``{"type": "function", "function": {…}}``."""
        return function_schema(self.name, self.description, self.parameters)

    @abstractmethod
    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        """Act, and answer in text (JSON for the built-in tools).

        `args` are checked against `parameters` already. Raises `ToolInputError` for arguments that cannot
        be used; a `Failure` ends the rollout; any other exception becomes an error that the model is told.
        """


@dataclass(frozen=True)
class Toolset:
    """Tools that are switched on together by one name."""

    name: str
    description: str
    tools: tuple[Tool, ...]


def function_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool's schema in the form of OpenAI's chat API."""
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }
