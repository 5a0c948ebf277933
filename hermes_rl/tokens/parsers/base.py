"""Parse a turn of the model: from token ids to text, reasoning and tool calls.

In every format a call has a name and an object of arguments, regardless of the model's notation. A parser never raises:
each block that looks like a call becomes a `ParsedCall` with a status.
"""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, NoReturn, Protocol

from hermes_rl.spec.json_schema import PYTHON_TYPES, CompiledSchema, is_of
from hermes_rl.tokens.texts import stand_in
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.values import UnwantedValueError, read_value, too_deep

# ---------------------------------------------------------------------------- Parsing shared by several formats

_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’", "«": "»", "„": "“"}
_OPENERS = " \t\n([{—-:"
"""Characters that may precede an opening quotation mark."""
_FENCE = "```"
_UNOPENED = re.compile(r'<function=|\{\s*+"name"\s*+:|</?+arg_(?:key|value)>')
"""Starts of calls after their opening."""


def without_reasoning(text: str, *, prefilled: bool = False) -> tuple[str | None, str]:
    """Return the reasoning at the start of a text, and the rest.

    `prefilled` is True if the prompt has opened the reasoning. If nothing closes it, the whole text is reasoning.
    """
    for opening, closing in _THINKING:
        opened = text.lstrip().startswith(opening)
        end = text.find(closing)
        # A tag that is closed and was not opened here was opened by the prompt.
        closes = end >= 0 and not 0 <= text.find(opening) < end and "`" not in text[:end]
        if not opened and not prefilled and not closes:
            continue
        thought = text.lstrip()[len(opening) :] if opened else text
        if closing not in thought:
            if opened or opening == _THINKING[0][0]:
                return thought.strip(), ""
            continue
        thought, _, rest = thought.partition(closing)
        return thought.strip(), rest.lstrip("\n")
    return None, text


