"""Find a passage in a text although a model did not copy it exactly, and replace it.

Owns the search methods, from strict to lenient. The first that finds anything decides, so that a lenient match never
competes with an exact one:

1. exactly; 2. line by line, without trailing white space; 3. line by line, without leading white space too: the
replacement is moved to the indentation found; 4. line by line, with every run of white space as one space and
typographic quotes and dashes as plain ones.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

# ------------------------------------------------------------------------------- Finding and replacing a passage

LENIENT_CHARACTERS, LENIENT_LINES = 2 << 20, 100_000
"""Size of the largest text in which a passage is searched that was not copied exactly."""
MOST_ADDED = 16 << 20
"""Maximum characters by which a text may grow at once: a short passage may be in it a million times."""

PIECE = 1 << 16
"""Size in characters of the chunks in which a passage is replaced."""

_PLAIN_CHARACTERS = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "\u00a0": " "})


class NoMatchError(Exception):
    """The passage is missing, or occurs more often than allowed; the message is for the model."""


@dataclass(frozen=True)
class Span:
    """A location in a text, as offsets, and its replacement."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class LooseMatch:
    """Location of lines that were not copied exactly."""

    start: int
    end: int
    indent: str | None
    """Indentation of its first line, to which the replacement is moved; None: the replacement is unchanged."""
    cut: bool
    """True if the line break at its end is not part of it."""

    def span(self, old: str, new: str) -> Span:
        """Return the replacement of `old` by `new` at this location; raises `NoMatchError` if it would be too large."""
        text = new if self.indent is None else _reindent(new, old, self.indent)
        return Span(self.start, self.end, text.removesuffix("\n") if self.cut else text)


def replace(text: str, old: str, new: str, *, everywhere: bool = False) -> str:
    """Return `text` with `old` replaced by `new`; raises `NoMatchError` unless it occurs once, or `everywhere`."""
    if not old:
        raise NoMatchError("old_string is empty")
    if old == new:
        raise NoMatchError("old_string and new_string are the same: nothing would change")
    crlf = only_crlf(text)
    unix_text, old, new = (unix(part) if crlf else part for part in (text, old, new))
    count, changed = _replace_all(unix_text, old, new, MOST_ADDED)
    matches = [] if count else find_lines(unix_text, old)
    times = count or len(matches)
    if not times:
        raise NoMatchError(f"old_string was not found in the file{_nearest_hint(unix_text, old)}")
    if times > 1 and not everywhere:
        raise NoMatchError(f"old_string is in the file {times} times; add lines around it, or set replace_all=true")
    _require_room(count * (len(new) - len(old)) + len(matches) * len(new))
    spans, added = [], 0
    for match in matches:
        spans.append(match.span(old, new))
        added += len(spans[-1].text)
        _require_room(added)
    changed = changed if count else apply(unix_text, spans)
    return _windows_lines(changed) if crlf else changed


def _replace_all(text: str, old: str, new: str, most_added: float = math.inf) -> tuple[int, str]:
    """Return the number of occurrences of `old`, and the text with `new` instead; incomplete if that adds too much.

    Works in chunks, between which other threads get their turn: one call of `str` would block them all.
    """
    parts, count, start = list[str](), 0, 0
    while start < len(text):
        end = start + max(PIECE, len(old)) + len(old)
        chunks = text[start:end].split(old)
        count += len(chunks) - 1
        overlap = min(len(old) - 1, len(chunks[-1])) if end < len(text) else 0  # a possible start of an `old`
        chunks[-1] = chunks[-1][: len(chunks[-1]) - overlap]
        if count * (len(new) - len(old)) <= most_added:
            parts.append(new.join(chunks))
        start = min(end, len(text)) - overlap
    return count, "".join(parts)


def only_crlf(text: str) -> bool:
    """Return True if every line of a text ends as on Windows, so that it can be edited without these line ends."""
    return 0 < text.count("\r\n") == text.count("\n")


def unix(text: str) -> str:
    return _replace_all(text, "\r\n", "\n")[1]


def _windows_lines(text: str) -> str:
    return _replace_all(text, "\n", "\r\n")[1]


def _require_room(added: int) -> None:
    if added > MOST_ADDED:
        raise NoMatchError(f"the file would grow by {added} characters; at most {MOST_ADDED} are taken")


def find_lines(text: str, old: str) -> list[LooseMatch]:
    """Return the locations of the lines of `old`, by the strictest lenient method that finds them.

    Returns an empty list for a text that is too large, since each line is read three times.
    """
    if len(text) > LENIENT_CHARACTERS or text.count("\n") > LENIENT_LINES:
        return []
    lines = text.split("\n")
    for normal, reindent in ((str.rstrip, False), (str.strip, True), (_fold_line, True)):
        matches = _by_lines(lines, old, normal, reindent=reindent)
        if matches:
            return matches
    return []


