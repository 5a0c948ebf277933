"""What a parser makes of a model's turn.

Owns the types, and what every format has in common: a call has a name and an object of arguments, whatever way they
were written. A parser never raises; each block that looks like a call becomes a `ParsedCall` with a status.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn, Protocol

Tools = Sequence[Mapping[str, Any]]


class Status(StrEnum):
    """What became of a block that looks like a call; only `OK` is executed."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    UNCLOSED = "unclosed_block"
    """The turn ended before the block did."""
    MISSING_NAME = "missing_name"
    MALFORMED = "malformed_structure"


WORDS = {
    Status.INVALID_JSON: "its arguments are no valid JSON",
    Status.UNCLOSED: "it was not closed, so it was cut off and not executed",
    Status.MISSING_NAME: "it names no tool",
    Status.MALFORMED: "it does not have the form of a tool call",
}


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One block as the model wrote it; `arguments` is an object where the status is OK."""

    raw: str
    status: Status
    name: str = ""
    arguments: Mapping[str, Any] | None = None
    id: str | None = None
    """The model's own id, where the format has one."""

    @property
    def problem(self) -> str | None:
        """What the model is told; None where there is nothing wrong."""
        return None if self.status is Status.OK else f"this tool call cannot be executed: {WORDS[self.status]}"


@dataclass(frozen=True, slots=True)
class Parsed:
    """A turn: its text, its reasoning (None where it has none) and its calls in order."""

    content: str
    reasoning: str | None = None
    calls: list[ParsedCall] = field(default_factory=list)


class Parser(Protocol):
    """One format of tool calls."""

    markers: tuple[str, ...]
    """Texts that open or close something. Where a tokenizer has a token for one, only that token counts."""

    def calls(self, text: str, tools: Tools | None) -> tuple[str, list[ParsedCall]]:
        """The text without its calls, and the calls; reasoning was taken away before."""
        ...


def made(raw: str, name: object, arguments: object, identity: str | None = None) -> ParsedCall:
    """A call of a name and arguments in any form: an object, its JSON as a text, or nothing."""
    if not isinstance(name, str) or not name.strip():
        return ParsedCall(raw, Status.MISSING_NAME, id=identity)
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments) if arguments.strip() else {}
        except ValueError:
            return ParsedCall(raw, Status.INVALID_JSON, name.strip(), id=identity)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return ParsedCall(raw, Status.MALFORMED, name.strip(), id=identity)
    return ParsedCall(raw, Status.OK, name.strip(), arguments, identity)


def of_object(raw: str, value: object) -> ParsedCall:
    """A call of ``{"name": …, "arguments" | "parameters": …}``."""
    if not isinstance(value, Mapping):
        return ParsedCall(raw, Status.MALFORMED)
    identity = value.get("id")
    arguments = value["arguments"] if "arguments" in value else value.get("parameters")
    return made(raw, value.get("name"), arguments, identity if isinstance(identity, str) else None)


def loads(text: str) -> Any:
    """JSON, with line breaks in texts as models write them; no NaN. Raises ValueError, whatever is wrong."""
    value, end = decode(text, _skip(text, 0))
    if text[end:].strip():
        raise ValueError("something follows")
    return value


def decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and where it ends. Raises ValueError."""
    try:
        return _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _skip(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant)
