"""Files of JSON lines that survive a crash and have one writer."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
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
        with cannot_write(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("ab", buffering=0)
        try:
            _lock(self._file, path)
        except BaseException:  # whoever asked has no journal to close
            self._file.close()
            raise
        _cut_torn_line(path)

    def append(self, record: dict[str, Any]) -> int:
        """Write one line and hand it to the system; returns where it begins.

        Raises:
            RunError: the file cannot be written (disk full, permission); it ends with the line before.
        """
        return self._write(_line(record))

    def append_all(self, records: Iterable[dict[str, Any]]) -> list[int]:
        """Write several lines together, as `append`; returns where each begins."""
        made = [_line(record) for record in records]
        begin = self._write(b"".join(made))
        return [begin + offset for offset in accumulate((len(line) for line in made[:-1]), initial=0)]

    def append_lines(self, lines: Iterable[bytes]) -> int:
        """Write lines of JSON that are made already, together; as `append`."""
        return self._write(b"".join(line + b"\n" for line in lines))

    def _write(self, line: bytes) -> int:
        begin = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:]) or 0
        except OSError as error:
            # A part of a line would break the next one, where somebody makes room meanwhile.
            with suppress(OSError):
                self._file.truncate(begin)
            raise _unwritable(self.path, error) from error
        return begin

    def read(self, *keys: str) -> Iterator[dict[str, Any]]:
        """Yield the lines that are there.

        Raises:
            UserError: one of them is no JSON object, or lacks one of `keys`.
        """
        for _, record in self.scan(*keys):
            yield record

    def scan(self, *keys: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """As `read`, each line with where it begins."""
        begin = 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                yield begin, self._parsed(line, number, keys)
                begin += len(line)

    @property
    def empty(self) -> bool:
        return os.fstat(self._file.fileno()).st_size == 0

    def at(self, begin: int) -> dict[str, Any]:
        """Return the line that begins there, as `append` or `scan` said."""
        with self.path.open("rb") as lines:
            lines.seek(begin)
            record: dict[str, Any] = json.loads(lines.readline())
            return record

    def _parsed(self, line: bytes, number: int, keys: tuple[str, ...]) -> dict[str, Any]:
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
            with cannot_write(self.path):
                with partial.open("wb") as new:
                    new.writelines(map(_line, lines))
                # The new file is locked before it takes the place of the old one, so that nobody slips in between.
                following: IO[bytes] = partial.open("ab", buffering=0)
                _lock(following, partial)
                partial.replace(self.path)
        except BaseException:  # Ctrl-C too: half a file would stay beside the whole one
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = following

    def close(self) -> None:
        self._file.close()


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is never seen half written.

    Raises:
        RunError: it cannot be written; what was there is still there.
    """
    partial = _partial(path)
    with cannot_write(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except BaseException:  # Ctrl-C too: half a file would stay beside the whole one
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


@contextmanager
def cannot_write(path: Path) -> Iterator[None]:
    """Raise RunError where the file system refuses: the user can make room or choose another place."""
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{path} cannot be written: {error.strerror}. What is complete is kept; the same command goes on from there"
    )


def _line(record: dict[str, Any]) -> bytes:
    # A lone surrogate, which a model can write, has no UTF-8; escaped, it comes back as it was.
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record, allow_nan=False).encode() + b"\n"


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _lock(file: IO[bytes], path: Path) -> None:
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
