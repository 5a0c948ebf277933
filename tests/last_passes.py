"""When each test last passed on this machine, and with which content of the files that it is about.

CI runs a test that takes long only where these files have changed since, or where it is the test's turn. A pass names
their content and not a commit: a commit that was tested may be rewritten before it lands. For a test without a pass,
what the last days of history changed has changed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DAYS = 3
"""Days of history that count as changed for a test without a pass."""


class Pass(NamedTuple):
    """The day on which a test last passed (YYYY-MM-DD), and the digest of its files then."""

    day: str
    digest: str


def cache() -> Path:
    """Return the folder that keeps what takes long to build: `HERMES_RL_REAL` or ``~/.cache/hermes-rl-real``."""
    folder = Path(os.environ.get("HERMES_RL_REAL") or Path.home() / ".cache" / "hermes-rl-real")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def load_passes() -> dict[str, Pass]:
    """Return the last pass of each test that the cache knows; of none if it has no file that can be read."""
    try:
        return {test: Pass(*found) for test, found in json.loads(_file().read_text("utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def record_passes(passes: Mapping[str, Pass]) -> None:
    """Add passes to the file; it is replaced in one step, as other test runs may read it."""
    new = _file().with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps({**load_passes(), **passes}, indent=0, sort_keys=True), "utf-8")
    new.replace(_file())


def _file() -> Path:
    return cache() / "last-passes.json"


def has_changed(test: str, patterns: tuple[str, ...], passes: Mapping[str, Pass], root: Path = ROOT) -> bool:
    """Return whether a file that matches a pattern has changed since the test last passed, or may have."""
    if test in passes:
        return passes[test].digest != digest(patterns, root)
    recent = recently_changed(root)
    return recent is None or any(fnmatch(file, pattern) for file in recent for pattern in patterns)


@functools.cache
def recently_changed(root: Path) -> set[str] | None:
    """Return the files that the last days of history or nobody's commit changed; None without a history."""
    logged = ("log", f"--since={DAYS} days ago", "--name-only", "--pretty=format:")
    files = set()
    for arguments in (logged, ("diff", "--name-only", "HEAD")):
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            return None
        files |= set(done.stdout.split("\n")) - {""}
    return files


@functools.cache
def digest(patterns: tuple[str, ...], root: Path = ROOT) -> str:
    """Return a digest of the names and contents of the files that match a pattern, as `fnmatch` reads patterns."""
    content = hashlib.sha256()
    folders = sorted({pattern.partition("/")[0] for pattern in patterns if "/" in pattern})
    files = [
        *(path for path in root.iterdir() if path.is_file()),
        *(file for name in folders for file in _below(root / name)),
    ]
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
        if any(fnmatch(name, pattern) for pattern in patterns):
            content.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    return content.hexdigest()


def _below(folder: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(path, name) for name in files)
