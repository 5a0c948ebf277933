"""Run the tool calls of one turn: checked, concurrently if the tools allow it, with results in order.

Each call is executed exactly once. Whatever the model wrote and whatever a tool does, the result is a text, and a
`ToolError` records the error. Only errors that neither has caused leave this module: a `Failure`, a mistake in the
user's setup, cancellation.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import json
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hermes_rl.errors import HermesRLError, SandboxFailure, ToolError
from hermes_rl.plugins import Code, did_you_mean
from hermes_rl.spec.json_schema import MOST_PROBLEMS, CompiledSchema, is_of, place_of, type_of
from hermes_rl.threads import end_tasks, run_exclusively
from hermes_rl.tools.base import (
    CALL_TIMEOUT,
    RESULT_LIMIT,
    Tool,
    ToolFailedError,
    ToolInputError,
    Toolkit,
    ToolRuntime,
    as_json,
    capped,
    describe,
    error_json,
)
from hermes_rl.user_code.failures import EndedError, ForeignError
from hermes_rl.user_code.messages import require_texts
from hermes_rl.user_code.pool import POOL
from hermes_rl.values import NESTED, read_bounded, too_deep

# ------------------------------------------------------------------------------ Arguments: parsing and checking
# Superfluous parameters are errors, even if the schema does not exclude them; within parameters the schema alone
# decides.

_PLAIN_KEYS = frozenset({"type", "title", "description", "default"})
"""Keys of a schema that only requires a type."""
_PLAIN_OBJECT = frozenset({*_PLAIN_KEYS, "properties", "required", "additionalProperties", "$defs"})
"""Keys of a schema that only defines which parameters an object has."""
_PLAIN_TYPES = frozenset({"string", "integer", "number", "boolean"})
SHORT = 1 << 14
"""Characters of arguments up to which they are parsed on the event loop."""
SHORT_CHECK = 1 << 12
"""Characters of arguments up to which they are checked there, if the schema is not costly."""
CHECK_SECONDS = 1.0
"""Timeout in seconds for checking a call outside the event loop."""


def read_arguments(raw: object) -> dict[str, Any]:
    """Return the JSON object that the model wrote; raises `ToolInputError` for anything else. Empty text is ``{}``."""
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        return {}
    try:
        value = read_bounded(raw) if isinstance(raw, str) else raw
    except ValueError as error:
        raise ToolInputError(f"the arguments {error}") from None
    if value is raw and too_deep(value):
        raise ToolInputError(f"the arguments {NESTED}")
    if not isinstance(value, dict):
        raise ToolInputError(f"the arguments must be a JSON object, not {type_of(value)}")
    return value


async def checked_arguments(raw: object, tool: Tool, *, repair: bool = False) -> tuple[dict[str, Any], int]:
    """Parse and check arguments of a tool, outside the event loop if that may take long; raises `ToolInputError`.

    Returns them, and how many values were repaired. With `repair`, values of another type are converted if they can
    represent the right one; arguments of a `strict` tool, and of a tool whose server checks them, are only parsed.
    """
    repair = repair or tool.arguments == "repair"
    short = not isinstance(raw, str) or len(raw) <= SHORT
    arguments = read_arguments(raw) if short else await run_exclusively(lambda: read_arguments(raw))
    if tool.arguments == "strict" or _is_plain(arguments, tool.parameters) or not (repair or tool.checks_arguments):
        return arguments, 0
    text = raw if isinstance(raw, str) else json.dumps(raw, default=str)
    if len(text) <= SHORT_CHECK and not tool.compiled.is_costly:
        return check_arguments(arguments, tool.compiled, repair=repair, check=tool.checks_arguments)
    return await _checked_apart(text, tool, repair)


def check_arguments(
    arguments: dict[str, Any], compiled: CompiledSchema, *, repair: bool = False, check: bool = True
) -> tuple[dict[str, Any], int]:
    """Return the arguments coerced to a schema, and how many values of them were repaired.

    Raises:
        ToolInputError: they do not satisfy the schema, or name unknown parameters; not without `check`.
    """
    coerced, repaired = compiled.coerce(arguments, repair=repair)
    if not check:
        return coerced, repaired
    problems = []
    properties = compiled.schema.get("properties") or {}
    for key in compiled.unknown_properties(coerced)[:MOST_PROBLEMS]:
        hint = f"{did_you_mean(key, properties)} (there are: {', '.join(properties) or 'none'})"
        problems.append(f"unknown parameter {place_of((key,))!r}{hint}")
    try:
        problems += compiled.problems(coerced)
    except ValueError as error:
        raise ToolInputError(f"the arguments {error}") from None
    if problems:
        raise ToolInputError("; ".join(problems[:MOST_PROBLEMS]))
    return coerced, repaired


async def _checked_apart(raw: str, tool: Tool, repair: bool) -> tuple[dict[str, Any], int]:
    """Check arguments in a process that can be killed: a regular expression blocks all threads of its process."""
    try:
        answer = await POOL.call(
            Code.from_ref(f"{__name__}:answer_checked"),
            {"raw": raw, "schema": tool.parameters, "repair": repair, "check": tool.checks_arguments},
            "hermes_rl.plugins:identity",
            CHECK_SECONDS,
            lambda answer: require_texts(answer, {"problem"}, {"checked"}),
        )
    except (EndedError, ForeignError) as error:
        raise ToolInputError(f"the arguments cannot be checked against the tool's schema: {error}") from error
    if "problem" in answer:
        raise ToolInputError(answer["problem"])
    checked, repaired = json.loads(answer["checked"])
    return checked, repaired


def answer_checked(raw: str, schema: Mapping[str, Any], repair: bool, check: bool) -> dict[str, str]:
    """Check arguments in a user code process; return as JSON the result of `check_arguments`, or the problem."""
    try:
        checked = check_arguments(read_arguments(raw), CompiledSchema(schema), repair=repair, check=check)
        return {"checked": json.dumps(checked)}
    except ToolInputError as error:
        return {"problem": str(error)}


answer_checked.imports = ("jsonschema", "referencing")  # type: ignore[attr-defined]


def _is_plain(arguments: dict[str, Any], schema: Mapping[str, Any]) -> bool:
    """Return True if each argument is known and has its plain type, and none is missing, as in most calls."""
    properties = schema.get("properties", {})
    return (
        schema.keys() <= _PLAIN_OBJECT
        and all(key in properties and _fits_plainly(item, properties[key]) for key, item in arguments.items())
        and all(key in arguments for key in schema.get("required", ()))
    )


def _fits_plainly(value: Any, schema: object) -> bool:
    """Return True if the schema requires only one plain type and the value has it."""
    if not isinstance(schema, dict) or not schema.keys() <= _PLAIN_KEYS:
        return False
    kind = schema.get("type")
    return kind in _PLAIN_TYPES and is_of(value, {kind}) and not (kind == "integer" and isinstance(value, float))


# ------------------------------------------------------------------------------------------------- Running calls

MAX_CALLS_PER_TURN = 256
"""Maximum number of calls of one turn that are executed."""
CALLS_PER_PASS = 100
"""Number of unexecuted calls that get a result before other tasks get a turn."""
CANCEL_SECONDS = 10.0
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Errors of this process and of this machine; the open files of a sandbox's processes count for each of them alone."""


