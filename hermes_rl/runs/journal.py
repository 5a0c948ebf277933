"""Files of JSON lines that survive a crash and have one writer."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hermes_rl.errors import RunError, UserError

_BLOCK = 1 << 16


class Journal:
    """A JSONL file that is only appended to; a torn last line of a crashed run is cut off when it is opened.

    It is locked while open: a file outside of the run directory may be named by two runs.

    Raises:
        UserError: another process has it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("a", encoding="utf-8")
        try:
            _lock(self._file, path)
        except BaseException:
            self._file.close()
            raise
        _cut_torn_line(path)

    def append(self, record: dict[str, Any]) -> None:
        """Write one line and hand it to the system.

        Raises:
            RunError: the file cannot be written (disk full, permission).
        """
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror}. What is complete is kept") from error

    def read(self, *keys: str) -> Iterator[dict[str, Any]]:
        """The lines that are there.

        Raises:
            UserError: one of them is no JSON object, or lacks one of `keys`.
        """
        with self.path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield self._parsed(line, number, keys)

    def _parsed(self, line: str, number: int, keys: tuple[str, ...]) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{self.path}:{number}: this line is no JSON object; take it out, or use --fresh")
        missing = [key for key in keys if key not in record]
        if missing:
            raise UserError(
                f"{self.path}:{number}: this line has no {missing[0]!r}, so no run of this kind wrote it; take it out, "
                "or choose another place for the run"
            )
        return record

    def keep(self, lines: Iterable[dict[str, Any]]) -> None:
        """Replace the content in one step, so that a crash leaves the old or the new; `lines` may come from `read`."""
        partial = _partial(self.path)
        try:
            with partial.open("w", encoding="utf-8") as new:
                for line in lines:
                    new.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            # The new file is locked before it takes the place of the old one, so that nobody slips in between.
            following: IO[str] = partial.open("a", encoding="utf-8")
            _lock(following, partial)
            partial.replace(self.path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = following

    def close(self) -> None:
        self._file.close()


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is never seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _lock(file: IO[str], path: Path) -> None:
    taken = False
    try:
        # Some network file systems have no locks; a run there is as safe as its user's care.
        with suppress(OSError):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                taken = True
        # Its holder may have replaced it between opening and locking.
        taken = taken or not os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        taken = True
    if taken:
        raise UserError(f"another run is using {path}; wait for it, or choose another place")


def _cut_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        whole = end
        while whole > 0:
            start = max(0, whole - _BLOCK)
            file.seek(start)
            found = file.read(whole - start).rfind(b"\n")
            whole = start + found + 1 if found >= 0 else start
            if found >= 0:
                break
        if whole != end:
            file.truncate(whole)
