"""Search the sandbox's files with a program that runs there, so that a huge tree or an endless pattern does not load
the host.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from hermes_rl.sandbox.base import Sandbox
from hermes_rl.values import read_json

SEARCH_SECONDS = 60.0
SEARCH_OUTPUT_BYTES = 4 << 20

_PROGRAM = r"""
import fnmatch, json, os, re, stat, sys

asked = json.loads(sys.argv[1])
LINE, FILE_SIZE, MOST = 500, 16 << 20, 10000

def wanted(path, name):
    glob = asked["file_glob"]
    return not glob or fnmatch.fnmatch(name, glob) or fnmatch.fnmatch(path, glob)

def files(root):
    if not os.path.isdir(root):
        yield root, os.path.basename(root)
        return
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield os.path.join(folder, name), name

def shown(path):
    return path[2:] if path.startswith("./") else path

def lines_of(path):
    with open(path, "rb") as file:
        if b"\0" in file.read(1024):
            return None
        file.seek(0)
        return file.read(FILE_SIZE).decode("utf-8", "replace").splitlines()

def by_name(root):
    pattern, dated = asked["pattern"], []
    if "/" not in pattern and not any(sign in pattern for sign in "*?["):
        pattern = "*" + pattern + "*"
    for path, name in files(root):
        if fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(shown(path), pattern):
            try:
                dated.append((-os.lstat(path).st_mtime, shown(path)))
            except OSError:
                continue
    return [path for _, path in sorted(dated)]

def by_content(root):
    pattern, matches = re.compile(asked["pattern"]), []
    for path, name in files(root):
        if not wanted(shown(path), name):
            continue
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                continue
            lines = lines_of(path)
        except OSError:
            continue
        for number, line in enumerate(lines or (), 1):
            if pattern.search(line):
                matches.append((shown(path), number, lines))
                if len(matches) >= MOST:
                    return matches
    return matches

def content(matches):
    around, rows = asked["context"], []
    for path, number, lines in matches:
        low, high = max(1, number - around), min(len(lines), number + around)
        text = "\n".join(line[:LINE] for line in lines[low - 1:high])
        rows.append({"path": path, "line": number, "content": text})
    return rows

def answer():
    root, first, last = asked["path"], asked["offset"], asked["offset"] + asked["limit"]
    if os.path.realpath(root).startswith(("/proc/", "/sys/")):
        return {"error": "Files of the kernel are not for this tool; look at /proc and /sys with a command"}
    if not os.path.lexists(root):
        return {"error": "Path not found: " + shown(root)}
    if asked["target"] == "files":
        every = by_name(root)
        result = {"total_count": len(every), "files": every[first:last]}
    else:
        try:
            matches = by_content(root)
        except re.error as error:
            return {"error": "Invalid regular expression: %s" % error}
        counts = {}
        for path, _, _ in matches:
            counts[path] = counts.get(path, 0) + 1
        if asked["output_mode"] == "files_only":
            every = list(counts)
            result = {"total_count": len(every), "files": every[first:last]}
        elif asked["output_mode"] == "count":
            every = list(counts.items())
            result = {"total_count": len(matches), "counts": dict(every[first:last])}
        else:
            every = matches
            result = {"total_count": len(matches), "matches": content(matches[first:last])}
    if last < len(every):
        result["truncated"] = True
        result["hint"] = "more results: use offset=%d" % last
    return result

print(json.dumps(answer()))
"""


@dataclass(frozen=True)
class Query:
    """A query; the fields are the parameters of `search_files`."""

    pattern: str
    target: str = "content"
    path: str = "."
    file_glob: str | None = None
    limit: int = 50
    offset: int = 0
    output_mode: str = "content"
    context: int = 0


async def search(sandbox: Sandbox, query: Query, *, cwd: str | None, timeout: float) -> dict[str, Any]:
    """Return the result of the search, or ``{"error": …}``."""
    done = await sandbox.run(
        [*sandbox.python, "-", json.dumps(asdict(query))],
        stdin=_PROGRAM.encode(),
        cwd=cwd,
        timeout=min(timeout, SEARCH_SECONDS),
        output_limit=SEARCH_OUTPUT_BYTES,
        merge_stderr=False,
    )
    if done.timed_out:
        return {"error": "The search took too long; narrow the path or simplify the pattern"}
    try:
        answer: dict[str, Any] = read_json(done.stdout)
    except ValueError:
        reason = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2] or "no output"
        return {"error": f"The search failed: {reason[:200]}"}
    return answer