def apply(text: str, spans: list[Span]) -> str:
    """Return `text` with every span replaced; spans are in order and do not overlap."""
    parts, end = [], 0
    for span in spans:
        parts += [text[end : span.start], span.text]
        end = span.end
    return "".join([*parts, text[end:]])


def _by_lines(lines: list[str], old: str, normal: Callable[[str], str], *, reindent: bool) -> list[LooseMatch]:
    old_lines = [normal(line) for line in old.removesuffix("\n").split("\n")]
    if not any(old_lines):
        return []
    # As one text each, so that the search takes time in proportion to its length, even with repetitions.
    normals = [normal(line) for line in lines]
    full_text, part = "\n".join(["", *normals, ""]), "\n".join(["", *old_lines, ""])
    begins = list(accumulate((len(line) + 1 for line in normals), initial=0))
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
    matches, size = [], len(old_lines)
    offset = full_text.find(part)
    while offset != -1:
        i = bisect_left(begins, offset)
        cut = not (old.endswith("\n") and i + size < len(lines))
        matches.append(LooseMatch(starts[i], starts[i + size] - cut, _indentation(lines[i]) if reindent else None, cut))
        offset = full_text.find(part, begins[i + size])
    return matches


def _reindent(new: str, old: str, want: str) -> str:
    """Return `new` moved by the distance from the indentation of the first line of `old` to the wanted one."""
    have = _indentation(old.split("\n", 1)[0])
    if have == want:
        return new
    lines = new.split("\n")
    _require_room(len(want) * len(lines) + len(new))
    return "\n".join(want + line.removeprefix(have) if line.strip() else line for line in lines)


def _indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _fold_line(line: str) -> str:
    return re.sub(r"\s+", " ", line.translate(_PLAIN_CHARACTERS)).strip()


def _nearest_hint(text: str, old: str) -> str:
    """Return a hint if the first line of `old` occurs in the text alone."""
    first = next((line.strip() for line in old.split("\n") if line.strip()), "")
    offset = text.find(first) if first else -1
    if offset != -1:
        return f"; its first line is at line {text.count(chr(10), 0, offset) + 1}, but what follows differs"
    return "; read the file again and copy the passage exactly"


# ----------------------------------------------- Patches of several files: the V4A form that coding models write
#     *** Begin Patch
#     *** Update File: path        hunks of lines that start with " ", "-" or "+", each after an "@@" line
#     *** Add File: path           lines that start with "+"
#     *** Delete File: path
#     *** Move File: old -> new
#     *** End Patch

# Repetitions are possessive (`*+`), and trailing blanks are stripped: a line of only blanks is read once.
_HEADER = re.compile(r"\*\*\*\s*+(Update|Add|Delete|Move)\s++File:\s*+(?=\S)(.*)")
_MOVE_TO = re.compile(r"\*\*\*\s*+Move\s++to:\s*+(?=\S)(.*)")


MOST_WORK = 1 << 30
"""Maximum of hunks times characters of the searched file; about a second."""
LENIENT_WORK = 1 << 24
"""The same for hunks that were not copied exactly, where each line counts as `LINE_WORK` characters more."""
LINE_WORK = 32


class PatchFormError(Exception):
    """The patch cannot be parsed; the message is for the model."""


@dataclass
class Hunk:
    """A change at one location; `hint` is a line above it."""

    hint: str = ""
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)

    def take(self, line: str) -> None:
        # Models omit the space at the start of an empty line, and sometimes of others too.
        sign, rest = (line[0], line[1:]) if line[:1] in {" ", "-", "+"} else (" ", line)
        if sign != "+":
            self.before.append(rest)
        if sign != "-":
            self.after.append(rest)


@dataclass
class Change:
    """Change of one file by a patch."""

    kind: Literal["update", "add", "delete", "move"]
    path: str
    target: str | None = None
    """New path of the file for an update or a move."""
    hunks: list[Hunk] = field(default_factory=list)


def parse(patch: str) -> list[Change]:
    """Return the changes in the order of the patch; raises `PatchFormError`."""
    changes: list[Change] = []
    for line in _patch_body(patch):
        header = _HEADER.match(line)
        if header:
            changes.append(_make_change(header.group(1).lower(), header.group(2).rstrip()))
        elif changes:
            _take_line(changes[-1], line)
        elif line.strip():
            raise PatchFormError(f"expected '*** Update File: path' or the like, found {line[:80]!r}")
    if not changes:
        raise PatchFormError("the patch is empty; it needs '*** Update File: path' and hunks below it")
    for change in changes:
        change.hunks = [hunk for hunk in change.hunks if hunk.before or hunk.after]
        if change.kind == "update" and not change.hunks and change.target is None:
            raise PatchFormError(f"update of {change.path}: no hunks")
    return changes


