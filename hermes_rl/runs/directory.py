"""A run directory: its path, the run that it belongs to, and its files.

Owns the path, the check that a directory belongs to the same run, and the lock against a second process. Records that
survive a crash belong to `hermes_rl.runs.journal`, their content to `hermes_rl.runs.store`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import IO, Any

import yaml

from hermes_rl.errors import UserError
from hermes_rl.others_files import open_file, read_file
from hermes_rl.repositories.cache import trust
from hermes_rl.runs.journal import Journal, write_atomically
from hermes_rl.runs.provenance import resumed
from hermes_rl.runs.record_check import current_description, problem_of_description
from hermes_rl.spec.fingerprint import fingerprint, fingerprint_parts
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.spec.renamed import current
from hermes_rl.values import read_own_json, write_json

logger = logging.getLogger(__name__)

LONGEST_NAME = 60
"""Characters of a model's name in the name of a directory."""
_adding = threading.Lock()
FORMAT = 2
"""Format version of the files of a run directory; `run.json` contains it under `format`."""


def _open_safely(name: str, flags: int) -> int:
    """Open a file for writing, and neither follow a link nor wait for the reader of a pipe."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


class RunDirectory:
    """Directory of one run. Use it as a context manager: it is locked while open."""

    def __init__(self, path: Path, fingerprint: str = "") -> None:
        self.path = path
        self.fingerprint = fingerprint
        self._lock: IO[str] | None = None

    @classmethod
    def choose(cls, spec: Spec, mode: Mode, out: Path | None, *, fresh: bool = False) -> RunDirectory:
        """Return this run's directory: `out`, or outputs/<name>/<mode>-<model>-<fingerprint>; `fresh`: a new one next
        to it.

        The corrected spec may use the files of a run that failed before its first rollout. Raises `UserError` if `out`
        holds results of another run, or other files that a run would overwrite.
        """
        current = fingerprint(spec, mode)
        path = out or Path("outputs") / spec.name / f"{mode}-{model_name(spec)}-{current}"
        if fresh:
            path = find_free_path(path)
        directory = cls(path, current)
        content = directory.read_run_info()
        for name in ("run.json", "spec.yaml"):
            if "fingerprint" not in content and (path / name).exists() and not directory.has_rollouts:
                raise UserError(f"{path / name} exists and was not written by a run; choose another --out")
        # A run that failed before its first rollout leaves nothing that could be mixed up.
        directory.require_format()
        if content and content.get("fingerprint") != current and directory.has_rollouts:
            changed = ", ".join(changed_parts(content, spec, mode))
            raise UserError(
                f"{path} contains a run of another spec ({content.get('name')}, {content.get('fingerprint')}; this one "
                f"is {spec.name}, {current}{f'; changed: {changed}' if changed else ''}): nothing was changed. "
                "Choose another --out, or use --fresh to start a new run next to it"
            )
        return directory

    def require_format(self) -> None:
        """Raise UserError, with a fix, if an earlier version of hermes-rl wrote the files in another format."""
        form = self.read_run_info().get("format")
        if form != FORMAT and self.has_rollouts and (self.path / "run.json").exists():
            raise UserError(
                f"{self.path} contains a run of an earlier version of hermes-rl (format {form or 1} in run.json; this "
                f"version writes format {FORMAT}), which cannot be resumed: use --fresh to start a new run next to it"
            )

    def sibling(self) -> RunDirectory | None:
        """Return the latest other run of the same spec and mode next to this one, if this one is in its default
        location.
        """
        runs = self.path.parent.glob(f"{self.path.name.partition('-')[0]}-*/run.json")
        others = [RunDirectory(file.parent) for file in sorted(runs, key=lambda file: file.stat().st_mtime)]
        others = [other for other in others if other.path != self.path and other.has_rollouts]
        return others[-1] if others else None

    @property
    def artifacts(self) -> Path:
        """Directory of the artifacts of rollouts; each rollout has a subdirectory."""
        return self.path / "artifacts"

    @property
    def has_rollouts(self) -> bool:
        """True if an earlier run has finished a rollout here."""
        return bool(self._results)

    @property
    def _results(self) -> list[os.stat_result]:
        files = (self.path / name for name in ("rollouts.jsonl", "groups.jsonl"))
        return [status for file in files if file.is_file() and (status := file.stat()).st_size > 0]

    def __enter__(self) -> RunDirectory:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "a", opener=_open_safely)
        except OSError as error:
            raise refusal(self.path, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise UserError(f"another run is using {self.path}; wait for it, or choose another --out") from error
        except OSError:
            # Some network file systems have no locks; a run there is as safe as its user's care.
            logger.warning("%s is on a file system without locks: see to it that no second run uses it", self.path)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def describe(self, spec: Spec, provenance: dict[str, Any]) -> None:
        """Write `spec.yaml` and `run.json`; the recorded images of earlier rollouts remain."""
        run_info = {"format": FORMAT, "name": spec.name, "fingerprint": self.fingerprint, **provenance, "images": {}}
        previous_info = self.read_run_info()
        if "usage" in previous_info:
            run_info["usage"] = previous_info["usage"]
        if results := self._results:
            written = max(result.st_mtime for result in results)
            run_info |= {
                "images": previous_info.get("images") or {},
                **resumed(previous_info, provenance["started"], written),
            }
        self.rewrite(spec, run_info)

    def rewrite(self, spec: Spec, run_info: Mapping[str, Any]) -> None:
        """Write the spec again, with all entries of `run.json`."""
        text = yaml.safe_dump(spec.resolved(), sort_keys=False, allow_unicode=True, width=110)
        self.write_json("run.json", dict(run_info))  # first: it identifies the directory as a run directory
        write_atomically(self.path / "spec.yaml", text.encode())
        with suppress(OSError):  # without a cache the user is asked
            trust(self.code_digest(), f"written by a run: {self.path.absolute()}")

    def code_digest(self) -> str:
        """Return a digest of the files that decide which code runs when the run is graded again: its spec and code in
        it.

        Files that agents have left among the artifacts are ignored, as no run's spec names them.
        """
        digest = hashlib.sha256(read_file(self.path / "spec.yaml"))
        code: list[Path] = []
        for name, folders, files in os.walk(self.path):
            folders[:] = [folder for folder in folders if Path(name, folder) != self.artifacts]
            code += [Path(name, file) for file in files if file.endswith(".py")]
        for path in sorted(code):
            digest.update(f"\0{path.relative_to(self.path)}\0".encode("utf-8", "surrogateescape"))
            digest.update(read_file(path, self.path))
        return digest.hexdigest()

    def add(self, entries: Mapping[str, Any]) -> None:
        """Add entries to `run.json`; several threads of a run may do that at a time."""
        with _adding:
            self.write_json("run.json", {**self.read_run_info(), **entries})

    def add_images(self, images: Mapping[str, Iterable[str]]) -> None:
        """Record digests of images in which rollouts ran, by name; a name may refer to several digests over time."""
        recorded_images = self.read_run_info().get("images") or {}
        merged = {name: sorted({*recorded_images.get(name, ()), *digests}) for name, digests in images.items()}
        if merged != {name: recorded_images.get(name) for name in merged}:
            self.add({"images": {**recorded_images, **merged}})

    def read_run_info(self) -> dict[str, Any]:
        """Return the content of `run.json` of the earlier run; empty if there was none."""
        path = self.path / "run.json"
        try:
            return read_description(path)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error}); choose another --out, or remove it") from error

    def journal(self, name: str | Path) -> Journal:
        """Return a JSONL file of the run; a path, absolute or relative to the working directory, may be elsewhere.

        Raises `RefusedFileError` if the file in the run directory is a link, through which records would be written
        elsewhere, or is not a regular file.
        """
        if isinstance(name, Path):
            return Journal(name)
        with suppress(FileNotFoundError):
            open_file(self.path / name).close()
        return Journal(self.path / name)

    def write_json(self, name: str, value: Any) -> None:
        write_atomically(self.path / name, write_json(value, indent=2) + b"\n")


def read_description(path: Path) -> dict[str, Any]:
    """Return the content of a `run.json` in the form that runs write.

    Raises:
        UserError: it is in another form, too large, a link, or not a regular file; with the name of the key.
        OSError: it does not exist, or may not be read.
    """
    try:
        run_info = current_description(read_own_json(read_file(path)))
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if (problem := problem_of_description(run_info)) is not None:
        raise UserError(f"{path} cannot be read: it {problem}")
    return dict(run_info)


def model_name(spec: Spec) -> str:
    """Return the name of the policy in the directory name: the last part of its model's name, or its type if it has
    none.
    """
    policy = next(iter(spec.servers.get("policy", ())), None)
    if policy is None:
        return "policy"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(policy.model or "").name).strip("-.")
    return name[:LONGEST_NAME] or policy.type


def changed_parts(run_info: Mapping[str, Any], spec: Spec, mode: Mode) -> list[str]:
    """Return the parts of the rollout definition that differ from `run.json`; empty if `run.json` does not contain
    them.
    """
    before = run_info.get("parts") or {}
    now = fingerprint_parts(spec, mode)
    changed = [name for name in now if name in before and before[name] != now[name]]
    return [str(current((name,))[0]) for name in changed]


def refusal(path: Path, error: OSError) -> UserError:
    """Return the error for a run directory that cannot be used, with a fix."""
    file = next((part for part in (path, *path.parents) if part.is_file()), None)
    if file is not None:
        return UserError(f"{path} cannot be a folder: {file} is a file; choose another --out")
    remedy = "choose another --out"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"make room there, or {remedy}"
    elif error.errno in (errno.EACCES, errno.EPERM):
        remedy += ", or one whose folder you may write in"
    return UserError(f"{path} cannot be written: {error.strerror}; {remedy}")


def find_free_path(path: Path) -> Path:
    """Return the first path that does not exist yet: `path` with a number appended to its name."""
    others = (path.with_name(f"{path.name}-{suffix}") for suffix in count(2))
    return next(candidate for candidate in chain([path], others) if not candidate.exists())
