"""The tools that one group of rollouts may use, by name.

Owns `Toolkit`: names without collisions, and the list of schemas that servers are given. The list carries
its tools along, so that code which only passes schemas on (as hand-written environments do) loses nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.tools.base import Tool


class Schemas(list[dict[str, Any]]):
    """OpenAI tool schemas, with the toolkit that they describe."""

    def __init__(self, toolkit: Toolkit, schemas: Iterable[dict[str, Any]]) -> None:
        self.toolkit = toolkit
        super().__init__(schemas)


class Toolkit:
    """Tools by name, in order; immutable, shared by the rollouts of a group.

    Args:
        tools: the tools.
        schemas: what the model is told about each, in the same order; None: what each tool says of itself.
    """

    def __init__(self, tools: Iterable[Tool] = (), schemas: Iterable[dict[str, Any]] | None = None) -> None:
        self.tools: tuple[Tool, ...] = tuple(tools)
        self._by_name: dict[str, Tool] = {}
        for tool in self.tools:
            if tool.name in self._by_name:
                raise UserError(f"two tools are named {tool.name!r}; rename one, or disable its toolset")
            self._by_name[tool.name] = tool
        self.schemas = Schemas(self, (tool.schema for tool in self.tools) if schemas is None else schemas)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._by_name)

    def get(self, name: str) -> Tool | None:
        return self._by_name.get(name)

    def only(self, names: Collection[str] | None) -> Toolkit:
        """The tools among these with one of `names`; None keeps all."""
        if names is None or self.names <= set(names):
            return self
        kept = [pair for pair in zip(self.tools, self.schemas, strict=True) if pair[0].name in names]
        return Toolkit((tool for tool, _ in kept), (schema for _, schema in kept))
