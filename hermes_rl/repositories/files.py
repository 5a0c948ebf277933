"""Write files of an environment from elsewhere: checks of each file, and the digest of all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.errors import UserError
from hermes_rl.others_files import read_regular
from hermes_rl.repositories.address import plain_path
from hermes_rl.terminal_text import escape_controls

MOST_FILES = 10_000
MOST_BYTES = 256 * 2**20
"""Maximum bytes of all files together, and so of one."""
_COMPILED = "__pycache__"


class Unfit(UserError):
    """The content of a repository cannot be an environment here."""


@dataclass(frozen=True)
class RepositoryFile:
    """A file of a repository, or a link; `content` is None if only its name and size are known."""

    name: str
    size: int
    link: bool = False
    executable: bool = False
    content: bytes | None = None

    @property
    def compiled(self) -> bool:
        """True if Python would run it instead of the source that a reader has seen."""
        return self.name.endswith((".pyc", ".pyo")) or _COMPILED in self.name.split("/")


def write_files(entries: Iterable[RepositoryFile], folder: Path) -> None:
    """Write files into a directory, links last and only if they stay in it; compiled Python is omitted.

    All names and sizes must come before the first content. Raises `Unfit` if there is too much data, or a name or a
    link that leads out of the directory.
    """
    names: set[str] = set()
    links: list[tuple[Path, str]] = []
    total = 0
    for entry in entries:
        if entry.compiled:
            continue
        if entry.content is None:
            total += entry.size
            _require_fit(entry, total, names)
            names.add(entry.name)
            continue
        path = folder / entry.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.link:
            links.append((path, os.fsdecode(entry.content)))
            continue
        with path.open("xb") as file:
            file.write(entry.content)
        path.chmod(0o755 if entry.executable else 0o644)
    top = folder.resolve()
    for path, target in links:
        path.symlink_to(target)
    for path, target in links:
        if Path(target).is_absolute() or not _real_path(path).is_relative_to(top):
            raise Unfit(
                f"{escape_controls(path.relative_to(folder).as_posix())} is a link that leads out of the repository"
            )


def _real_path(path: Path) -> Path:
    return Path(os.path.realpath(path))  # `resolve` raises for circular links


def _require_fit(entry: RepositoryFile, total: int, names: set[str]) -> None:
    display_name = escape_controls(entry.name.encode("utf-8", "replace").decode())
    if not plain_path(entry.name) or entry.name in names:
        raise Unfit(f"{display_name!r} is not a name of a file that may be written here")
    if total > MOST_BYTES:
        raise Unfit(
            f"with {display_name} ({entry.size:,} bytes) it is larger than {MOST_BYTES:,} bytes: an environment is "
            "code and "
            "few rows, and a large dataset is named by `dataset.path`"
        )
    if len(names) >= MOST_FILES:
        raise Unfit(f"it has more than {MOST_FILES:,} files")


def files_of(folder: Path) -> Iterator[Path]:
    """Yield the files and links of a directory, in the order of their names, without compiled Python."""
    for path in sorted(folder.rglob("*")):
        if (path.is_symlink() or not path.is_dir()) and _COMPILED not in path.relative_to(folder).parts:
            yield path


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of all names, kinds and contents of a directory."""
    hasher = hashlib.sha256()
    for path in files_of(folder):
        if path.is_symlink():
            kind, content = b"l", os.fsencode(path.readlink())
        else:
            kind, content = b"x" if path.stat().st_mode & 0o100 else b"f", read_regular(path, MOST_BYTES)
        name = os.fsencode(path.relative_to(folder).as_posix())
        hasher.update(b"%s %d %d\0%s" % (kind, len(name), len(content), name))
        hasher.update(content)
    return hasher.hexdigest()
