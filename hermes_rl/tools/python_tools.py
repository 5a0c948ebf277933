"""Tools that are Python code of the user: functions (`tools: [{python: file.py:fn}]`) and methods of the state object.

They run on the host, in this process: sync functions in a thread, async ones on the event loop. Errors that they
raise are sent to the model. The signature and the docstring become the schema of the tool.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import FunctionType, MethodType
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python
from typing_extensions import TypedDict

from hermes_rl.errors import RunError, UserError
from hermes_rl.others_files import read_regular
from hermes_rl.plugins import did_you_mean, load_module, load_object
from hermes_rl.threads import CallThrottle
from hermes_rl.tools.base import ArgumentRule, DescribedTool, Tool, ToolInputError, ToolRuntime, as_json
from hermes_rl.values import read_json

# ---------------------------------------------------- From a signature to a schema, and from arguments to values
# Whatever pydantic can describe may be annotated: str, int, list, Optional, Literal, Enum, dataclasses, models, ….

_SECTION = re.compile(r"^\s*(args|arguments|parameters|returns|raises|yields|examples?|notes?):?\s*$", re.I)
_ARGUMENT = re.compile(r"^\s*(?::param\s+(?:\w+\s+)?)?\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")


@dataclass(frozen=True)
class Signature:
    """The parameters of a function as a JSON Schema, and how to make values of them."""

    description: str
    parameters: dict[str, Any]
    adapter: TypeAdapter[Any]

    @classmethod
    def from_function(cls, function: Callable[..., Any], name: str, *, skip_first: bool = False) -> Signature:
        """Read a function; raises `UserError` if a model could not call it. `skip_first` omits self."""
        text = inspect.getdoc(function) or ""
        if not text:
            raise UserError(
                f"tool {name!r} has no docstring; its first paragraph is the description that the model receives"
            )
        descriptions = _argument_texts(text)
        fields: dict[str, Any] = {}
        for parameter in _typed_parameters(function, name, skip_first=skip_first):
            fields[parameter.name] = _field_type(parameter, descriptions.get(parameter.name))
        # A TypedDict, since a model class would reserve names such as `schema` and `copy` for itself.
        shape = TypedDict(name, fields)  # type: ignore[misc]
        shape.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(shape)
            schema = adapter.json_schema()
        except Exception as error:
            raise UserError(f"tool {name!r}: the types cannot be described to a model: {error}") from error
        lines = text.split("\n")
        sections = (n for n, line in enumerate(lines) if _SECTION.match(line) or line.strip().startswith(":param"))
        return cls("\n".join(lines[: next(sections, len(lines))]).strip(), _remove_titles(schema), adapter)

    def values(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments as the annotated types; raises `ToolInputError`."""
        try:
            values: dict[str, Any] = self.adapter.validate_python(args)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ToolInputError("; ".join(problems)) from None
        return values


def _typed_parameters(function: Callable[..., Any], name: str, *, skip_first: bool) -> list[inspect.Parameter]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise UserError(f"tool {name!r}: an annotation cannot be resolved: {error}") from error
    parameters = list(inspect.signature(function).parameters.values())[1 if skip_first else 0 :]
    for parameter in parameters:
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY}:
            raise UserError(f"tool {name!r}: a model cannot give parameter {parameter}; name it and type it")
        if parameter.name not in hints:
            raise UserError(f"tool {name!r}: parameter {parameter.name!r} has no type")
    return [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]


def _field_type(parameter: inspect.Parameter, description: str | None) -> Any:
    extra: dict[str, Any] = {}
    optional = parameter.default is not parameter.empty
    if optional and isinstance(parameter.default, str | int | float | bool):
        extra["default"] = parameter.default
    field = Field(description=description, json_schema_extra=extra or None)
    typed: Any = Annotated[(parameter.annotation, field)]
    return typing.NotRequired[typed] if optional else typed