@dataclass(frozen=True)
class ToolOutcome:
    """Result of one call."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    """Executed arguments; the text of the model if it could not be parsed."""
    content: str
    """Text that the model receives."""
    error: ToolError | None
    seconds: float
    """Seconds without the start of the sandbox."""
    repaired: int = 0
    """Values of its arguments that were converted."""
    started_at: float | None = None
    """Seconds since 1970, after the start of the sandbox."""


@dataclass(frozen=True)
class _Call:
    """One call as the model wrote it."""

    id: str
    name: str
    raw: object
    tool: Tool | None
    problem: str | None = None
    """Reason why it cannot be executed, if its parser found one."""

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
    repair: bool = False,
) -> list[ToolOutcome]:
    """Run each call once and return the results in the order of `calls`.

    Adjacent calls that are `parallel` run together; another tool waits for the calls before it and blocks the calls
    after it. `tool_timeout` is seconds for each call, `repair` as in `checked_arguments`.
    """

    def answer(call: _Call) -> Coroutine[Any, Any, ToolOutcome]:
        return _run_call(call, toolkit, runtime, turn, tool_timeout, repair)

    async def execute() -> list[ToolOutcome]:
        outcomes: list[ToolOutcome] = []
        for batch in _parallel_batches(
            [_read_call(call, toolkit, turn, i) for i, call in enumerate(calls[:MAX_CALLS_PER_TURN])]
        ):
            outcomes += await _await_all(list(map(answer, batch)))
        for i in range(MAX_CALLS_PER_TURN, len(calls)):
            outcomes.append(await answer(replace(_read_call(calls[i], toolkit, turn, i), problem=TOO_MANY)))
            if i % CALLS_PER_PASS == 0:
                await asyncio.sleep(0)
        return outcomes

    return await runtime.on_sandbox_loop(execute())


TOO_MANY = f"this call was not executed: a turn may make {MAX_CALLS_PER_TURN} calls at most"


def _read_call(call: Mapping[str, Any], toolkit: Toolkit, turn: int, position: int) -> _Call:
    """Return a call, with defaults for parts that the model has omitted or written wrongly."""
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


def _parallel_batches(calls: Sequence[_Call]) -> Iterator[list[_Call]]:
    batch: list[_Call] = []
    for call in calls:
        if batch and not (call.parallel and batch[-1].parallel):
            yield batch
            batch = []
        batch.append(call)
    if batch:
        yield batch


async def _await_all(work: Sequence[Coroutine[Any, Any, ToolOutcome]]) -> list[ToolOutcome]:
    """Return all results in order. The first exception ends the other calls, and is raised when they have ended."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if task.done() and task.exception() is not None]
        return [task.result() for task in failed or tasks]
    finally:
        await end_tasks(tasks)