class Quotes:
    """Determine which blocks of a text are quoted, in order; each character is scanned once.

    A block is quoted if it is between two marks: between backticks or quotation marks on one line, or between fences.
    It is quoted too in reasoning, and on a line that starts with ``>``.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.forget_before(0)

    def forget_before(self, position: int) -> None:
        """Forget the text before this position: it cannot quote later text."""
        self._start = self._scan_end = position
        self._thoughts, self._fences = [0] * len(_THINKING), 0
        self._ticks, self._first = 0, ""

    def quoted(self, start: int, end: int) -> bool:
        """Return True if the block between these positions is quoted."""
        return self.certain(start) or bool((delimiter := self.opened(start)) and self.closed(end, delimiter))

    def certain(self, start: int) -> bool:
        """Return True if a block that starts here is quoted for any end position."""
        self._see(start)
        return any(thought > 0 for thought in self._thoughts) or self._first == ">"

    def opened(self, start: int) -> str:
        """Return the mark that closes a quotation open here; empty if none is open. Call it after `certain`."""
        if self._fences % 2:
            return _FENCE
        if self._ticks % 2:
            return "`"
        before = self._text[max(self._start, start - 2) : start]
        # A mark after a letter or a full stop closes an earlier quotation.
        return _QUOTES.get(before[-1:], "") if before[:-1].strip(_OPENERS) == "" else ""

    def closed(self, end: int, delimiter: str) -> bool:
        """Return True if a quotation that `delimiter` closes is closed after the block that ends here."""
        if delimiter == _FENCE:
            return self._text.find(_FENCE, end) >= 0
        if delimiter == "`":
            line_end = self._text.find("\n", end)
            return self._text.find("`", end, line_end if line_end >= 0 else len(self._text)) >= 0
        return self._text.startswith(delimiter, end)

    def _see(self, position: int) -> None:
        chunk, self._scan_end = self._text[self._scan_end : position], position
        for index, (opening, closing) in enumerate(_THINKING):
            self._thoughts[index] += chunk.count(opening) - chunk.count(closing)
        self._fences += chunk.count(_FENCE)
        _, broken, line = chunk.rpartition("\n")
        if broken:
            self._ticks, self._first = 0, ""
        self._first = self._first or line.lstrip()[:1]
        self._ticks += line.count("`") - 3 * line.count(_FENCE)


Block = tuple["list[ParsedCall]", int]
"""The calls of a block, and the position after it."""


def blocks(
    text: str, find: Callable[[int], tuple[int, int] | None], read: Callable[[int], Block]
) -> Iterator[tuple[int, int, list[ParsedCall]]]:
    """Yield the start, the end and the calls of each block that is not quoted.

    Args:
        find: returns the next opening from a position on, and the position after it, or None.
        read: returns the block whose opening ends at a position.
    """
    quotes, looked = Quotes(text), 0
    while (opening := find(looked)) is not None:
        start, looked = opening
        if quotes.certain(start):
            continue
        delimiter = quotes.opened(start)
        if delimiter and text.startswith(delimiter, looked):
            continue  # only the opening is quoted
        calls, end = read(looked)
        cut = any(call.status is Status.UNCLOSED for call in calls)
        if delimiter and quotes.closed(looked if cut else end, delimiter):
            looked = looked if cut else end
            continue
        looked = end
        quotes.forget_before(looked)
        yield start, looked, calls


def openings(
    text: str, opening: str, closing: str, read: Callable[[int], tuple[ParsedCall, int]]
) -> tuple[str, list[ParsedCall]]:
    """Parse a call at each `opening` that is not quoted; return the text without the blocks, and the calls.

    `read` gets the position after an opening and returns the call and the position after the block. Text that looks
    like a call without an opening becomes a call that cannot be executed.
    """

    def find(position: int) -> tuple[int, int] | None:
        offset = text.find(opening, position)
        return (offset, offset + len(opening)) if offset >= 0 else None

    def block(position: int) -> Block:
        call, end = read(position)
        return [call], end

    calls: list[ParsedCall] = []
    content: list[str] = []

    def between(start: int, end: int) -> None:
        segment = text[start:end]
        start_match = _UNOPENED.search(segment) if closing in segment and opening not in segment else None
        closed = segment.find(closing, start_match.end()) if start_match is not None else -1
        if (
            start_match is not None
            and closed >= 0
            and not Quotes(segment).quoted(start_match.start(), closed + len(closing))
        ):
            calls.append(ParsedCall(segment[start_match.start() : closed], Status.MALFORMED))
            segment = segment[: start_match.start()] + segment[closed + len(closing) :]
        content.append(segment)

    done = 0
    for start, end, block_calls in blocks(text, find, block):
        between(done, start)
        calls += block_calls
        done = end
    between(done, len(text))
    # Without the blank lines around calls; a text without calls stays unchanged.
    return "\n".join(part.strip() for part in content if part.strip()) if calls else text, calls


def section(
    text: str, opening: str, closing: str, call_opening: str, read: Callable[[int], tuple[ParsedCall, int]]
) -> tuple[str, list[ParsedCall]]:
    """Parse the calls of the first section that is not quoted, each from its `call_opening`; the text after it is
    dropped.

    `read` gets the position after a start tag and returns the call and the position after it. A section without a call
    becomes a call that cannot be executed.
    """

    def find(position: int) -> tuple[int, int] | None:
        matches = [
            (offset, offset + len(tag)) for tag in (opening, call_opening) if (offset := text.find(tag, position)) >= 0
        ]
        return min(matches, default=None)

    def block(position: int) -> Block:
        calls: list[ParsedCall] = []
        if text.endswith(call_opening, 0, position):
            position -= len(call_opening)
        while (offset := text.find(call_opening, position)) >= 0:
            end = text.find(closing, position, offset)
            if calls and end >= 0:
                return calls, end + len(closing)
            call, position = read(offset + len(call_opening))
            calls.append(call)
        end = text.find(closing, position)
        return calls, end + len(closing) if end >= 0 else position

    for start, end, calls in blocks(text, find, block):
        following = text.find(call_opening, end)
        if following >= 0:
            calls = [*calls, *block(following)[0]]
        return text[:start].strip(), calls or [ParsedCall(text[start:].strip(), Status.MALFORMED)]
    return text, []


class Ends:
    """End positions in a text, found in one pass, so that no block searches for its end again."""

    def __init__(self, text: str, pattern: re.Pattern[str]) -> None:
        self._matches = list(pattern.finditer(text))
        self._starts = [match.start() for match in self._matches]

    def next(self, position: int) -> re.Match[str] | None:
        """Return the first match from this position on, or None."""
        index = bisect_left(self._starts, position)
        return self._matches[index] if index < len(self._matches) else None


def json_block(text: str, ends: Ends, start: int) -> tuple[ParsedCall, int]:
    """Parse a call from ``{…}`` up to a closing tag; a closing tag inside a JSON text does not end it."""
    try:
        value, end = decode(text, skip_blanks(text, start))
    except ValueError:
        value, end = None, start
    closing = ends.next(end)
    if closing is None:
        return ParsedCall(text[start:].strip(), Status.UNCLOSED), len(text)
    raw = text[start : closing.start()].strip()
    if text[end : closing.start()].strip() or end == start:
        return ParsedCall(raw, Status.INVALID_JSON), closing.end()
    return of_object(raw, value), closing.end()


Schemas = Mapping[str, CompiledSchema]
"""Schemas of tools' parameters, by tool name."""


def schemas_of(tools: Tools | None) -> Schemas:
    """Return the schemas of all tools' parameters; of two tools with one name, the first one's."""
    schemas: dict[str, CompiledSchema] = {}
    for entry in tools or ():
        function = entry.get("function", entry)
        if isinstance(function, Mapping) and isinstance(parameters := function.get("parameters"), Mapping):
            schemas.setdefault(str(function.get("name")), CompiledSchema(parameters))
    return schemas


