"""Tool `patch`: change parts of files, one passage or several files at once."""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from io import StringIO
from typing import Any, TypeVar

from hermes_rl.sandbox.base import Sandbox
from hermes_rl.threads import run_exclusively
from hermes_rl.tools import editing
from hermes_rl.tools.base import OUTPUT_LIMIT, Tool, ToolInputError, ToolRuntime, arguments, as_json, capped, typed
from hermes_rl.tools.editing import NoMatchError, replace

T = TypeVar("T")

FILE_BYTES = 8 << 20
THREAD_TEXT_BYTES = 1 << 18
"""Bytes from which text is encoded and decoded in a thread."""
CONTEXT = 3
COMPARED_LINES = 1_000_000
"""Maximum of lines before times lines after for a line by line comparison of a change."""
COMPARED_PAIRS = 5_000_000
"""Maximum pairs of equal lines that a diff examines, repetitions included."""
HEAD = re.compile(r"([-+])(\d+)")


class Patch(Tool):
    """Replace a passage, or apply a patch of several files: completely or not at all."""

    name = "patch"
    on_sandbox = True
    parallel = False

    description = (
        "Change parts of files and answer with the diff. mode='replace' (default) needs path, old_string "
        "and new_string: the passage must be in the file once, unless replace_all=true; small differences "
        "in white space are forgiven. mode='patch' needs patch, in V4A form, for several changes or files."
    )
    # hermes-agent lists mode as required and has a default for it: calls of both kinds are accepted.
    parameters = arguments(
        mode=typed(
            "string", "replace: path, old_string, new_string; patch: patch", "replace", "patch", default="replace"
        ),
        path=typed("string", "For replace: the file"),
        old_string=typed("string", "For replace: the exact passage, with lines around it"),
        new_string=typed("string", "For replace: what to put there; '' deletes the passage"),
        replace_all=typed("boolean", "Replace the passage wherever it is", default=False),
        patch=typed(
            "string",
            "For patch, for example:\n*** Begin Patch\n*** Update File: path/to/file\n@@ line above the change @@\n"
            " context\n-removed\n+added\n*** End Patch",
        ),
        cross_profile=typed("boolean", "Has no effect here", default=False),
    )

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        sandbox = await runtime.sandbox()
        mode = args.get("mode", "replace")
        needed = ("path", "old_string", "new_string") if mode == "replace" else ("patch",)
        missing = [name for name in needed if name not in args]
        if missing:
            raise ToolInputError(f"mode '{mode}' needs {', '.join(missing)}")
        files = _Files(sandbox, runtime.shell.cwd)
        try:
            if mode == "replace":
                text = await files.read(args["path"])
                everywhere = args.get("replace_all", False)
                passage = text, args["old_string"], args["new_string"]
                work = partial(replace, *passage, everywhere=everywhere)
                files.write(args["path"], await _edit_in_thread(len(text), work))
            else:
                for change in await _edit_in_thread(len(args["patch"]), editing.parse, args["patch"]):
                    await _apply_change(files, change)
            return as_json(await files.finish())
        except (NoMatchError, editing.PatchFormError) as error:
            return as_json({"success": False, "error": str(error)})
        except OSError as error:
            return as_json({"success": False, "error": f"{error.filename}: {error.strerror}"})


async def _apply_change(files: _Files, change: editing.Change) -> None:
    if change.kind == "add":
        if await files.exists(change.path):
            raise NoMatchError(f"{change.path} exists already; update it instead of adding it")
        files.write(change.path, editing.added(change))
        return
    text = await files.read(change.path)
    if change.kind == "update":
        try:
            text = await _edit_in_thread(len(text) * len(change.hunks), editing.update, text, change.hunks)
        except NoMatchError as error:
            raise NoMatchError(f"{change.path}: {error}") from None
    if change.kind == "delete" or change.target is not None:
        files.write(change.path, None)
    if change.kind != "delete":
        files.write(change.target or change.path, text)


