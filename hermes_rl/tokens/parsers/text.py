"""Reading of a turn's text: reasoning, quoted passages, and blocks between two tags."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hermes_rl.tokens.parsers.base import ParsedCall, Status, decode, of_object

_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_QUOTES = ("`", '"', "'", "“", "‘", "«")


def without_reasoning(text: str, *, prefilled: bool = False) -> tuple[str | None, str]:
    """Reasoning at the beginning, and the rest; `prefilled`: the prompt has opened it. Unclosed: all is reasoning."""
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
    """A closing tag without an opening one: the prompt held that."""
    end = text.find(closing)
    return end >= 0 and not 0 <= text.find(opening) < end and "`" not in text[:end]


def quoted(before: str, after: str) -> bool:
    """Whether what stands between two texts is quoted: in code, behind a quotation mark, or inside of reasoning."""
    if any(before.count(opening) > before.count(closing) for opening, closing in _THINKING):
        return True
    if before.count("```") % 2:
        return True
    line = before.rpartition("\n")[2]
    if line.lstrip().startswith(">") or line.endswith(_QUOTES):
        return True
    return bool(line.replace("```", "").count("`") % 2) and "`" in after.partition("\n")[0]


def openings(text: str, opening: str, read: Callable[[int], tuple[ParsedCall, int]]) -> tuple[str, list[ParsedCall]]:
    """The text without its blocks, and a call for each `opening` that is not quoted.

    `read` gets the place behind an opening and gives the call and the place behind the block.
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
    """What stands around calls, without the blank lines that set them apart; a text without calls as it is."""
    return "".join(pieces) if not called else "\n".join(piece.strip() for piece in pieces if piece.strip())


def json_block(text: str, start: int, closing: str) -> tuple[ParsedCall, int]:
    """A call from ``{…}`` up to a closing tag. A closing tag inside of a JSON text does not end it."""
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


def between(text: str, opening: str, closing: str, start: int = 0) -> Iterator[tuple[str, bool, int]]:
    """Pieces between two tags: text, whether it was closed, where it ends."""
    while (found := text.find(opening, start)) >= 0:
        begin = found + len(opening)
        end = text.find(closing, begin)
        if end < 0:
            yield text[begin:], False, len(text)
            return
        start = end + len(closing)
        yield text[begin:end], True, start