def typed(schemas: Schemas, tool: str, name: str, text: str) -> Any:
    """Return an argument's value in the type of its schema, or the text if that is impossible or unknown."""
    allowed = schemas[tool].types_of_property(name) if tool in schemas else PYTHON_TYPES.keys()
    if allowed == PYTHON_TYPES.keys() or allowed == {"string"}:
        return text
    try:
        value = loads(text.lower() if text in ("True", "False", "None") else text)
    except ValueError:
        return text
    if isinstance(value, str):
        return text
    return value if "string" not in allowed or is_of(value, allowed) else text


# -------------------------------------------------------------------------------------- Results of a parser

Tools = Sequence[Mapping[str, Any]]


class Status(StrEnum):
    """State of a block that looks like a call; only an `OK` call is executed."""

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
    """One block as the model wrote it; `arguments` is an object if the status is OK."""

    raw: str
    status: Status
    name: str = ""
    arguments: Mapping[str, Any] | None = None
    id: str | None = None
    """The model's own id, if the format has one."""

    @property
    def problem(self) -> str | None:
        """Error message for the model, or None."""
        return None if self.status is Status.OK else f"this tool call cannot be executed: {WORDS[self.status]}"


@dataclass(frozen=True, slots=True)
class Parsed:
    """A turn: its text, its reasoning (or None) and its calls in order."""

    content: str
    reasoning: str | None = None
    calls: list[ParsedCall] = field(default_factory=list)


class Parser(Protocol):
    """One format of tool calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Opening and closing texts. If a tokenizer has a token for one, only that token counts."""

    def calls(self, text: str, tools: Tools | None) -> tuple[str, list[ParsedCall]]:
        """Return the text without its calls, and the calls. The text contains no reasoning."""


def make_call(raw: str, name: object, arguments: object, identity: str | None = None) -> ParsedCall:
    """Return a call from a name and arguments in any form: an object, its JSON as a text, or nothing."""
    if not isinstance(name, str) or not name.strip():
        return ParsedCall(raw, Status.MISSING_NAME, id=identity)
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments) if arguments.strip() else {}
        except ValueError:
            return ParsedCall(raw, Status.INVALID_JSON, name.strip(), id=identity)
    if arguments is None:
        arguments = {}
    if _NO_NAME.search(name.strip()):
        return ParsedCall(raw, Status.MALFORMED, id=identity)
    if not isinstance(arguments, Mapping) or too_deep(arguments):
        return ParsedCall(raw, Status.MALFORMED, name.strip(), id=identity)
    return ParsedCall(raw, Status.OK, name.strip(), arguments, identity)


def of_object(raw: str, value: object) -> ParsedCall:
    """Return a call from ``{"name": …, "arguments" | "parameters": …}``."""
    if not isinstance(value, Mapping):
        return ParsedCall(raw, Status.MALFORMED)
    identity = value.get("id")
    arguments = value["arguments"] if "arguments" in value else value.get("parameters")
    return make_call(raw, value.get("name"), arguments, identity if isinstance(identity, str) else None)


def loads(text: str) -> Any:
    """Parse JSON, with line breaks in its texts as models write them, and without NaN; raises ValueError."""
    value, end = decode(text, skip_blanks(text, 0))
    if text[end:].strip():
        raise ValueError("something follows")
    return value


