"""Running the tool calls of one turn: checked, together where the tools allow it, answered in order.

Owns what happens between a model's call and the answer that it reads. Each call is made exactly once.
Whatever the model wrote and whatever a tool does, the answer is a text; what went wrong is recorded as a
`ToolError`. Only what is neither the model's nor the tool's doing goes on up: a `Failure`, a mistake in
the user's setup, cancellation.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import json
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl.errors import HermesRLError, SandboxFailure
from hermes_rl.plugins import did_you_mean
from hermes_rl.tools.arguments import check_arguments, read_arguments
from hermes_rl.tools.base import CALL_TIMEOUT, Tool
from hermes_rl.tools.errors import ToolError, ToolInputError
from hermes_rl.tools.machine import ToolRuntime
from hermes_rl.tools.results import RESULT_LIMIT, as_json, capped, describe, error_json
from hermes_rl.tools.toolkit import Toolkit

CANCEL_SECONDS = 10.0
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Errors of this process and of this machine; what a sandbox's processes may open is counted for each of them alone."""


@dataclass(frozen=True)
class ToolOutcome:
    """The answer to one call."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    """As executed; the text of the model where it could not be read."""
    content: str
    """What the model is told."""
    error: ToolError | None
    seconds: float


@dataclass(frozen=True)
class _Call:
    """One call as the model wrote it."""

    id: str
    name: str
    raw: object
    tool: Tool | None
    problem: str | None = None
    """Why it cannot be executed, where whoever parsed it says so."""

    @property
    def parallel(self) -> bool:
        return self.tool is None or self.tool.parallel


async def execute_calls(
    calls: Sequence[Mapping[str, Any]],
    toolkit: Toolkit,
    runtime: ToolRuntime,
    *,
    turn: int,
    tool_timeout: float | None = None,
) -> list[ToolOutcome]:
    """Run each call once and give the answers in the order of `calls`.

    Neighbours that are `parallel` run together; a tool that is not waits for those before it and holds up
    those after it. `tool_timeout` is seconds for each call.
    """
    return await runtime.at_home(_execute(calls, toolkit, runtime, turn, tool_timeout))


async def _execute(
    calls: Sequence[Mapping[str, Any]],
    toolkit: Toolkit,
    runtime: ToolRuntime,
    turn: int,
    tool_timeout: float | None,
) -> list[ToolOutcome]:
    outcomes: list[ToolOutcome] = []
    for batch in _batches([_read(call, toolkit, turn, i) for i, call in enumerate(calls)]):
        outcomes += await _together([_answer(call, toolkit, runtime, turn, tool_timeout) for call in batch])
    return outcomes


def _read(call: Mapping[str, Any], toolkit: Toolkit, turn: int, position: int) -> _Call:
    """A call with what the model may have left out or written wrongly made good."""
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {}
    name = function.get("name")
    name = name if isinstance(name, str) else ""
    identity = call.get("id") or f"call_{turn}_{position}"
    problem = call.get("error")
    return _Call(
        str(identity),
        name,
        function.get("arguments"),
        toolkit.get(name),
        problem if isinstance(problem, str) else None,
    )


def _batches(calls: Sequence[_Call]) -> Iterator[list[_Call]]:
    batch: list[_Call] = []
    for call in calls:
        if batch and not (call.parallel and batch[-1].parallel):
            yield batch
            batch = []
        batch.append(call)
    if batch:
        yield batch


async def _together(work: Sequence[Coroutine[Any, Any, ToolOutcome]]) -> list[ToolOutcome]:
    """All results in order. The first exception ends the others, and is raised when they have ended."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if task.done() and task.exception() is not None]
        return [task.result() for task in failed or tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(
    call: _Call, toolkit: Toolkit, runtime: ToolRuntime, turn: int, tool_timeout: float | None
) -> ToolOutcome:
    began = time.perf_counter()
    arguments: Mapping[str, Any] | str = _written(call.raw)
    error: ToolError | None = None
    try:
        if call.problem is not None:
            raise ToolInputError(call.problem)
        if call.tool is None:
            raise ToolInputError(_unknown(call.name, toolkit))
        checked = check_arguments(read_arguments(call.raw), call.tool.parameters)
        arguments = checked
        content = await run_tool(call.tool, checked, runtime, tool_timeout)
    except (ToolInputError, ToolFailedError) as problem:
        content = error_json(str(problem))
        error = ToolError(turn, call.name, _written(call.raw), getattr(problem, "detail", str(problem)), content)
    return ToolOutcome(call.id, call.name, arguments, capped(content, RESULT_LIMIT), error, time.perf_counter() - began)


class ToolFailedError(Exception):
    """A tool raised or hung. The message is for the model, `detail` for the record."""

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)
        self.detail = detail


async def run_tool(tool: Tool, args: dict[str, Any], runtime: ToolRuntime, timeout: float | None) -> str:
    """One call with checked arguments, within the smaller of `timeout` and the tool's own."""
    if tool.on_sandbox:
        await runtime.sandbox()
    bound = min((each for each in (timeout, tool.timeout) if each is not None), default=None)
    context = contextvars.copy_context()
    context.run(CALL_TIMEOUT.set, bound)
    # A task of its own tells a tool that raises CancelledError from our being cancelled.
    task = asyncio.create_task(_guarded(tool, args, runtime), context=context)
    try:
        await asyncio.wait([task], timeout=bound)
        if not task.done():
            raise ToolFailedError(f"tool {tool.name!r} did not answer within {bound:g} s", "timeout")
    finally:
        if not task.done():
            task.cancel()
            # One that does not let itself be cancelled must not hold up the rollout for ever.
            await asyncio.wait([task], timeout=CANCEL_SECONDS)
    return _outcome_of(task, tool)


async def _guarded(tool: Tool, args: dict[str, Any], runtime: ToolRuntime) -> str:
    try:
        return await tool.call(args, runtime)
    except SystemExit as error:
        # In a task it would end the event loop, and with it every other rollout.
        raise RuntimeError(f"the tool called sys.exit({error.code!r})") from error


def _outcome_of(task: asyncio.Task[str], tool: Tool) -> str:
    if task.cancelled():
        raise ToolFailedError(f"tool {tool.name!r} was cancelled", "cancelled")
    error = task.exception()
    if error is None:
        result: object = task.result()
        return result if isinstance(result, str) else as_json(result)
    if isinstance(error, ToolInputError | HermesRLError):
        raise error
    if isinstance(error, OSError) and error.errno in OUT_OF_DESCRIPTORS:
        raise SandboxFailure(f"tool {tool.name!r}: this machine has no descriptors left ({error})") from error
    raise ToolFailedError(f"tool {tool.name!r} failed: {describe(error)}", f"{type(error).__name__}: {error}")


def _unknown(name: str, toolkit: Toolkit) -> str:
    names = ", ".join(sorted(toolkit.names)) or "none"
    return f"there is no tool named {name!r}{did_you_mean(name, toolkit.names)} (there are: {names})"


def _written(raw: object) -> str:
    return raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False, default=str)