class _Files:
    """The files of one call: changed in memory first, so that a patch that does not fit changes nothing.

    Bytes that are not UTF-8 survive a change elsewhere in the file.
    """

    def __init__(self, sandbox: Sandbox, cwd: str | None) -> None:
        self._sandbox = sandbox
        self._cwd = cwd
        self._names: dict[str, str] = {}
        """Full path → the path as the model wrote it."""
        self._before: dict[str, str | None] = {}
        self._after: dict[str, str | None] = {}

    async def read(self, path: str) -> str:
        text = await self._text(path)
        if text is None:
            raise FileNotFoundError(2, "No such file or directory", path)
        return text

    async def exists(self, path: str) -> bool:
        return await self._text(path) is not None

    def write(self, path: str, text: str | None) -> None:
        """Write a file; None deletes it."""
        self._after[self._full(path)] = text

    async def finish(self) -> dict[str, Any]:
        """Write the changed files, and return a description of the changes."""
        for full in self._after:
            await self._text(full)
        changed = {full: text for full, text in self._after.items() if text != self._before[full]}
        for full, text in changed.items():
            if text is not None:
                await self._sandbox.write_file(full, await _in_thread_if_large(len(text), _file_bytes, text))
        for full, text in changed.items():
            if text is None:
                await self._sandbox.remove(full)
        size = sum(len(text or "") + len(self._before[full] or "") for full, text in changed.items())
        return await _edit_in_thread(size, self._result_fields, changed)

    def _result_fields(self, changed: dict[str, str | None]) -> dict[str, Any]:
        named_texts = [(self._names[full], self._before[full] or "", text or "") for full, text in changed.items()]
        diffs = [line for name, old, new in named_texts for line in _diff_lines(old, new, f"a/{name}", f"b/{name}")]
        diff = "".join(diffs).encode("utf-8", "replace").decode("utf-8")
        kinds = {
            "files_modified": [f for f, text in changed.items() if text is not None and self._before[f] is not None],
            "files_created": [f for f, text in changed.items() if text is not None and self._before[f] is None],
            "files_deleted": [f for f, text in changed.items() if text is None],
        }
        names_by_kind = {kind: [self._names[full] for full in paths] for kind, paths in kinds.items() if paths}
        return {"success": True, "diff": capped(diff, OUTPUT_LIMIT), **names_by_kind}

    async def _text(self, path: str) -> str | None:
        """Return the current text, or None if there is no file."""
        full = self._full(path)
        if full not in self._before:
            try:
                data = await self._sandbox.read_file(full, limit=FILE_BYTES)
                self._before[full] = await _in_thread_if_large(len(data), data.decode, "utf-8", "surrogateescape")
            except FileNotFoundError:
                self._before[full] = None
        return self._after.get(full, self._before[full])

    def _full(self, path: str) -> str:
        full = self._sandbox.resolve(path, self._cwd)
        self._names.setdefault(full, path)
        return full


async def _in_thread_if_large(size: int, work: Callable[..., T], *arguments: Any) -> T:
    """Run work whose time is proportional to `size`, in a thread if `size` is large."""
    return await run_exclusively(work, *arguments) if size > THREAD_TEXT_BYTES else work(*arguments)


async def _edit_in_thread(size: int, work: Callable[..., T], *arguments: Any) -> T:
    """Run work of an edit in a thread: small work need not wait for work on large texts."""
    return await (run_exclusively if size > THREAD_TEXT_BYTES else asyncio.to_thread)(work, *arguments)


def _diff_lines(before: str, after: str, name: str, new_name: str) -> Iterator[str]:
    """Yield the lines of a diff; a large change is one block, since comparing takes lines times lines."""
    start, rest = _measure_common(before, after)
    old, new = before[start : len(before) - rest], after[start : len(after) - rest]
    first = before.count("\n", 0, start)
    if (old.count("\n") + 1) * (new.count("\n") + 1) <= COMPARED_LINES:  # before they are split, which takes longer
        before_lines, after_lines = (StringIO(part, newline="\n").readlines() for part in (old, new))
        with suppress(_TooAlikeError):
            _Comparison(before_lines, after_lines).get_matching_blocks()
            for line in difflib.unified_diff(before_lines, after_lines, name, new_name):
                moved = HEAD.sub(lambda head: f"{head[1]}{int(head[2]) + first}", line) if line[:2] == "@@" else line
                yield moved if moved.endswith("\n") else moved + "\n"
            return
    yield f"--- {name}\n+++ {new_name}\n"
    yield f"@@ -{first + 1},{_line_count(old)} +{first + 1},{_line_count(new)} @@\n"
    for sign, part in (("-", old), ("+", new)):
        yield from (f"{sign}{line}\n" for line in part[:OUTPUT_LIMIT].splitlines())


class _TooAlikeError(Exception):
    """Two texts have too many pairs of equal lines."""


class _Comparison(difflib.SequenceMatcher[str]):
    """The comparison that `difflib` makes for a diff, which stops with an error instead of taking long."""

    def __init__(self, before: list[str], after: list[str]) -> None:
        super().__init__(None, before, after)
        line_positions: dict[str, list[int]] = self.b2j  # type: ignore[attr-defined]
        pairs = sum(len(line_positions.get(line, ())) for line in before)
        self._remaining = COMPARED_PAIRS // (pairs + len(before) + 1)

    def find_longest_match(self, *bounds: Any) -> difflib.Match:
        if self._remaining < 0:
            raise _TooAlikeError
        self._remaining -= 1
        return super().find_longest_match(*bounds)


def _line_count(text: str) -> int:
    return text.count("\n") + (not text.endswith("\n"))


def _measure_common(before: str, after: str) -> tuple[int, int]:
    """Return the equal length of two texts at the start and at the end, in complete lines, less three lines of
    context.
    """
    start = _common_length(before, after)
    rest = _common_length(before[start:], after[start:], end=True)
    for _ in range(CONTEXT + 1):
        start = before.rfind("\n", 0, max(start - 1, 0)) + 1
        end = before.find("\n", max(len(before) - rest, 0))
        rest = len(before) - end - 1 if end != -1 else 0
    return start, rest


def _common_length(before: str, after: str, *, end: bool = False) -> int:
    """Return the length of the longest common prefix or suffix, by bisection: comparing slices is fast."""
    low, high = 0, min(len(before), len(after))
    while low < high:
        middle = (low + high + 1) // 2
        old, new = (t[len(t) - middle : len(t) - low] if end else t[low:middle] for t in (before, after))
        low, high = (middle, high) if old == new else (low, middle - 1)
    return low


def _file_bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ToolInputError(f"the new text cannot be written as UTF-8: {error.reason}") from None
