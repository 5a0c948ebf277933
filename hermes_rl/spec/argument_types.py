"""Types of reward arguments, by the names that annotations use: what a value must be, from a spec or from a row.

`hermes_rl.spec.templates.coerce` checks a value against them. Rewards import them for type checkers only, so that
their processes need not load pydantic.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Len
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationInfo,
)
from typing_extensions import TypedDict

from hermes_rl.spec.json_schema import CompiledSchema, InvalidSchemaError
from hermes_rl.spec.section import EnvText, FileText, PathText, SystemText, to_plain, wrong
from hermes_rl.spec.sections.common import FileMode
from hermes_rl.spec.sections.rewards import Turn
from hermes_rl.values import read_json

_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)  # to make one takes milliseconds
_CLOSED = ConfigDict(extra="forbid", coerce_numbers_to_str=True, hide_input_in_errors=True)


def _check_pattern(value: str) -> str:
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise wrong(f"invalid regular expression: {error}") from None
    return value


def _check_schema(value: dict[str, Any]) -> dict[str, Any]:
    try:
        CompiledSchema(value).check()
    except InvalidSchemaError as error:
        raise wrong(f"invalid JSON Schema: {error}") from None
    return value


def _parse_object(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return read_json(value) if value.strip() else {}
    except ValueError as error:
        raise wrong(f"expected a JSON object: {error}") from None


Pattern = Annotated[str, AfterValidator(_check_pattern)]
"""A regular expression of Python's `re`."""
JsonSchema = Annotated[dict[str, Any], AfterValidator(_check_schema)]
Letter = Annotated[str, StringConstraints(pattern="^[A-Za-z]$")]
Count = Annotated[int, Field(ge=1)]
Finite = Annotated[float, AllowInfNan(False)]
Arguments = Annotated[dict[str, Any], BeforeValidator(_parse_object)]
"""Arguments of a tool call; JSON text is read."""


class _WrittenCall(TypedDict):
    __pydantic_config__ = _CLOSED  # type: ignore[misc]
    name: str
    args: NotRequired[Arguments | None]
    arguments: NotRequired[Arguments | None]


def _read_call(value: Any) -> dict[str, Any]:
    call = _adapter(_WrittenCall).validate_python(value)
    argument_maps = [call[key] for key in ("args", "arguments") if call.get(key) is not None]
    if len(argument_maps) > 1:
        raise wrong("`args` and `arguments` are two names of the same; give one")
    return {"name": call["name"], "args": argument_maps[0] if argument_maps else {}}


ExpectedCall = Annotated[dict[str, Any], BeforeValidator(_read_call)]
"""A tool call: `name`, and `args` (also called `arguments`), which become `args`."""


def _octal_mode(value: Any) -> Any:
    return _adapter(FileMode).validate_python(value) if isinstance(value, str) else value


_File = TypedDict(
    "_File",
    {
        "to": PathText,
        "content": NotRequired[FileText | bytes | None],
        "from": NotRequired[str | None],
        "mode": NotRequired[Annotated[int, BeforeValidator(_octal_mode)] | None],
    },
)
_File.__pydantic_config__ = _CLOSED  # type: ignore[attr-defined]


def _read_file_entry(value: Any) -> dict[str, Any]:
    file = _adapter(_File).validate_python(value)
    fields = {key: each for key, each in file.items() if each is not None}  # tables have all keys in each row
    if ("content" in fields) == ("from" in fields):
        raise wrong("a file has either `content` or `from`")
    return fields


PlacedFile = Annotated[dict[str, Any], BeforeValidator(_read_file_entry)]
"""A file to put into a sandbox: `to`, either `content` or `from`, and `mode`."""


def _read_turn(value: Any, info: ValidationInfo) -> dict[str, Any]:
    turn: dict[str, Any] = to_plain(Turn.model_validate(value, strict=False, context=info.context).model_dump())
    return {key: each for key, each in turn.items() if each is not None}


GoldTurn = Annotated[dict[str, Any], BeforeValidator(_read_turn)]
"""A turn as `solution.turns` has them."""


def _read_part(value: Any, info: ValidationInfo) -> dict[str, Any]:
    return _read_file_entry(value) if isinstance(value, Mapping) and "to" in value else _read_turn(value, info)


