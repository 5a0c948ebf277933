"""A run directory: where it lies, whose run it holds, and its files.

Owns the path, the check that a directory holds the same run, the lock against a second process, and appending
lines that survive a crash. What the lines say is `hermes_rl.runs.records`.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import yaml

from hermes_rl.errors import RunError, UserError
from hermes_rl.spec.model import Mode, Spec

_BLOCK = 1 << 16


class Journal:
    """A JSONL file that is only appended to; a torn last line of a crashed run is cut off when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file: IO[str] = path.open("a", encoding="utf-8")

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

    def read(self) -> Iterator[dict[str, Any]]:
        """The lines that are there.

        Raises:
            UserError: one of them is no JSON object.
        """
        with self.path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield self._parsed(line, number)

    def _parsed(self, line: str, number: int) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{self.path}:{number}: this line is no JSON object; take it out, or use --fresh")
        return record

    def keep(self, lines: list[dict[str, Any]]) -> None:
        """Replace the content in one step, so that a crash leaves the old or the new."""
        text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
        self._file.close()
        write_atomically(self.path, text)
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()


class RunDirectory:
    """The directory of one run. Use as a context manager: it is locked while open."""

    def __init__(self, path: Path, fingerprint: str = "") -> None:
        self.path = path
        self.fingerprint = fingerprint
        self.held: dict[str, Any] | None = None
        """The `run.json` of an earlier run in this place."""
        self._lock: IO[str] | None = None

    @classmethod
    def choose(cls, spec: Spec, mode: Mode, out: Path | None, *, fresh: bool = False) -> RunDirectory:
        """The directory for this run: `out`, or outputs/<name>/<mode>-<fingerprint>; `fresh`: one beside it.

        Raises:
            UserError: `out` holds another run.
        """
        fingerprint = spec.fingerprint(mode)
        path = out or Path("outputs") / spec.name / f"{mode}-{fingerprint}"
        if fresh:
            path = _beside(path)
        directory = cls(path, fingerprint)
        directory.held = held = _read_json(path / "run.json")
        # A run that failed before its first rollout leaves nothing that could be mixed up.
        if held is not None and held.get("fingerprint") != fingerprint and directory.has_rollouts:
            raise UserError(
                f"{path} holds a run of something else ({held.get('name')}, {held.get('fingerprint')}; this one is "
                f"{spec.name}, {fingerprint}): choose another --out, or --fresh to start beside it"
            )
        return directory

    @property
    def has_rollouts(self) -> bool:
        """True where an earlier run has finished a rollout here."""
        files = (self.path / name for name in ("rollouts.jsonl", "groups.jsonl"))
        return any(file.is_file() and file.stat().st_size > 0 for file in files)

    def __enter__(self) -> RunDirectory:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}; choose another --out") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise UserError(f"another run is using {self.path}; wait for it, or choose another --out") from error
        return self

    def __exit__(self, *exc: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def describe(self, spec: Spec, provenance: dict[str, Any]) -> None:
        """Write `spec.yaml` and `run.json`."""
        text = yaml.safe_dump(spec.resolved(), sort_keys=False, allow_unicode=True, width=110)
        write_atomically(self.path / "spec.yaml", text)
        self.write_json("run.json", {"name": spec.name, "fingerprint": self.fingerprint, **provenance})

    def journal(self, name: str | Path) -> Journal:
        """A JSONL file of the run; an absolute path, or one relative to the working directory, may lie elsewhere."""
        return Journal(self.path / name if isinstance(name, str) else name)

    def write_json(self, name: str, value: Any) -> None:
        write_atomically(self.path / name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is never seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _beside(path: Path) -> Path:
    number = 2
    candidate = path
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); choose another --out, or remove it") from error
    return value if isinstance(value, dict) else {}


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
