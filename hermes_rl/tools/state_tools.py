"""Tools that are methods of the rollout's state object: ``tools: [{state: NAME}]``.

Owns finding the methods and calling them on the state of the rollout at hand. NAME is an attribute of the
state; its public methods are the tools. It may also be a method of the state itself, which is then the one
tool, or a list of names of such methods, so that one class offers some to the agent and others to a
simulated user. Without a name, all public methods of the state are tools.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.plugins import did_you_mean
from hermes_rl.tools.base import Tool
from hermes_rl.tools.machine import ToolRuntime
from hermes_rl.tools.python_tools import answer_of, call_function
from hermes_rl.tools.signature import Signature


class StateTool(Tool):
    """One method, looked up on `runtime.state` at each call. Not parallel: calls may depend on each other."""

    parallel = False

    def __init__(self, attribute: str | None, method: Callable[..., Any], name: str) -> None:
        self.name = name
        self._attribute = attribute
        self._signature = Signature.of(method, name)

    @property
    def description(self) -> str:
        return self._signature.description

    @property
    def parameters(self) -> dict[str, Any]:
        return self._signature.parameters

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        owner = runtime.state if self._attribute is None else getattr(runtime.state, self._attribute)
        return answer_of(await call_function(getattr(owner, self.name), self._signature.values(args)))


def state_tools(state: object, name: str | None = None) -> tuple[Tool, ...]:
    """The tools of a state object; the same names and schemas for every state of its class."""
    owner = state if name is None else _attribute(state, name)
    if isinstance(owner, list | tuple):
        return tuple(StateTool(None, _method(state, str(each)), str(each)) for each in owner)
    if name is not None and inspect.isroutine(owner):
        return (StateTool(None, owner, name),)
    found = tuple(StateTool(name, method, own) for own, method in _public_methods(owner))
    if not found:
        raise UserError(f"{name or type(state).__name__} has no public methods, so there are no tools")
    return found


def _attribute(state: object, name: str) -> object:
    if not hasattr(state, name):
        names = {each for each in dir(state) if not each.startswith("_")}
        raise UserError(f"the state {type(state).__name__} has no {name!r}{did_you_mean(name, names)}")
    return getattr(state, name)


def _method(state: object, name: str) -> Callable[..., Any]:
    method = _attribute(state, name)
    if not callable(method):
        raise UserError(f"{name!r} of the state {type(state).__name__} is no method")
    return method


def _public_methods(owner: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """In the order in which the class declares them."""
    names = [name for base in reversed(type(owner).__mro__) for name in vars(base)]
    for name in dict.fromkeys(names):
        method = inspect.getattr_static(owner, name)
        if not name.startswith("_") and isinstance(method, staticmethod | classmethod) | inspect.isfunction(method):
            yield name, getattr(owner, name)
