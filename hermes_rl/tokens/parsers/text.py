"""Reading a turn's text: reasoning, quoted passages, blocks between two tags, and values of arguments.

Owns the reading that several formats share. A format in the style of XML has no types of its own, so the tool's schema
tells the type of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hermes_rl.tokens.parsers.base import ParsedCall, Status, Tools, decode, loads, of_object

_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_QUOTES = ("`", '"', "'", "“", "‘", "«")
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def without_reasoning(text: str, *, prefilled: bool = False) -> tuple[str | None, str]:
    """Split off the reasoning at the beginning; returns it and the rest.

    `prefilled` says that the prompt has opened the reasoning. Where nothing closes it, the whole text is reasoning.
    """
    for opening, closing in _THINKING:
        opened = text.lstrip().startswith(opening)
        if not opened and not prefilled and not _closes_first(text, opening, closing):
            continue
        thought = text.lstrip()[len(opening) :] if opened else text
        if closing not in thought:
            if opened or opening == _THINKING[0][0]:
                return thought.strip(), ""
            continue
        thought, _, rest = thought.partition(closing)
        return thought.strip(), rest.lstrip("\n")
    return None, text


def _closes_first(text: str, opening: str, closing: str) -> bool:
    """Whether a tag is closed that was not opened here: the prompt opened it."""
    end = text.find(closing)
    return end >= 0 and not 0 <= text.find(opening) < end and "`" not in text[:end]


def quoted(before: str, after: str) -> bool:
    """Whether a passage between two texts is quoted: in code, behind a quotation mark, or inside of reasoning."""
    if any(before.count(opening) > before.count(closing) for opening, closing in _THINKING):
        return True
    if before.count("```") % 2:
        return True
    line = before.rpartition("\n")[2]
    if line.lstrip().startswith(">") or line.endswith(_QUOTES):
        return True
    return bool(line.replace("```", "").count("`") % 2) and "`" in after.partition("\n")[0]


def openings(text: str, opening: str, read: Callable[[int], tuple[ParsedCall, int]]) -> tuple[str, list[ParsedCall]]:
    """Read a call at each `opening` that is not quoted; returns the text without the blocks, and the calls.

    `read` gets the place behind an opening and returns the call and the place behind the block.
    """
    calls: list[ParsedCall] = []
    content: list[str] = []
    done = looked = 0
    while (found := text.find(opening, looked)) >= 0:
        looked = found + len(opening)
        if quoted(text[done:found], text[looked:]):
            continue
        call, end = read(looked)
        content.append(text[done:found])
        calls.append(call)
        done = looked = max(end, looked)
    content.append(text[done:])
    return tidy(content, bool(calls)), calls


def tidy(pieces: list[str], called: bool) -> str:
    """Join the text around calls, without the blank lines that set them apart; a text without calls stays as it is."""
    return "".join(pieces) if not called else "\n".join(piece.strip() for piece in pieces if piece.strip())


def json_block(text: str, start: int, closing: str) -> tuple[ParsedCall, int]:
    """Read a call from ``{…}`` up to a closing tag; a closing tag inside of a JSON text does not end it."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = decode(text, begin)
    except ValueError:
        return _broken(text, start, closing)
    place = text.find(closing, end)
    if place < 0:
        return ParsedCall(text[start:].strip(), Status.UNCLOSED), len(text)
    raw = text[start:place].strip()
    if text[end:place].strip():
        return ParsedCall(raw, Status.INVALID_JSON), place + len(closing)
    return of_object(raw, value), place + len(closing)


def _broken(text: str, start: int, closing: str) -> tuple[ParsedCall, int]:
    place = text.find(closing, start)
    if place < 0:
        return ParsedCall(text[start:].strip(), Status.UNCLOSED), len(text)
    return ParsedCall(text[start:place].strip(), Status.INVALID_JSON), place + len(closing)


def typed(tools: Tools | None, tool: str, name: str, text: str) -> Any:
    """Return an argument's value in the type of its schema, or the text itself where that is impossible or unknown."""
    allowed = _allowed(_schema(tools, tool, name))
    if not allowed or allowed == {"string"}:
        return text
    try:
        value = loads(text.lower() if text in ("True", "False", "None") else text)
    except ValueError:
        return text
    if isinstance(value, str):
        return text
    return value if "string" not in allowed or any(_is(value, kind) for kind in allowed) else text


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool))


def _schema(tools: Tools | None, tool: str, name: str) -> Mapping[str, Any]:
    for entry in tools or ():
        function = entry.get("function", entry)
        if isinstance(function, Mapping) and function.get("name") == tool:
            properties = (function.get("parameters") or {}).get("properties") or {}
            found = properties.get(name)
            return found if isinstance(found, Mapping) else {}
    return {}


def _allowed(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; the set is empty where it names none."""
    given = schema.get("type")
    found = {given} if isinstance(given, str) else set(given) if isinstance(given, list | tuple) else set()
    for branch in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        found |= _allowed(branch) if isinstance(branch, Mapping) else set()
    if not found and schema.get("enum"):
        found = {kind for kind in _TYPES for value in schema["enum"] if _is(value, kind)}
    return found