async def _run_call(
    call: _Call, toolkit: Toolkit, runtime: ToolRuntime, turn: int, tool_timeout: float | None, repair: bool
) -> ToolOutcome:
    start_time, starting = time.perf_counter(), runtime.start_seconds
    arguments: Mapping[str, Any] | str = _arguments_text(call.raw)
    repaired = 0
    error: ToolError | None = None
    try:
        if call.problem is not None:
            raise ToolInputError(call.problem)
        if call.tool is None:
            names = ", ".join(sorted(toolkit.names)) or "none"
            hint = f"{did_you_mean(call.name, toolkit.names)} (there are: {names})"
            raise ToolInputError(f"there is no tool named {call.name!r}{hint}")
        checked, repaired = await checked_arguments(call.raw, call.tool, repair=repair)
        arguments = checked
        content = await run_tool(call.tool, checked, runtime, tool_timeout)
    except (ToolInputError, ToolFailedError) as problem:
        content = capped(error_json(str(problem)), RESULT_LIMIT)
        detail = capped(getattr(problem, "detail", str(problem)), RESULT_LIMIT)
        error = ToolError(turn, call.name, _arguments_text(call.raw), detail, content)
    seconds = max(0.0, time.perf_counter() - start_time - (runtime.start_seconds - starting))
    content, started_at = capped(content, RESULT_LIMIT), time.time() - seconds
    return ToolOutcome(call.id, call.name, arguments, content, error, seconds, repaired, started_at)


async def run_tool(tool: Tool, args: dict[str, Any], runtime: ToolRuntime, timeout: float | None) -> str:
    """Run one call with checked arguments, within the smaller of `timeout` and the tool's timeout."""
    if tool.on_sandbox:
        await runtime.sandbox_for_agent()
    bound = min((each for each in (timeout, tool.timeout) if each is not None), default=None)
    context = contextvars.copy_context()
    context.run(CALL_TIMEOUT.set, bound)
    # A separate task distinguishes a tool that raises CancelledError from the cancellation of this one.
    task = asyncio.create_task(_call_guarded(tool, args, runtime), context=context)
    try:
        await asyncio.wait([task], timeout=bound)
        if not task.done():
            raise ToolFailedError(f"tool {tool.name!r} did not answer within {bound:g} s", "timeout")
    finally:
        if not task.done():
            task.cancel()
            # A tool that cannot be cancelled must not block the rollout forever.
            await asyncio.wait([task], timeout=CANCEL_SECONDS)
        runtime.acts += tool.on_sandbox
    return _outcome_of(task, tool)


async def _call_guarded(tool: Tool, args: dict[str, Any], runtime: ToolRuntime) -> str:
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
    if isinstance(error, ToolInputError | ToolFailedError | HermesRLError):
        raise error
    if isinstance(error, OSError) and error.errno in OUT_OF_DESCRIPTORS:
        raise SandboxFailure(f"tool {tool.name!r}: this machine has no descriptors left ({error})") from error
    raise ToolFailedError(f"tool {tool.name!r} failed: {describe(error)}", f"{type(error).__name__}: {error}")


def _arguments_text(raw: object) -> str:
    return raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False, default=str)
