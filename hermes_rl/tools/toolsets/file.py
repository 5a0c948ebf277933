"""Toolset ``file``: read, write, edit and search the files of the rollout's sandbox.

Names are paths and nothing else: no shell sees them. Relative paths start at the working directory of the terminal.
"""

from __future__ import annotations

import heapq
import posixpath
from typing import Any

from hermes_rl.sandbox.base import Sandbox
from hermes_rl.threads import run_exclusively
from hermes_rl.tools.base import CALL_TIMEOUT, Tool, ToolInputError, ToolRuntime, Toolset, arguments, as_json, typed
from hermes_rl.tools.search import SEARCH_SECONDS, Query, search
from hermes_rl.tools.toolsets._patch import Patch

FILE_READ_BYTES = 64 << 20
LINE_CHARACTERS = 2000
PAGE_CHARACTERS = 90_000
DEFAULT_LINES, MOST_LINES = 500, 2000
THREAD_FILE_BYTES = 1 << 18
"""Bytes of a file from which a page of it is made in a thread."""
PIECE = 1 << 16
MOST_NAMES = 20_000
"""Maximum names of a directory that are compared to find close ones."""
COMPARED, COMPARED_CHARACTERS = 200, 100


class ReadFile(Tool):
    """Return a page of a text file with line numbers."""

    name = "read_file"
    on_sandbox = True

    description = (
        "Read a text file, with line numbers as LINE_NUM|CONTENT. Use offset and limit to read a large "
        "file page by page. Binary files cannot be read."
    )
    parameters = arguments(
        ["path"],
        path=typed("string", "Path of the file (absolute, relative, or ~/path)"),
        offset=typed("integer", "Line to start from, counting from 1", default=1, minimum=1),
        limit=typed(
            "integer",
            f"Lines at most (default {DEFAULT_LINES}, at most {MOST_LINES})",
            default=DEFAULT_LINES,
            maximum=MOST_LINES,
        ),
    )

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        sandbox = await runtime.sandbox()
        path = sandbox.resolve(args["path"], runtime.shell.cwd)
        try:
            data = await sandbox.read_file(path, limit=FILE_READ_BYTES)
        except FileNotFoundError:
            return as_json(await _not_found(sandbox, args["path"], path))
        except OSError as error:
            return as_json({"error": f"{args['path']}: {error.strerror}"})
        if b"\0" in data[:8192]:
            return as_json({"error": f"{args['path']}: Binary file", "file_size": len(data)})
        page = data, max(1, args.get("offset", 1)), max(1, min(args.get("limit", DEFAULT_LINES), MOST_LINES))
        return as_json(
            await run_exclusively(_page_of_lines, *page) if len(data) > THREAD_FILE_BYTES else _page_of_lines(*page)
        )


def _page_of_lines(data: bytes, offset: int, limit: int) -> dict[str, Any]:
    """Return the lines from `offset` on; only these are decoded, to save memory."""
    position, breaks = 0 if offset == 1 else len(data), 0
    for chunk_start in range(0, len(data), PIECE):  # between two chunks other threads get their turn
        inside = data.count(b"\n", chunk_start, chunk_start + PIECE)
        if breaks < offset - 1 <= breaks + inside:  # the line before the page ends here
            position = chunk_start
            for _ in range(offset - 1 - breaks):
                position = data.find(b"\n", position) + 1
        breaks += inside
    total = breaks + (len(data) > 0 and not data.endswith(b"\n"))
    page_lines: list[str] = []
    size = 0
    while len(page_lines) < limit and position < len(data):
        end = data.find(b"\n", position)
        end = len(data) if end == -1 else end
        line = data[position : min(end, position + 4 * LINE_CHARACTERS + 4)].decode("utf-8", "replace")
        cut = line if len(line) <= LINE_CHARACTERS else line[:LINE_CHARACTERS] + "... [truncated]"
        size += len(cut) + 8
        if size > PAGE_CHARACTERS:
            break
        page_lines.append(f"{offset + len(page_lines)}|{cut}")
        position = end + 1
    last = offset - 1 + len(page_lines)
    answer: dict[str, Any] = {
        "content": "\n".join(page_lines),
        "total_lines": total,
        "file_size": len(data),
        "truncated": last < total,
    }
    if last < total:
        answer["hint"] = f"Use offset={last + 1} to continue (showing {offset}-{last} of {total} lines)"
    return answer