def _remove_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove the titles that pydantic makes of names: they cost tokens and tell a model nothing."""
    schema.setdefault("properties", {})
    for part in (schema, *schema.get("$defs", {}).values()):
        part.pop("title", None)
        for property_schema in part.get("properties", {}).values():
            property_schema.pop("title", None)
    return schema


def _argument_texts(text: str) -> dict[str, str]:
    """Return the description of each parameter in a docstring of Google's or Sphinx' style."""
    texts: dict[str, str] = {}
    inside, last = False, ""
    for line in text.split("\n"):
        if _SECTION.match(line):
            inside, last = line.strip().lower().startswith(("arg", "param")), ""
            continue
        match = _ARGUMENT.match(line)
        if match and (inside or line.strip().startswith(":param")):
            last = match.group(1)
            texts[last] = match.group(2).strip()
        elif inside and last and line.strip():
            texts[last] += " " + line.strip()
    return texts


# ----------------------------------------------------------------------------------------------------- Functions

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What OpenAI's API takes as the name of a tool."""


def _turns_of(code: Callable[..., Any]) -> CallThrottle:
    """Return the throttle of some code; all states share a method's, since each rollout creates its tools again."""
    function = getattr(code, "__func__", None)
    return CallThrottle() if function is None else _throttle_of(function)


def _signature_of(code: Callable[..., Any], name: str) -> Signature:
    """Return the signature of some code; processes make a tool for each call, and describing it takes a millisecond."""
    match code:
        case FunctionType(__closure__=None):  # caching a closure would retain its contents, such as a state
            return _signature(code, name, skip_first=False)
        case MethodType(__func__=FunctionType(__closure__=None) as function):
            return _signature(function, name, skip_first=True)
        case _:
            return Signature.from_function(code, name)


_signature = functools.lru_cache(maxsize=1024)(Signature.from_function)


@functools.lru_cache(maxsize=1024)
def _throttle_of(function: Callable[..., Any]) -> CallThrottle:
    return CallThrottle()


