"""A model's turn as a parser gives it back.

Owns the types, and the making of calls: in every format a call has a name and an object of arguments, whatever way the
model wrote them. A parser never raises; each block that looks like a call becomes a `ParsedCall` with a status.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn, Protocol

Tools = Sequence[Mapping[str, Any]]


class Status(StrEnum):
    """The state of a block that looks like a call; only a call that is `OK` is executed."""

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
        """The words by which the model learns what is wrong; None where nothing is."""
        return None if self.status is Status.OK else f"this tool call cannot be executed: {WORDS[self.status]}"


@dataclass(frozen=True, slots=True)
class Parsed:
    """A turn: its text, its reasoning (None where it has none) and its calls in order."""

    content: str
    reasoning: str | None = None
    calls: list[ParsedCall] = field(default_factory=list)


class Parser(Protocol):
    """One format of tool calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that open or close something. Where a tokenizer has a token for one, only that token counts."""
        ...

    def calls(self, text: str, tools: Tools | None) -> tuple[str, list[ParsedCall]]:
        """Return the text without its calls, and the calls. The text holds no reasoning."""
        ...


def made(raw: str, name: object, arguments: object, identity: str | None = None) -> ParsedCall:
    """Make a call from a name and arguments in any form: an object, its JSON as a text, or nothing."""
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
    """Make a call from ``{"name": …, "arguments" | "parameters": …}``."""
    if not isinstance(value, Mapping):
        return ParsedCall(raw, Status.MALFORMED)
    identity = value.get("id")
    arguments = value["arguments"] if "arguments" in value else value.get("parameters")
    return made(raw, value.get("name"), arguments, identity if isinstance(identity, str) else None)


def loads(text: str) -> Any:
    """Read JSON, with line breaks in its texts as models write them, and without NaN; raises ValueError."""
    value, end = decode(text, skip_blanks(text, 0))
    if text[end:].strip():
        raise ValueError("something follows")
    return value


def decode(text: str, start: int) -> tuple[Any, int]:
    """Read the JSON value that begins at `start`; returns it and its end. Raises ValueError."""
    try:
        return _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def skip_blanks(text: str, start: int) -> int:
    """Return the place of the first character from `start` on that is no blank."""
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant)