async def _not_found(sandbox: Sandbox, written: str, path: str) -> dict[str, Any]:
    """Return the error, with close names in the same directory."""
    folder, _, name = path.rpartition("/")
    answer: dict[str, Any] = {"error": f"File not found: {written}"}
    try:
        names = [info.name for info in await sandbox.list_dir(folder or "/", limit=MOST_NAMES)]
    except OSError:
        return answer
    similar = await run_exclusively(_similar_names, name, names)
    return answer | ({"similar_files": similar} if similar else {})


def _similar_names(name: str, names: list[str]) -> list[str]:
    """Return the closest names; only some are compared, which takes time in proportion to both lengths."""
    import difflib

    short = [each for each in names if len(each) <= COMPARED_CHARACTERS]
    nearest = heapq.nsmallest(COMPARED, short, key=lambda each: (each[:1] != name[:1], abs(len(each) - len(name))))
    return difflib.get_close_matches(name[:COMPARED_CHARACTERS], nearest, n=5, cutoff=0.5)


class WriteFile(Tool):
    """Write a complete file."""

    name = "write_file"
    on_sandbox = True
    parallel = False

    description = (
        "Write a file, replacing all that is in it. Folders above it are made. Use patch to change a part of a file."
    )
    parameters = arguments(
        ("path", "content"),
        path=typed("string", "Path of the file"),
        content=typed("string", "All of its content"),
        cross_profile=typed("boolean", "Has no effect here", default=False),
    )

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        sandbox = await runtime.sandbox()
        try:
            data = args["content"].encode("utf-8")
        except UnicodeEncodeError as error:
            raise ToolInputError(f"content cannot be written as UTF-8: {error.reason}") from None
        try:
            await sandbox.write_file(sandbox.resolve(args["path"], runtime.shell.cwd), data)
        except OSError as error:
            return as_json({"error": f"{args['path']}: {error.strerror}"})
        return as_json({"bytes_written": len(data), "path": args["path"]})


class SearchFiles(Tool):
    """Search content by regular expression, or names by glob."""

    name = "search_files"
    on_sandbox = True

    description = (
        "Search files. target='content' finds lines that match a regular expression (Python's syntax) and "
        "answers with matches, paths (files_only) or counts. target='files' finds files by a glob such as "
        "'*.py', newest first. Hidden files and binary files are skipped."
    )
    parameters = arguments(
        ["pattern"],
        pattern=typed("string", "Regular expression, or glob for target='files'"),
        target=typed("string", "Search in files, or for files by name", "content", "files", default="content"),
        path=typed("string", "Folder or file to search in", default="."),
        file_glob=typed("string", "Search only files whose name matches this"),
        limit=typed("integer", "Results at most", default=50, minimum=1),
        offset=typed("integer", "Results to skip", default=0, minimum=0),
        output_mode=typed(
            "string",
            "Matching lines, paths only, or matches per file",
            *("content", "files_only", "count"),
            default="content",
        ),
        context=typed("integer", "Lines around each match", default=0, minimum=0),
    )

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        sandbox = await runtime.sandbox()
        path = args.get("path", ".")
        path = sandbox.resolve(path) if path.startswith("~") else posixpath.normpath(path)
        query = Query(**{**args, "path": path})
        timeout = (CALL_TIMEOUT.get() or SEARCH_SECONDS) * 0.9
        return as_json(await search(sandbox, query, cwd=runtime.shell.cwd, timeout=timeout))


TOOLSET = Toolset(
    "file",
    "Reading, writing, editing and searching files of the sandbox.",
    (ReadFile(), WriteFile(), Patch(), SearchFiles()),
)
