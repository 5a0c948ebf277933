"""Finding a passage in a text although a model did not copy it to the letter, and replacing it.

Owns the ways of looking, from strict to lenient. The first that finds anything decides, so that a lenient
match never competes with an exact one:

1. exactly;
2. line by line, without trailing white space;
3. line by line, without leading white space too: the replacement is moved to the indentation found;
4. line by line, with every run of white space as one space and typographic quotes and dashes as plain ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_PLAIN = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "\u00a0": " "})


class NoMatchError(Exception):
    """The passage is not there, or is there more often than it may be; the message is for the model."""


@dataclass(frozen=True)
class Span:
    """A place in a text, as offsets, and the text to put there."""

    start: int
    end: int
    text: str


def replace(text: str, old: str, new: str, *, everywhere: bool = False) -> str:
    """`text` with `old` replaced by `new`; raises `NoMatchError` unless it is there once, or `everywhere`."""
    if not old:
        raise NoMatchError("old_string is empty")
    if old == new:
        raise NoMatchError("old_string and new_string are the same: nothing would change")
    crlf = only_crlf(text)
    plain, old, new = (unix(part) if crlf else part for part in (text, old, new))
    spans = find(plain, old, new)
    if not spans:
        raise NoMatchError(f"old_string was not found in the file{_nearest(plain, old)}")
    if len(spans) > 1 and not everywhere:
        raise NoMatchError(
            f"old_string is in the file {len(spans)} times; add lines around it, or set replace_all=true"
        )
    changed = apply(plain, spans)
    return changed.replace("\n", "\r\n") if crlf else changed


def only_crlf(text: str) -> bool:
    """True where every line of a text ends as on Windows, so that it can be edited as if none did."""
    return 0 < text.count("\r\n") == text.count("\n")


def unix(text: str) -> str:
    return text.replace("\r\n", "\n")


def find(text: str, old: str, new: str) -> list[Span]:
    """Where `old` is, by the strictest way that finds it, each with what `new` is there."""
    exact = _exact(text, old, new)
    if exact:
        return exact
    for normal, reindent in ((str.rstrip, False), (str.strip, True), (_folded, True)):
        spans = _by_lines(text, old, new, normal, reindent=reindent)
        if spans:
            return spans
    return []


def apply(text: str, spans: list[Span]) -> str:
    """`text` with every span replaced; they are in order and do not overlap."""
    for span in reversed(spans):
        text = text[: span.start] + span.text + text[span.end :]
    return text


def _exact(text: str, old: str, new: str) -> list[Span]:
    spans, start = [], text.find(old)
    while start != -1:
        spans.append(Span(start, start + len(old), new))
        start = text.find(old, start + len(old))
    return spans


def _by_lines(text: str, old: str, new: str, normal: Callable[[str], str], *, reindent: bool) -> list[Span]:
    lines = text.split("\n")
    wanted = [normal(line) for line in old.removesuffix("\n").split("\n")]
    if not any(wanted):
        return []
    normals = [normal(line) for line in lines]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    spans, i, size = [], 0, len(wanted)
    while i + size <= len(lines):
        if normals[i : i + size] != wanted:
            i += 1
            continue
        put = _reindented(new, old, lines[i]) if reindent else new
        if old.endswith("\n") and i + size < len(lines):
            spans.append(Span(starts[i], starts[i + size], put))
        else:
            spans.append(Span(starts[i], starts[i + size] - 1, put.removesuffix("\n")))
        i += size
    return spans


def _reindented(new: str, old: str, found: str) -> str:
    """`new` moved as far as the first line found is from the first line of `old`."""
    have, want = _indent(old.split("\n", 1)[0]), _indent(found)
    if have == want:
        return new
    lines = new.split("\n")
    return "\n".join(want + line.removeprefix(have) if line.strip() else line for line in lines)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _folded(line: str) -> str:
    return re.sub(r"\s+", " ", line.translate(_PLAIN)).strip()


def _nearest(text: str, old: str) -> str:
    """A hint where the first line of `old` is in the text by itself."""
    first = next((line.strip() for line in old.split("\n") if line.strip()), "")
    for number, line in enumerate(text.split("\n"), 1):
        if first and first in line:
            return f"; its first line is at line {number}, but what follows differs"
    return "; read the file again and copy the passage as it is"