ReferencePart = Annotated[dict[str, Any], BeforeValidator(_read_part)]
"""A file to put into a sandbox, or a gold turn."""


def _tool_schema(value: Any) -> Any:
    tool = value.get("function", value) if isinstance(value, Mapping) else value
    parameters = tool.get("parameters") if isinstance(tool, Mapping) else None
    if not isinstance(parameters, Mapping) or not TOOL_NAME.fullmatch(str(tool.get("name"))):
        raise wrong("a tool is a mapping of `name` (letters, digits, _ and -), `description` and `parameters`")
    return tool


def _require_distinct(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [tool["name"] for tool in tools]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise wrong(f"two tools are named {twice!r}; rename one")
    return tools


def _require_usable(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for tool in tools:
        _check_schema(dict(tool["parameters"]))
    return tools


TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
ToolSchemas = Annotated[
    list[Annotated[dict[str, Any], BeforeValidator(_tool_schema)]], AfterValidator(_require_distinct)
]
"""Tools as `tools[].schemas` describes them."""
CheckedToolSchemas = Annotated[ToolSchemas, AfterValidator(_require_usable)]
"""Tools whose arguments are checked by their schemas."""


Role = Literal["system", "user", "assistant", "tool"]


class _Function(TypedDict):
    name: str
    arguments: NotRequired[str | dict[str, Any] | None]


class _ChatCall(TypedDict):
    id: NotRequired[str | None]
    type: NotRequired[Literal["function"] | None]
    function: _Function


ChatCalls = list[_ChatCall]


class _ChatMessage(TypedDict):
    __pydantic_config__ = _CLOSED  # type: ignore[misc]
    role: Role
    content: NotRequired[str | list[dict[str, Any]] | None]
    name: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[_ChatCall] | None]
    tool_call_id: NotRequired[str | None]


def _read_message(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping) and "role" not in value and {"from", "value"} <= value.keys():
        raise wrong(SHAREGPT)
    message = _adapter(_ChatMessage).validate_python(value)
    # Tables have all keys in each row, and servers refuse an empty list of calls.
    fields = {key: each for key, each in message.items() if each is not None and (key != "tool_calls" or each)}
    if "content" not in fields and "tool_calls" not in fields:
        raise wrong("a message has `content`, or calls of tools")
    for part in message.get("content") or () if isinstance(message.get("content"), list) else ():
        if part.get("type") == "text" and not isinstance(part.get("text"), str):
            raise wrong("a part of type text has `text`")
    if "tool_calls" in fields:
        fields["tool_calls"] = [_chat_call(call) for call in message["tool_calls"] or ()]
    return {"role": fields["role"], "content": None, **fields}


def _chat_call(call: _ChatCall) -> dict[str, Any]:
    """Return a call with its arguments as text, as servers take them."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": text}}


SHAREGPT = (
    "this is a message of ShareGPT's form, {from, value}; a message is {role, content}: turn them into such in a "
    "derived column (`dataset.columns`)"
)
ChatMessage = Annotated[dict[str, Any], BeforeValidator(_read_message)]
ChatMessages = Annotated[list[ChatMessage], Len(1)]
"""A conversation as the chat API has it, of one message or more; the types of parts are the server's business."""
ARGUMENT_TYPES: Mapping[str, Any] = {
    "SystemText": SystemText,
    "EnvText": EnvText,
    "FileText": FileText,
    "PathText": PathText,
    "Pattern": Pattern,
    "JsonSchema": JsonSchema,
    "Letter": Letter,
    "Count": Count,
    "Finite": Finite,
    "ExpectedCall": ExpectedCall,
    "PlacedFile": PlacedFile,
    "GoldTurn": GoldTurn,
    "ReferencePart": ReferencePart,
}
"""What annotations of shipped rewards may name besides Python's types."""
BY_FUNCTION: Mapping[str, Mapping[str, Any]] = {"file_matches": {"path": PathText, "content": FileText}}
"""Argument types of shipped rewards whose source does not declare them. Declaring them would change the source, and a
run recorded with such a reward could not resume: the sandbox that the reward reads no longer exists."""
