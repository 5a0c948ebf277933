"""Tools that are Python functions of the user: ``tools: [{python: file.py:fn}]``.

Owns the wrapping. They run on the host, in this process: sync functions in a thread, async ones on the
event loop. What they raise is an error that the model is told.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from hermes_rl.errors import UserError
from hermes_rl.plugins import load_object
from hermes_rl.threads import in_thread
from hermes_rl.tools.base import Tool
from hermes_rl.tools.machine import ToolRuntime
from hermes_rl.tools.results import as_json
from hermes_rl.tools.signature import Signature

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What OpenAI's API takes as the name of a tool."""


class PythonTool(Tool):
    """One function. The text that it returns is the answer; anything else is answered as JSON."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", ""))
        if not NAME.fullmatch(self.name):
            raise UserError(f"{self.name!r} cannot be the name of a tool; use letters, digits, _ and -")
        self.signature = Signature.of(function, self.name)

    @property
    def description(self) -> str:
        return self.signature.description

    @property
    def parameters(self) -> dict[str, Any]:
        return self.signature.parameters

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        return answer_of(await call_function(self.function, self.signature.values(args)))


def python_tool(function: Callable[..., Any] | str, name: str | None = None, base: Path | None = None) -> Tool:
    """The tool of a function, or of a reference to one (relative files are below `base`)."""
    found = load_object(function, base) if isinstance(function, str) else function
    if not callable(found) or inspect.isclass(found):
        raise UserError(f"{function!r} is no function, so it cannot be a tool")
    return PythonTool(found, name)


async def call_function(function: Callable[..., Any], values: dict[str, Any]) -> Any:
    """The result of a function that may be sync or async, off the event loop where it could block."""
    if inspect.iscoroutinefunction(function):
        return await function(**values)
    result = await in_thread(functools.partial(function, **values))
    return await result if inspect.isawaitable(result) else result


def answer_of(result: Any) -> str:
    """What the model reads for a value that a function returned."""
    return result if isinstance(result, str) else as_json(to_jsonable_python(result, fallback=str))
