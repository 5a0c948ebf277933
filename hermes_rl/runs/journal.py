"""JSONL files that survive a crash and have one writer."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

from hermes_rl.errors import RunError, UserError
from hermes_rl.others_files import append_to
from hermes_rl.runs.record_check import current_record
from hermes_rl.values import read_own_json, write_message

_BLOCK = 1 << 16
LONGEST_LINE = 256 << 20
"""Maximum bytes of a record; a longer one cannot be read."""


class Journal:
    """A JSONL file that is only appended to.

    It is locked while open: two runs may name the same file outside a run directory. Opening changes nothing in it,
    since it may be another program's file: an incomplete record after a crash is not read, and is cut off before the
    first write. Raises `UserError` if another process has it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with cannot_write(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = append_to(path)
        try:
            _lock_file(self._file, path)
        except BaseException:  # the caller has no journal to close
            self._file.close()
            raise
        self._mended = False

    def append(self, record: dict[str, Any]) -> int:
        """Write one record and flush it to the system; return its offset.

        Raises `RunError` if the file cannot be written (disk full, permission); the file then ends with the previous
        record. Raises `UserError` if it ends with a line that no run has written.
        """
        return self._write(write_message(record) + b"\n")

    def append_all(self, records: Iterable[dict[str, Any]]) -> list[int]:
        """Write several records together, as `append`; return the offset of each."""
        lines = [write_message(record) + b"\n" for record in records]
        start = self._write(b"".join(lines))
        return [start + offset for offset in accumulate((len(line) for line in lines[:-1]), initial=0)]

    def append_lines(self, lines: Iterable[bytes]) -> int:
        """Write encoded JSON records together, as `append`."""
        return self._write(b"".join(line + b"\n" for line in lines))

    def _write(self, line: bytes) -> int:
        self._mend()
        start = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:]) or 0
        except OSError as error:
            # A partial record would corrupt the next one if disk space becomes available meanwhile.
            with suppress(OSError):
                self._file.truncate(start)
            raise _write_error(self.path, error) from error
        return start

    def _mend(self) -> None:
        """Repair the last record after a crash: add its newline or remove it.

        Raises UserError if no run has written it.
        """
        if self._mended:
            return
        with cannot_write(self.path), self.path.open("rb+") as file:
            end = _end_of_lines(file)
            size = file.seek(0, os.SEEK_END)
            self._require_short(size - end, "last line")
            file.seek(end)
            rest = file.read(size - end)
            if is_torn(rest):
                file.truncate(end)
            elif rest:
                self._parsed(rest, "last line", ())
                file.write(b"\n")
        self._mended = True

    def read(self, *keys: str) -> Iterator[dict[str, Any]]:
        """Yield the existing records; raises UserError if one is not a JSON object, or lacks one of `keys`."""
        for _, record in self.scan(*keys):
            yield record

    def scan(self, *keys: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the records as `read` does, each with its offset."""
        start = 0
        with self.path.open("rb") as lines:
            for line_number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE), b""), 1):
                self._require_short(len(line), line_number)
                if not is_torn(line):
                    yield start, self._parsed(line, line_number, keys)
                start += len(line)

    @property
    def empty(self) -> bool:
        return next(self.scan(), None) is None

    def read_at(self, start: int) -> dict[str, Any]:
        """Return the record at this offset, as returned by `append` or `scan`."""
        with self.path.open("rb") as lines:
            lines.seek(start)
            record: dict[str, Any] = current_record(read_own_json(lines.readline()))
            return record

    def _require_short(self, size: int, line_number: int | str) -> None:
        if size >= LONGEST_LINE:
            max_size = f"{LONGEST_LINE >> 20} MiB"
            raise UserError(f"{self.path}:{line_number}: this line has {max_size} or more; take it out, or use --fresh")

    def _parsed(self, line: bytes, line_number: int | str, keys: tuple[str, ...]) -> dict[str, Any]:
        try:
            record = current_record(read_own_json(line))
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{self.path}:{line_number}: this line is not a JSON object; remove it, or use --fresh")
        missing = [key for key in keys if key not in record]
        if missing:
            raise UserError(
                f"{self.path}:{line_number}: this line has no {missing[0]!r}, so no run of this kind wrote it; "
                "take it out, "
                "or choose another place for the run"
            )
        return record

    def keep(self, lines: Iterable[dict[str, Any]]) -> None:
        """Replace the content atomically, so that a crash leaves the old or the new; `lines` may come from `read`."""
        with replaced(self.path) as partial:
            with partial.open("wb") as new:
                new.writelines(write_message(line) + b"\n" for line in lines)
            # The new file is locked before it replaces the old one, so that no other process gets the lock in between.
            following: IO[bytes] = partial.open("ab", buffering=0)
            _lock_file(following, partial)
        self._file.close()
        self._file, self._mended = following, True

    def close(self) -> None:
        self._file.close()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically; raises RunError if it cannot be written, and the old file then stays."""
    with replaced(path) as partial:
        partial.write_bytes(data)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary path that atomically replaces `path` afterwards, unless an exception is raised.

    Raises `RunError` if the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with cannot_write(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            partial.replace(path)
        except BaseException:  # Also on Ctrl-C: leave no partial file next to the complete one
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


@contextmanager
def cannot_write(path: Path) -> Iterator[None]:
    """Raise RunError if the file system refuses: the user can free space or choose another location."""
    try:
        yield
    except OSError as error:
        raise _write_error(path, error) from error


def _write_error(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{path} cannot be written: {error.strerror}. Complete results are saved; the same command resumes the run"
    )


def _lock_file(file: IO[bytes], path: Path) -> None:
    in_use = False
    try:
        # Some network file systems have no locks; a run there is as safe as its user's care.
        with suppress(OSError):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                in_use = True
        # Its holder may have replaced it between opening and locking.
        in_use = in_use or not os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        in_use = True
    if in_use:
        raise UserError(f"another run is using {path}; wait for it, or choose another path")


def is_torn(line: bytes) -> bool:
    """Return True if a line is the incomplete rest of a record after a crash: it starts like one and has no newline.

    A file system may have recorded the length of the data without its content, which is then zeros.
    """
    if line.endswith(b"\n") or not b'{"'.startswith(line[:2].rstrip(b"\0")):
        return False
    try:
        read_own_json(line)
    except ValueError:
        return True
    return False


def _end_of_lines(file: IO[bytes]) -> int:
    """Return the offset after the last newline of a file, or 0 if it has none."""
    start = file.seek(0, os.SEEK_END)
    while start > 0:
        start, end = max(0, start - _BLOCK), start
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
    return 0
