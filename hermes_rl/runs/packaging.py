"""Package a spec's directories for machines that do not have them.

Owns the selection of files, and the packing of a spec so that its paths lead there: a path below one of its directories
is packed as the part below it, and unpacked below the location where that directory has arrived.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from hermes_rl.others_files import read_regular

MOST_BYTES = 100 << 20
"""Maximum bytes of copied files."""
MOST_FILES = 10_000
"""Maximum number of copied files."""
OUTPUTS = "outputs"
"""Directory of runs, directly in a spec's directory; it is not copied."""
_LEFT = frozenset({"__pycache__", "node_modules", "venv"})
"""Directories that are never copied: their content is generated."""


def stage(
    folders: Collection[Path], into: Path, secrets: Collection[bytes], note: Callable[[str], None]
) -> tuple[Path, ...]:
    """Copy directories to `into/0`, `into/1`, …; return the copied ones, in this order; blocks.

    Excluded are names that start with a dot or end in `.env`, files that hold a secret, run directories and generated
    files. If the total is too large, nothing is copied and the user is notified.
    """
    tops = [folder for folder in sorted(folders) if not any(other in folder.parents for other in folders)]
    size = count = 0
    for index, top in enumerate(tops):
        (into / str(index)).mkdir()
        if next(_files_to_copy(top / OUTPUTS), None) is not None:
            note(
                f"{top / OUTPUTS} stays on this machine, as runs are written there; what the spec reads of it belongs "
                "into another folder"
            )
        for file in _files_to_copy(top):
            target = into / str(index) / file.relative_to(top)
            size, count = size + file.stat().st_size, count + 1
            if size > MOST_BYTES or count > MOST_FILES:
                note(
                    f"{top} is too large to copy to the nodes of the cluster (the limit is {MOST_BYTES >> 20} MiB and "
                    f"{MOST_FILES} files): provide it at the same path on each node, or move the spec and its code to "
                    "a separate directory"
                )
                shutil.rmtree(into)
                into.mkdir()
                return ()
            try:
                content = read_regular(file, MOST_BYTES)
                if any(secret in content for secret in secrets):
                    note(f"{file} holds a key, so it stays on this machine")
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)
            except OSError as error:
                note(f"{file} cannot be copied, so it stays on this machine: {error.strerror}")
    return tuple(tops)


def _files_to_copy(top: Path) -> Iterator[Path]:
    """Yield the files below a directory to copy; links are followed, and their targets are copied instead."""
    for name, folders, files in os.walk(top, followlinks=True):
        directory = Path(name)
        folders[:] = [
            folder
            for folder in folders
            if not (
                folder[0] == "."
                or folder in _LEFT
                or directory / folder == top / OUTPUTS
                or _is_left(directory / folder)
            )
        ]
        for file in files:
            if file[0] != "." and not file.endswith(".env") and (directory / file).is_file():
                yield directory / file


def _is_left(folder: Path) -> bool:
    """Return True if a directory is a run directory, a Python environment, or a link to a directory on the way to it.

    Two directories that link to each other contain paths without end.
    """
    if any((folder / marker).exists() for marker in ("run.json", "rollouts.jsonl", "pyvenv.cfg")):
        return True
    return folder.is_symlink() and any(parent.resolve().is_relative_to(folder.resolve()) for parent in folder.parents)


def pack(value: Any, folders: Sequence[Path]) -> bytes:
    """Return the pickled value, in which paths below the directories lead to the locations where these arrive."""
    buffer = io.BytesIO()
    _Packer(buffer, folders).dump(value)
    return buffer.getvalue()


def unpack(data: bytes, arrived: Path) -> Any:
    """Return the value, whose paths now lead to `arrived/0`, `arrived/1`, …."""
    return _Unpacker(io.BytesIO(data), arrived).load()


class _Packer(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, folders: Sequence[Path]) -> None:
        super().__init__(buffer)
        self._folders = [(index, str(folder)) for index, folder in enumerate(folders)]

    def persistent_id(self, value: Any) -> tuple[bool, int, str] | None:
        if not isinstance(value, str | PurePath):
            return None
        text = str(value)
        for index, folder in self._folders:
            if text == folder or text.startswith(f"{folder}/"):
                return isinstance(value, str), index, text[len(folder) :]
        return None


class _Unpacker(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, arrived: Path) -> None:
        super().__init__(buffer)
        self._arrived = arrived

    def persistent_load(self, reference: tuple[bool, int, str]) -> str | Path:
        is_text, index, below = reference
        text = f"{self._arrived / str(index)}{below}"
        return text if is_text else Path(text)
