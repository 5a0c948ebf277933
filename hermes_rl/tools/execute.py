"""Running the tool calls of one turn: checked, together where the tools allow it, answered in order.

Each call is made exactly once. Whatever the model wrote and whatever a tool does, the answer is a text, and a
`ToolError` records what went wrong. Only what is neither's doing leaves this module: a `Failure`, a mistake in the
user's setup, cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import json
import re
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hermes_rl.errors import HermesRLError, SandboxFailure, ToolError
from hermes_rl.foreign.messages import require_texts
from hermes_rl.foreign.pool import POOL, EndedError, ForeignError
from hermes_rl.plugins import Code, did_you_mean
from hermes_rl.threads import end_tasks, one_at_a_time
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
from hermes_rl.values import NESTED, read_bounded, too_deep

# ----------------------------------------------------------- Arguments: reading, checking, and a few conversions
# A whole float is an integer (3.0 → 3). Where the spec allows it (`agent.repair_arguments`), a few conversions spare a
# model a wasted turn: text that is JSON of what the schema wants (``"3"`` → 3, ``"[1]"`` → [1]), and null, as if it was
# left out, for what is not required and cannot be null.
#
# Superfluous parameters are errors, also where the schema does not say so. Of JSON Schema it knows what tool
# schemas use: type, enum, const, properties, patternProperties, required, additionalProperties, items, prefixItems,
# uniqueItems, anyOf, oneOf, allOf, $ref within the schema, and bounds on numbers, lengths and patterns. The parts of an
# allOf are taken as one schema, so that each may name some of the parameters.

Schema = Mapping[str, Any]

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


_SHAPE = frozenset({"properties", "patternProperties", "additionalProperties"})
"""Keys by which a schema says which parameters an object has."""
_PLAIN = frozenset({"type", "title", "description", "default"})
"""Keys of a schema that asks for a type and nothing else."""
_PLAIN_OBJECT = frozenset({*_PLAIN, "properties", "required", "additionalProperties", "$defs"})
"""Keys of a schema that asks no more of an object than which parameters it has."""
_PLAIN_TYPES = frozenset({"string", "integer", "number", "boolean"})
MOST_PROBLEMS = 20
"""Problems of a call that the model is told of; then it is not checked any further."""
MOST_STEPS = 100_000
"""Values of a call that are checked; one counts for each branch of the schema that looks at it."""
FEW_STEPS = 1_000
"""The same on the event loop; a call that needs more is checked in a thread."""
SHORT = 1 << 14
"""Characters of arguments up to which they are read on the event loop."""
PATTERN_SECONDS = 1.0
"""For checking a call of a tool whose schema has regular expressions, each of which may take for ever."""
SHOWN = 80
PLACE = 200
MOST_REFERENCES = 32
"""Steps from one ``$ref`` to the next."""


def read_arguments(raw: object) -> dict[str, Any]:
    """Return the JSON object that the model wrote; raises `ToolInputError` for anything else."""
    try:
        value = read_bounded(raw) if isinstance(raw, str) else raw
    except ValueError as error:
        raise ToolInputError(f"the arguments {error}") from None
    if value is raw and too_deep(value):
        raise ToolInputError(f"the arguments {NESTED}")
    if not isinstance(value, dict):
        raise ToolInputError(f"the arguments must be a JSON object, not {_kind(value)}")
    return value


async def checked_arguments(raw: object, tool: Tool, *, repair: bool = False) -> tuple[dict[str, Any], int]:
    """Read and check arguments of a tool, beside the event loop where that may take long; raises `ToolInputError`.

    Returns them, and how many values were repaired. With `repair` those of another type that can stand for the right
    one are converted; those of a `strict` tool are only read.
    """
    schema, repair = tool.parameters, repair or tool.arguments == "repair"
    short = not isinstance(raw, str) or len(raw) <= SHORT
    if tool.arguments == "strict":
        return (read_arguments(raw) if short else await one_at_a_time(lambda: read_arguments(raw))), 0
    if tool.has_patterns:
        return await _checked_apart(raw if isinstance(raw, str) else json.dumps(raw, default=str), schema, repair)
    if short:
        with contextlib.suppress(_TooManyStepsError):
            return check_arguments(read_arguments(raw), schema, repair=repair, steps=FEW_STEPS)
    return await one_at_a_time(lambda: check_arguments(read_arguments(raw), schema, repair=repair))


def check_arguments(
    arguments: dict[str, Any], schema: Schema, *, repair: bool = False, steps: int = MOST_STEPS
) -> tuple[dict[str, Any], int]:
    """Return the arguments, with `repair` converted to `schema`, and how many values of them were; raises
    `ToolInputError` with what is wrong, also where checking them takes more than so many `steps`."""
    if _is_plain(arguments, schema):
        return dict(arguments), 0
    check = _Check(schema, steps, repair)
    try:
        checked = check.object(arguments, schema, "")
    except RecursionError:
        raise ToolInputError("the tool's schema refers to itself without end, so nothing can be checked") from None
    if check.problems:
        raise ToolInputError("; ".join(check.problems[:MOST_PROBLEMS]))
    return checked, check.repaired


async def _checked_apart(raw: str, schema: Schema, repair: bool) -> tuple[dict[str, Any], int]:
    """Check arguments in a process that can be ended: a regular expression holds all threads of its own."""
    arguments = {"raw": raw, "schema": schema, "repair": repair}
    try:
        answer = await POOL.call(
            Code.of(f"{__name__}:answer_checked"),
            arguments,
            "hermes_rl.plugins:itself",
            PATTERN_SECONDS,
            lambda answer: require_texts(answer, {"problem"}, {"checked"}),
        )
    except (EndedError, ForeignError) as error:
        raise ToolInputError(f"the arguments cannot be checked against the tool's schema: {error}") from error
    if "problem" in answer:
        raise ToolInputError(answer["problem"])
    checked, repaired = json.loads(answer["checked"])
    return checked, repaired


def answer_checked(raw: str, schema: Schema, repair: bool) -> dict[str, str]:
    """Check arguments in a process of foreign code; says as JSON what `check_arguments` returns, or the problem."""
    try:
        return {"checked": json.dumps(check_arguments(read_arguments(raw), schema, repair=repair))}
    except ToolInputError as error:
        return {"problem": str(error)}


class _TooManyStepsError(ToolInputError):
    """Checking takes longer than it may."""

    def __init__(self) -> None:
        super().__init__("the arguments are too large to be checked; give less in one call")


@dataclass
class _Check:
    """One pass over a value; problems are collected, so that the model can mend them all at once."""

    root: Schema
    left: int
    """Steps that may still be taken."""
    repair: bool
    """Whether values of another type are converted."""
    repaired: int = 0
    """Values that were."""
    problems: list[str] = field(default_factory=list)
    resolved: dict[int, tuple[Any, Schema]] = field(default_factory=dict)
    """Parts of the schema with all that they refer to, by the id of the part."""

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _TooManyStepsError

    def value(self, value: Any, schema: Schema, where: str) -> Any:
        self.step()
        if len(self.problems) >= MOST_PROBLEMS:
            return value
        if _fits_plainly(value, schema):
            return value
        schema = self._resolved(schema)
        if "anyOf" in schema or "oneOf" in schema:
            return self._any(value, schema.get("anyOf") or schema["oneOf"], where)
        for part in schema.get("allOf", ()):
            value = self.value(value, part, where)
        converted = _converted(value, _types(schema), self.repair)
        self.repaired += isinstance(value, str) and converted is not value
        value = converted
        if not _is_of(value, _types(schema)):
            self._wrong(where, f"must be {' or '.join(_types(schema))}, not {_kind(value)}")
            return value
        self._choices(value, schema, where)
        self._bounds(value, schema, where)
        if isinstance(value, dict):
            if not _SHAPE.isdisjoint(schema):
                return self.object(value, schema, where)
            self._required(value, schema, where)
        return self._list(value, schema, where) if isinstance(value, list) else value

    def _list(self, value: list[Any], schema: Schema, where: str) -> list[Any]:
        first: Sequence[Schema] = schema.get("prefixItems", ())
        rest = schema.get("items", {})
        if rest is False and len(value) > len(first):
            self._wrong(where, f"must be of length at most {len(first)}, not {len(value)}")
            return value
        inner = [*first, *[rest if isinstance(rest, Mapping) else {}] * (len(value) - len(first))]
        checked = [
            self.value(item, one, _inside(where, f"[{i}]"))
            for i, (item, one) in enumerate(zip(value, inner, strict=False))
        ]
        if schema.get("uniqueItems") is True:
            seen: set[object] = set()
            for item in checked:
                same = isinstance(item, bool), _frozen(item)
                if same in seen:
                    self._wrong(where, f"must have no item twice, and has {_shown(item)} more than once")
                    break
                seen.add(same)
        return checked

    def object(self, value: dict[str, Any], schema: Schema, where: str) -> dict[str, Any]:
        schema = self._resolved(schema)
        properties: Schema = schema.get("properties", {})
        patterns: Schema = schema.get("patternProperties", {})
        required: Sequence[str] = schema.get("required", ())
        extra = schema.get("additionalProperties", False)
        checked: dict[str, Any] = {}
        for key, item in value.items():
            if len(self.problems) >= MOST_PROBLEMS:
                break  # a hint for each of a million keys would take minutes and be many times their size
            self.step()
            place = _inside(where, f".{key}" if where else key)
            matching = [inner for pattern, inner in patterns.items() if re.search(pattern, key)]
            if key not in properties and matching:
                checked[key] = self.value(item, {"allOf": matching}, place)
            elif key not in properties and not isinstance(extra, Mapping) and extra is not True:
                hint = f"{did_you_mean(key, properties)} (there are: {', '.join(properties) or 'none'})"
                self.problems.append(f"unknown parameter {place!r}{hint}")
            elif self.repair and item is None and key not in required and not self._nullable(properties.get(key, {})):
                self.repaired += 1
            else:
                inner = properties.get(key, extra if isinstance(extra, Mapping) else {})
                checked[key] = self.value(item, inner, place)
        self._required(value, schema, where)
        return checked

    def _required(self, value: dict[str, Any], schema: Schema, where: str) -> None:
        for key in dict.fromkeys(schema.get("required", ())):
            if key not in value:
                place = _inside(where, f".{key}" if where else key)
                self.problems.append(f"missing parameter {place!r}")

    def _any(self, value: Any, branches: Sequence[Schema], where: str) -> Any:
        """Return the first branch that takes the value as it is, else the first that takes it converted."""
        tried: list[tuple[Any, list[str], int]] = []
        before = self.repaired, self.problems
        for branch in branches:
            self.repaired, self.problems = before[0], []
            result = self.value(value, branch, where)
            tried.append((result, self.problems, self.repaired))
        self.repaired, self.problems = before
        fitting = [(result, repaired) for result, problems, repaired in tried if not problems]
        if not fitting:
            _, fewest, _ = min(tried, key=lambda each: len(each[1]))
            self.problems += fewest
            return value
        same = (each for each in fitting if type(each[0]) is type(value))
        result, self.repaired = next(same, fitting[0])
        return result

    def _choices(self, value: Any, schema: Schema, where: str) -> None:
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if choices is not None and not any(_same(value, choice) for choice in choices):
            listed = ", ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            self._wrong(where, f"must be one of {listed}, not {_shown(value)}")

    def _bounds(self, value: Any, schema: Schema, where: str) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        size = len(value) if isinstance(value, str | list) else None
        items = isinstance(value, list)
        rules = (
            (number, "minimum", lambda bound: value >= bound, "at least"),
            (number, "maximum", lambda bound: value <= bound, "at most"),
            (number, "exclusiveMinimum", lambda bound: value > bound, "greater than"),
            (number, "exclusiveMaximum", lambda bound: value < bound, "less than"),
            (size is not None, "minItems" if items else "minLength", lambda n: size >= n, "of length at least"),
            (size is not None, "maxItems" if items else "maxLength", lambda n: size <= n, "of length at most"),
            (isinstance(value, str), "pattern", lambda p: re.search(p, value), "text that matches"),
        )
        for applies, name, holds, words in rules:
            if applies and name in schema and not holds(schema[name]):
                self._wrong(where, f"must be {words} {schema[name]}, not {_shown(value)}")

    def _nullable(self, schema: Schema) -> bool:
        schema = self._resolved(schema)
        branches = schema.get("anyOf") or schema.get("oneOf")
        if branches:
            return any(self._nullable(branch) for branch in branches)
        return not _types(schema) or "null" in _types(schema)

    def _resolved(self, schema: Schema | bool) -> Schema:
        if isinstance(schema, bool):
            return {} if schema else {"enum": []}
        if id(schema) not in self.resolved:
            self.resolved[id(schema)] = schema, self._whole(schema)  # which keeps the part, and with it its id
        return self.resolved[id(schema)][1]

    def _whole(self, schema: Schema) -> Schema:
        """Return a part of the schema with all that it refers to."""
        for _ in range(MOST_REFERENCES):
            if "$ref" not in schema:
                return self._folded(schema) if "allOf" in schema else schema
            definition: Any = self.root
            for part in schema["$ref"].removeprefix("#/").split("/"):
                definition = definition[part]
            schema = {**definition, **{key: value for key, value in schema.items() if key != "$ref"}}
        raise RecursionError

    def _folded(self, schema: Schema) -> Schema:
        """Return the parts of an allOf as one schema; what two of them say of the same stays a part."""
        folded = {key: value for key, value in schema.items() if key != "allOf"}
        also: list[Schema] = []
        for part in map(self._resolved, schema["allOf"]):
            for key, value in part.items():
                if key not in folded:
                    folded[key] = value
                elif key == "properties":
                    both = folded[key].keys() & value.keys()
                    shared = {name: {"allOf": [folded[key][name], value[name]]} for name in both}
                    folded[key] = {**folded[key], **value, **shared}
                elif key == "patternProperties":
                    folded[key] = {**folded[key], **value}
                elif key == "required":
                    folded[key] = [*folded[key], *value]
                elif key == "allOf":
                    also += value
                elif key not in _SHAPE and folded[key] != value:
                    also.append({key: value})
        return {**folded, "allOf": also} if also else folded

    def _wrong(self, where: str, what: str) -> None:
        self.problems.append(f"parameter {where!r} {what}")


def _fits_plainly(value: Any, schema: Schema | bool) -> bool:
    """Whether the schema asks for one plain type alone and the value has it, as most do: no rule need be looked for."""
    if not isinstance(schema, dict) or not schema.keys() <= _PLAIN:
        return False
    kind = schema.get("type")
    return isinstance(kind, str) and kind in _PLAIN_TYPES and _is_of(value, (kind,))


def _is_plain(arguments: dict[str, Any], schema: Schema) -> bool:
    """Whether each argument is known and fits plainly, and none is missing: so it is in most calls."""
    properties = schema.get("properties", {})
    return (
        schema.keys() <= _PLAIN_OBJECT
        and all(key in properties and _fits_plainly(item, properties[key]) for key, item in arguments.items())
        and all(key in arguments for key in schema.get("required", ()))
    )


def _types(schema: Schema) -> tuple[str, ...]:
    kind = schema.get("type", ())
    return (kind,) if isinstance(kind, str) else tuple(kind)


def _is_of(value: Any, types: tuple[str, ...]) -> bool:
    if isinstance(value, bool):  # a boolean is an int to Python, but not to JSON
        return not types or "boolean" in types
    return not types or any(isinstance(value, TYPES.get(name, (object,))) for name in types)


def _converted(value: Any, types: tuple[str, ...], repair: bool) -> Any:
    if _is_of(value, types):
        return value
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return int(value)
    if repair and isinstance(value, str):
        try:
            read = read_bounded(value.strip().lower() if "boolean" in types else value)
        except ValueError:
            return value
        return _converted(read, types, repair) if not isinstance(read, str) and read is not None else value
    return value


def _same(value: Any, choice: Any) -> bool:
    return bool(value == choice) and isinstance(value, bool) == isinstance(choice, bool)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, kinds in TYPES.items() if isinstance(value, kinds)), type(value).__name__)


def _frozen(value: Any) -> object:
    """Return what stands for a value in a set; numbers as texts, since many can be chosen that have one hash."""
    if isinstance(value, dict):
        return frozenset((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, int | float):
        whole = int(value) if isinstance(value, int) or value.is_integer() else value
        return float, repr(whole)
    return value


def _inside(where: str, part: str) -> str:
    """Return the place of a part; of a long one the beginning, since each part of it has its place again."""
    place = where + part[:PLACE]
    return place if len(place) <= PLACE else place[:PLACE] + "…"


def _shown(value: Any) -> str:
    text = ""
    for piece in json.JSONEncoder(ensure_ascii=False, default=str).iterencode(value):
        text += piece[: SHOWN + 1]
        if len(text) > SHOWN:
            return text[:SHOWN] + "…"
    return text


# ------------------------------------------------------------------------------------------------- Running calls

MOST_CALLS = 256
"""Calls of one turn that are executed."""
AT_ONCE = 100
"""Calls that are answered, without being executed, before others get a turn."""
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
    repaired: int = 0
    """Values of its arguments that were converted."""


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
    repair: bool = False,
) -> list[ToolOutcome]:
    """Run each call once and give the answers in the order of `calls`.

    Neighbours that are `parallel` run together; a tool that is not waits for those before it and holds up
    those after it. `tool_timeout` is seconds for each call, `repair` as in `checked_arguments`.
    """

    def answer(call: _Call) -> Coroutine[Any, Any, ToolOutcome]:
        return _answer(call, toolkit, runtime, turn, tool_timeout, repair)

    async def execute() -> list[ToolOutcome]:
        outcomes: list[ToolOutcome] = []
        for batch in _batches([_read(call, toolkit, turn, i) for i, call in enumerate(calls[:MOST_CALLS])]):
            outcomes += await _together(list(map(answer, batch)))
        for i in range(MOST_CALLS, len(calls)):
            outcomes.append(await answer(replace(_read(calls[i], toolkit, turn, i), problem=TOO_MANY)))
            if i % AT_ONCE == 0:
                await asyncio.sleep(0)
        return outcomes

    return await runtime.at_home(execute())


TOO_MANY = f"this call was not executed: a turn may make {MOST_CALLS} calls at most"


def _read(call: Mapping[str, Any], toolkit: Toolkit, turn: int, position: int) -> _Call:
    """Return a call, with defaults for what the model has left out or written wrongly."""
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
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if task.done() and task.exception() is not None]
        return [task.result() for task in failed or tasks]
    finally:
        await end_tasks(tasks)


async def _answer(
    call: _Call, toolkit: Toolkit, runtime: ToolRuntime, turn: int, tool_timeout: float | None, repair: bool
) -> ToolOutcome:
    began = time.perf_counter()
    arguments: Mapping[str, Any] | str = _written(call.raw)
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
        error = ToolError(turn, call.name, _written(call.raw), detail, content)
    seconds = time.perf_counter() - began
    return ToolOutcome(call.id, call.name, arguments, capped(content, RESULT_LIMIT), error, seconds, repaired)


async def run_tool(tool: Tool, args: dict[str, Any], runtime: ToolRuntime, timeout: float | None) -> str:
    """One call with checked arguments, within the smaller of `timeout` and the tool's own."""
    if tool.on_sandbox:
        await runtime.sandbox_for_agent()
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
        runtime.acts += tool.on_sandbox
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
    if isinstance(error, ToolInputError | ToolFailedError | HermesRLError):
        raise error
    if isinstance(error, OSError) and error.errno in OUT_OF_DESCRIPTORS:
        raise SandboxFailure(f"tool {tool.name!r}: this machine has no descriptors left ({error})") from error
    raise ToolFailedError(f"tool {tool.name!r} failed: {describe(error)}", f"{type(error).__name__}: {error}")


def _written(raw: object) -> str:
    return raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False, default=str)
