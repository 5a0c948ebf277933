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
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

LENIENT_CHARACTERS, LENIENT_LINES = 2 << 20, 100_000
"""Size of the largest text in which a passage is looked for that was not copied to the letter."""
MOST_ADDED = 16 << 20
"""Characters by which a text may grow at once: a short passage may be in it a million times."""

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
    count = plain.count(old)
    spans = [] if count else find_lines(plain, old, new)
    times = count or len(spans)
    if not times:
        raise NoMatchError(f"old_string was not found in the file{_nearest(plain, old)}")
    if times > 1 and not everywhere:
        raise NoMatchError(f"old_string is in the file {times} times; add lines around it, or set replace_all=true")
    added = count * (len(new) - len(old)) + sum(len(span.text) for span in spans)
    if added > MOST_ADDED:
        raise NoMatchError(f"the file would grow by {added} characters; at most {MOST_ADDED} are taken")
    changed = plain.replace(old, new) if count else apply(plain, spans)
    return changed.replace("\n", "\r\n") if crlf else changed


def only_crlf(text: str) -> bool:
    """True where every line of a text ends as on Windows, so that it can be edited as if none did."""
    return 0 < text.count("\r\n") == text.count("\n")


def unix(text: str) -> str:
    return text.replace("\r\n", "\n")


def find_lines(text: str, old: str, new: str) -> list[Span]:
    """Where the lines of `old` are, by the strictest lenient way that finds them, each with what `new` is there.

    Nothing is found in a text of more than `LENIENT_CHARACTERS` or `LENIENT_LINES`: each line is looked at three times.
    """
    if len(text) > LENIENT_CHARACTERS or text.count("\n") > LENIENT_LINES:
        return []
    lines = text.split("\n")
    for normal, reindent in ((str.rstrip, False), (str.strip, True), (_folded, True)):
        spans = _by_lines(lines, old, new, normal, reindent=reindent)
        if spans:
            return spans
    return []


def apply(text: str, spans: list[Span]) -> str:
    """`text` with every span replaced; they are in order and do not overlap."""
    parts, end = [], 0
    for span in spans:
        parts += [text[end : span.start], span.text]
        end = span.end
    return "".join([*parts, text[end:]])


def _by_lines(lines: list[str], old: str, new: str, normal: Callable[[str], str], *, reindent: bool) -> list[Span]:
    wanted = [normal(line) for line in old.removesuffix("\n").split("\n")]
    if not any(wanted):
        return []
    # As one text each, so that looking for it takes time in proportion to its length, whatever repeats in it.
    normals = [normal(line) for line in lines]
    whole, part = "\n".join(["", *normals, ""]), "\n".join(["", *wanted, ""])
    begins = list(accumulate((len(line) + 1 for line in normals), initial=0))
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
    spans, size = [], len(wanted)
    at = whole.find(part)
    while at != -1:
        i = bisect_left(begins, at)
        put = _reindented(new, old, lines[i]) if reindent else new
        if old.endswith("\n") and i + size < len(lines):
            spans.append(Span(starts[i], starts[i + size], put))
        else:
            spans.append(Span(starts[i], starts[i + size] - 1, put.removesuffix("\n")))
        at = whole.find(part, begins[i + size])
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
    at = text.find(first) if first else -1
    if at != -1:
        return f"; its first line is at line {text.count(chr(10), 0, at) + 1}, but what follows differs"
    return "; read the file again and copy the passage as it is"