def update(text: str, hunks: list[Hunk]) -> str:
    """Return `text` with all hunks applied in order; raises `NoMatchError` if one does not fit."""
    if len(hunks) * len(text) > MOST_WORK:
        raise NoMatchError(f"{len(hunks)} hunks are too many for a file of this size; make several patches of it")
    crlf = only_crlf(text)
    text = unix(text) if crlf else text
    position, search = 0, LenientSearch()
    for index, hunk in enumerate(hunks, 1):
        try:
            text, position = _apply_hunk(text, hunk, position, search)
        except NoMatchError as error:
            raise NoMatchError(f"hunk {index}: {error}") from None
    return _windows_lines(text) if crlf else text


class LenientSearch:
    """Finds lines that were not copied exactly, until the total work exceeds a limit."""

    def __init__(self) -> None:
        self._remaining = LENIENT_WORK

    def find(self, text: str, old: str) -> list[LooseMatch]:
        """Return the locations of the lines; an empty list if the limit is exceeded."""
        self._remaining -= len(text) + LINE_WORK * text.count("\n")
        return find_lines(text, old) if self._remaining >= 0 else []


def added(change: Change) -> str:
    """Return the content of a new file."""
    lines = [line for hunk in change.hunks for line in hunk.after]
    return "\n".join(lines) + "\n" if lines else ""


def _patch_body(patch: str) -> list[str]:
    lines = unix(patch).split("\n")
    starts = [i for i, line in enumerate(lines) if re.match(r"\*\*\*\s*Begin Patch", line)]
    ends = [i for i, line in enumerate(lines) if re.match(r"\*\*\*\s*End Patch", line)]
    body = lines[starts[0] + 1 if starts else 0 : ends[-1] if ends else len(lines)]
    while body and not body[-1]:
        body.pop()
    return body


def _make_change(kind: Any, path: str) -> Change:
    """Return the change of a header; `kind` is one of the kinds of `Change`."""
    if kind != "move":
        return Change(kind, path)
    source, arrow, target = path.partition("->")
    if not arrow or not target.strip():
        raise PatchFormError(f"move of {path}: write '*** Move File: old -> new'")
    return Change(kind, source.strip(), target.strip())


def _take_line(change: Change, line: str) -> None:
    """Add a line below a header to the change."""
    moved = _MOVE_TO.match(line)
    if moved and change.kind == "update":
        change.target = moved.group(1).rstrip()
    elif line.startswith("@@") and change.kind == "update":
        change.hunks.append(Hunk(line[2:].partition("@@")[0].strip()))
    elif change.kind in {"update", "add"} and not line.startswith(("\\", "*** End of File")):
        if not change.hunks:
            change.hunks.append(Hunk())
        change.hunks[-1].take(line)
    elif line.strip() and not line.startswith("\\"):
        raise PatchFormError(f"{change.kind} of {change.path}: unexpected line {line[:80]!r}")


def _apply_hunk(text: str, hunk: Hunk, position: int, search: LenientSearch) -> tuple[str, int]:
    """Return the text after one hunk, and the offset from which to search for the next."""
    start = _after_hint(text, hunk.hint, position)
    if not hunk.before:
        return _insert_hunk(text, hunk, start if hunk.hint else len(text))
    span = _whole_lines(text, hunk, start)
    if span is None:
        old, new = "\n".join(hunk.before), "\n".join(hunk.after)
        matches = search.find(text, old)
        match = next((match for match in matches if match.start >= start), matches[0] if matches else None)
        span = match.span(old, new) if match is not None else None
    if span is None:
        raise NoMatchError(f"its lines were not found, starting with {hunk.before[0][:80]!r}")
    end = span.end
    if not hunk.after and end < len(text):
        end += 1  # the line break is removed with the last of its lines
    span = Span(span.start, end, span.text)
    return apply(text, [span]), span.start + len(span.text)


def _whole_lines(text: str, hunk: Hunk, start: int) -> Span | None:
    """Return the exact location of the lines of a hunk: from `start` on, or else anywhere."""
    old = "\n".join(hunk.before)
    framed = f"\n{text}\n"
    offset = framed.find(f"\n{old}\n", start)
    offset = offset if offset != -1 else framed.find(f"\n{old}\n")
    return Span(offset, offset + len(old), "\n".join(hunk.after)) if offset != -1 else None


def _after_hint(text: str, hint: str, position: int) -> int:
    """Return the offset of the line after the one that the hint names; if it is missing, `position`."""
    hint_start = text.find(hint, position) if hint else -1
    if hint_start == -1:
        return position
    end = text.find("\n", hint_start)
    return len(text) if end == -1 else end + 1


def _insert_hunk(text: str, hunk: Hunk, offset: int) -> tuple[str, int]:
    new = "\n".join(hunk.after) + "\n"
    if offset == len(text) and text and not text.endswith("\n"):
        new = "\n" + new
    return text[:offset] + new + text[offset:], offset + len(new)