def decode(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that starts at `start`, and its end. Raises ValueError."""
    return read_value(_DECODER, text, start)


def skip_blanks(text: str, start: int) -> int:
    """Return the position of the first character from `start` on that is not a blank."""
    blanks = _BLANKS.match(text, start)
    return blanks.end() if blanks is not None else start


def _no_constant(name: str) -> NoReturn:
    raise UnwantedValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant)
_BLANKS = re.compile(r"\s*+")
_NO_NAME = re.compile(r"[\s<>|｜{}\[\]]")
"""Characters that a tool name never contains: a tag is in the wrong position."""


# -------------------------------------------------------------------------------------- From token ids to a turn
# A model may write the letters of ``<tool_call>`` without its token, for example in prose about tools. If the tokenizer
# has a token for a marker, the bare letters get a break before parsing, which is removed from the result.

_OPENING = ("<think>", "[THINK]")
REASONING = (*_OPENING, "</think>", "[/THINK]")
"""Texts that open or close reasoning."""
_TAIL_CHARACTERS = 16


def parse_ids(
    parser: Parser,
    tokenizer: Tokenizer,
    completion: Sequence[int],
    prompt: Sequence[int],
    stops: Sequence[int],
    tools: Tools | None,
) -> Parsed:
    """Parse a turn; never raises. The end of `prompt` is enough: it shows if the prompt has opened reasoning.

    Control tokens at the end are not part of the turn: a server may stop at other tokens than the template's, because a
    model's generation_config.json can name several.
    """
    ended = list(completion)
    meaningless = _other_controls(tokenizer, parser.markers)
    while ended and (ended[-1] in stops or tokenizer.decode([ended[-1]]) in meaningless):
        ended.pop()
    text, strip_breaks = marked_text(tokenizer, ended, parser.markers)
    parsed = parse_text(parser, text, tools, prefilled=opens_reasoning(tokenizer, prompt))
    controls = _control_ids(tokenizer, parser.markers)
    tokens = [controls[token] for token in controls.keys() & set(ended)]
    return strip_breaks(
        replace(parsed, calls=[_without_tokens(call, tokens) for call in parsed.calls]) if tokens else parsed
    )


def _without_tokens(call: ParsedCall, tokens: Collection[str]) -> ParsedCall:
    """Return the call; one with a control token in a value is malformed, since a value is text."""
    written = "" if call.arguments is None else json.dumps([call.name, call.arguments], ensure_ascii=False)
    if any(json.dumps(token, ensure_ascii=False)[1:-1] in written for token in tokens):
        return replace(call, status=Status.MALFORMED, arguments=None)
    return call


def parse_text(parser: Parser, text: str, tools: Tools | None = None, *, prefilled: bool = False) -> Parsed:
    """Parse a turn from its text, which has no control tokens at its end."""
    reasoning, rest = without_reasoning(text, prefilled=prefilled)
    content, calls = parser.calls(rest, tools)
    return Parsed(content, reasoning, calls)


@functools.lru_cache(maxsize=16)
def _other_controls(tokenizer: Tokenizer, markers: tuple[str, ...]) -> frozenset[str]:
    return tokenizer.control - {*markers, *REASONING}


@functools.lru_cache(maxsize=16)
def _marker_ids(tokenizer: Tokenizer, markers: tuple[str, ...]) -> Mapping[int, str]:
    """Return the markers that have a token in the tokenizer, by token id."""
    special = [marker for marker in (*markers, *REASONING) if marker in tokenizer.control or marker in tokenizer.markup]
    return {tokenizer.encode(token_text)[0]: token_text for token_text in special}


@functools.lru_cache(maxsize=16)
def _control_ids(tokenizer: Tokenizer, markers: tuple[str, ...]) -> Mapping[int, str]:
    """Return the control tokens and the markers that have a token in the tokenizer, by token id."""
    return {**{tokenizer.encode(token)[0]: token for token in tokenizer.control}, **_marker_ids(tokenizer, markers)}


def marked_text(
    tokenizer: Tokenizer, ids: Sequence[int], markers: Sequence[str]
) -> tuple[str, Callable[[Parsed], Parsed]]:
    """Return the text with breaks, and the function that removes them from a result."""
    text, count = tokenizer.decode(ids), Counter(ids)
    markers_by_token = {**_marker_ids(tokenizer, tuple(markers))}
    markers_by_token |= {
        token: marker for token, marker in _control_ids(tokenizer, tuple(markers)).items() if token in count
    }
    special = list(markers_by_token.values())
    if all(text.count(marker) == count[token] for token, marker in markers_by_token.items()):
        return text, lambda parsed: parsed
    word = stand_in(text)
    chunks: list[str] = []
    start = 0
    for index, token in enumerate(ids):
        if token in markers_by_token:
            chunks += [_with_broken_markers(tokenizer.decode(ids[start:index]), special, word), markers_by_token[token]]
            start = index + 1
    chunks.append(_with_broken_markers(tokenizer.decode(ids[start:]), special, word))
    marked = "".join(chunks)
    return marked, partial(_remove_breaks, word=word) if word in marked else lambda parsed: parsed


def opens_reasoning(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Return True if a prompt ends inside reasoning."""
    return tokenizer.decode(list(prompt[-_TAIL_CHARACTERS:])).rstrip().endswith(_OPENING) if len(prompt) else False


def _with_broken_markers(text: str, markers: Sequence[str], word: str) -> str:
    for marker in markers:
        text = text.replace(marker, marker[0] + word + marker[1:])
    return text


def _remove_breaks(parsed: Parsed, word: str) -> Parsed:
    names = ("raw", "name", "arguments", "id")
    calls = [
        replace(call, **{name: _remove_word(getattr(call, name), word) for name in names}) for call in parsed.calls
    ]
    return Parsed(_remove_word(parsed.content, word), _remove_word(parsed.reasoning, word), calls)


def _remove_word(value: Any, word: str) -> Any:
    if isinstance(value, str):
        return value.replace(word, "")
    if isinstance(value, Mapping):
        return json.loads(json.dumps(value, ensure_ascii=False).replace(word, ""))
    return value