class CodeTool(DescribedTool):
    """A tool whose schema is the signature of Python code."""

    def __init__(self, code: Callable[..., Any], name: str) -> None:
        self.signature = _signature_of(code, name)
        super().__init__(name, self.signature.description, self.signature.parameters)
        self._turns = _turns_of(code)

    def values(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments as the annotated types, or unchanged; raises `ToolInputError`."""
        return args if self.arguments == "strict" else self.signature.values(args)


class PythonTool(CodeTool):
    """One function. The text that it returns is the answer; anything else is answered as JSON."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function = function
        name = name or str(getattr(function, "__name__", ""))
        if not TOOL_NAME.fullmatch(name):
            raise UserError(f"{name!r} cannot be the name of a tool; use letters, digits, _ and -")
        super().__init__(function, name)

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        return answer_of(await call_function(self.function, self.values(args), self._turns))


def python_tool(function: Callable[..., Any] | str, name: str | None = None, base: Path | None = None) -> Tool:
    """Return the tool of a function, or of a reference to one (relative files are below `base`)."""
    loaded = load_object(function, base) if isinstance(function, str) else function
    if not callable(loaded) or inspect.isclass(loaded):
        raise UserError(f"{function!r} is not a function, so it cannot be a tool")
    return PythonTool(loaded, name)


async def call_function(function: Callable[..., Any], values: dict[str, Any], turns: CallThrottle) -> Any:
    """Return the result of a function that may be sync or async, off the event loop where it could block."""
    if inspect.iscoroutinefunction(function):
        with _contain_exits():
            return await function(**values)
    result = await turns.call(_contain_exits()(functools.partial(function, **values)))
    if not inspect.isawaitable(result):
        return result
    with _contain_exits():
        return await result


@contextmanager
def _contain_exits() -> Iterator[None]:
    """Raise `RuntimeError` for what would end the run or the event loop where the code of a tool raises it."""
    try:
        yield
    except (UserError, RunError, KeyboardInterrupt) as error:
        raise RuntimeError(f"the tool raised {type(error).__name__}: {error}") from error


def answer_of(result: Any) -> str:
    """Return a function's result as the text that the model reads."""
    return result if isinstance(result, str) else as_json(to_jsonable_python(result, fallback=str))


# ------------------------------------------------------- Methods of the state object: ``tools: [{state: NAME}]``
# NAME is an attribute of the state, whose public methods are the tools; or a method of the state itself, which is then
# the one tool; or a list of names of such methods. Without a name, all public methods of the state are tools.


class StateTool(CodeTool):
    """One method, looked up on `runtime.state` at each call. Not parallel: calls may depend on each other."""

    parallel = False

    def __init__(self, attribute: str | None, method: Callable[..., Any], name: str) -> None:
        self._attribute = attribute
        super().__init__(method, name)

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        return answer_of(await call_function(self.method_of(runtime.state), self.values(args), self._turns))

    def method_of(self, state: object) -> Callable[..., Any]:
        """Return the method of this state."""
        owner = state if self._attribute is None else getattr(state, self._attribute)
        method: Callable[..., Any] = getattr(owner, self.name)
        return method


class DescribedStateTool(DescribedTool):
    """A tool whose schema the state has; one method of the state answers for all such tools."""

    parallel = False

    def __init__(self, schema: Mapping[str, Any], method: str, turns: CallThrottle) -> None:
        super().__init__(schema["name"], schema.get("description", ""), schema["parameters"])
        self.method = method
        self._turns = turns

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        method = functools.partial(getattr(runtime.state, self.method), self.name, args)
        return answer_of(await call_function(method, {}, self._turns))


Schemas = str | Mapping[str, str] | Sequence[Mapping[str, Any]]
"""Tools that are described: the attribute of a state that has them, a `file`, or the schemas themselves."""


def described_tools(state: object, method: str, schemas: Schemas, choice: Choice) -> tuple[Tool, ...]:
    """Return the chosen tools that `schemas` describes and the method `method` of a state answers. Raises `UserError`
    if there is no such attribute, file or method, or if it describes no tools."""
    turns = _turns_of(_get_method(state, method))
    source = f"{schemas!r} of the state {type(state).__name__}" if isinstance(schemas, str) else "what `schemas` gives"
    tool_schemas: Any = _get_attribute(state, schemas) if isinstance(schemas, str) else schemas
    if isinstance(tool_schemas, Mapping):
        source, tool_schemas = tool_schemas["file"], _read_document(tool_schemas["file"])
    if not isinstance(tool_schemas, list | tuple):
        tool_schemas = [tool_schemas]
    tool_schemas = [each.get("function", each) if isinstance(each, Mapping) else each for each in tool_schemas]
    for schema in tool_schemas:
        parameters = schema.get("parameters") if isinstance(schema, Mapping) else None
        if not isinstance(parameters, Mapping) or not TOOL_NAME.fullmatch(str(schema.get("name"))):
            raise UserError(
                f"{source} has to be a list of tools, each a mapping of `name` (letters, digits, _ and -), "
                f"`description` and `parameters`, not {schema!r:.200}"
            )
    chosen = [schema for schema in tool_schemas if choice.takes(schema["name"], None)]
    return tuple(DescribedStateTool(schema, method, turns) for schema in chosen)


@functools.lru_cache(maxsize=64)
def _read_document(file: str) -> Any:
    try:
        return read_json(read_regular(Path(file)))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON: {error}") from error


WILDCARD = set("*?[")


class Choice:
    """Which functions or methods of an entry are tools.

    Args:
        names: names or patterns, one of which a tool has; None: it has any name.
        decorated_with: the attribute that a decorator has left on it; None: none is asked for.
    """

    def __init__(self, names: Sequence[str] | None = None, decorated_with: str | None = None) -> None:
        self.decorated_with = decorated_with
        self._any = names is None
        self._patterns = [name for name in names or () if WILDCARD & set(name)]
        self._names = dict.fromkeys(name for name in names or () if not WILDCARD & set(name))
        self.seen_names: set[str] = set()
        """Names that were asked about."""

    def takes(self, name: str, code: object) -> bool:
        self.seen_names.add(name)
        is_named = self._any or name in self._names or any(fnmatchcase(name, pattern) for pattern in self._patterns)
        return is_named and (self.decorated_with is None or bool(getattr(code, self.decorated_with, False)))

    def require_met(self, source: str, tools: Sequence[object]) -> None:
        """Raise `UserError` if nothing has a name that is not a pattern, or if nothing has the mark."""
        for name in self._names:
            if name not in self.seen_names:
                raise UserError(f"{source} has no tool {name!r}{did_you_mean(name, self.seen_names)}")
        if self.decorated_with is not None and not tools:
            raise UserError(f"{source} has no function or method with {self.decorated_with!r} that could be a tool")


def state_tools(state: object, name: str | None = None, choice: Choice | None = None) -> tuple[Tool, ...]:
    """Return the tools of a state object; the same names and schemas for every state of its class."""
    choice = choice or Choice()
    owner = state if name is None else _get_attribute(state, name)
    if isinstance(owner, list | tuple):
        member = [(str(each), _get_method(state, str(each))) for each in owner]
        return tuple(StateTool(None, method, each) for each, method in member if choice.takes(each, method))
    if name is not None and inspect.isroutine(owner):
        return (StateTool(None, owner, name),) if choice.takes(name, owner) else ()
    public = list(_public_methods(owner))
    if not public:
        raise UserError(f"{name or type(state).__name__} has no public methods, so there are no tools")
    return tuple(StateTool(name, method, member) for member, method in public if choice.takes(member, method))


def functions_of(reference: str, names: Sequence[str] | None, decorated_with: str | None) -> list[str]:
    """Return references to the functions that a reference names: itself, or all public ones of `file.py:*`."""
    module_ref, _, name = reference.rpartition(":")
    if name != "*":
        return [reference]
    module, choice = load_module(module_ref), Choice(names, decorated_with)
    function_names = [
        name
        for name, function in vars(module).items()
        if inspect.isroutine(function) and getattr(function, "__module__", None) == module.__name__ and name[0] != "_"
    ]
    chosen = [f"{module_ref}:{name}" for name in function_names if choice.takes(name, getattr(module, name))]
    choice.require_met(module_ref, chosen)
    if not function_names:
        raise UserError(f"{module_ref} has no public functions, so there are no tools")
    return chosen


def tools_of_state(
    state: object,
    name: str,
    schemas: Schemas | None = None,
    arguments: ArgumentRule | None = None,
    names: Sequence[str] | None = None,
    decorated_with: str | None = None,
) -> tuple[Tool, ...]:
    """Return the tools of one entry `{state: NAME, schemas: …, arguments: …, names: …, decorated_with: …}`."""
    choice = Choice(names, decorated_with)
    tools = state_tools(state, name, choice) if schemas is None else described_tools(state, name, schemas, choice)
    choice.require_met(f"{name} of the state {type(state).__name__}", tools)
    for tool in tools:
        tool.arguments = arguments
    return tools


def _get_attribute(state: object, name: str) -> object:
    if not hasattr(state, name):
        names = {each for each in dir(state) if not each.startswith("_")}
        raise UserError(f"the state {type(state).__name__} has no {name!r}{did_you_mean(name, names)}")
    return getattr(state, name)


def _get_method(state: object, name: str) -> Callable[..., Any]:
    method = _get_attribute(state, name)
    if not callable(method):
        raise UserError(f"{name!r} of the state {type(state).__name__} is not a method")
    return method


def _public_methods(owner: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public methods with their names, in the order in which the class declares them."""
    names = [name for base in reversed(type(owner).__mro__) for name in vars(base)]
    for name in dict.fromkeys(names):
        method = inspect.getattr_static(owner, name)
        if not name.startswith("_") and isinstance(method, staticmethod | classmethod) | inspect.isfunction(method):
            yield name, getattr(owner, name)
