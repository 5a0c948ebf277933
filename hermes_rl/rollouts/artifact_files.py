"""Artifacts on the host: one folder per rollout, files and folders only.

Nothing that the agent named is followed or executed: the folder is new, and holds no link through which a name of the
agent could lead elsewhere.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hermes_rl.errors import UserError
from hermes_rl.tools.artifacts import ArtifactFile, TakenArtifact


def keep_artifacts(folder: Path, rollout: str, artifacts: Mapping[str, TakenArtifact]) -> dict[str, Any]:
    """Write a rollout's artifacts below `folder` and describe them, as its record does; blocks.

    An attempt of an earlier run under the same id is replaced.
    """
    own = folder / quote(rollout, safe=":")
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    return {name: _keep(own / quote(name, safe=""), artifact, folder.parent) for name, artifact in artifacts.items()}


def kept_artifacts(run: Path, record: Mapping[str, Any], names: Iterable[str]) -> dict[str, TakenArtifact]:
    """The artifacts of a rollout from what its record says of them; `run` is the run directory. Blocks.

    Raises:
        UserError: one was not taken, or is no longer there as it was taken.
    """
    missing = [name for name in names if name not in record]
    if missing:
        raise UserError(f"the artifact {missing[0]} was not taken when the rollouts were played; use --fresh")
    return {name: _kept(run, name, record[name]) for name in names}


def _kept(run: Path, name: str, said: Mapping[str, Any]) -> TakenArtifact:
    if "problem" in said:
        return TakenArtifact(name, "", problem=said["problem"])
    place = run / said["path"]
    try:
        found = sorted(path for path in (place, *place.rglob("*")) if path.is_file())
        files = tuple(_read_artifact(path, place) for path in found)
    except OSError as error:
        raise UserError(f"the artifact {place} cannot be read: {error.strerror}") from error
    artifact = TakenArtifact(name, said["target"], files)
    if artifact.digest != said["sha256"]:
        raise UserError(f"the artifact {place} is no longer what was taken of the rollout")
    return artifact


def _read_artifact(path: Path, place: Path) -> ArtifactFile:
    inner = "" if path == place else str(path.relative_to(place))
    return ArtifactFile(inner, path.read_bytes(), 0o644 | path.stat().st_mode & 0o111)


def _keep(place: Path, artifact: TakenArtifact, top: Path) -> dict[str, Any]:
    if artifact.problem is not None:
        return {"problem": artifact.problem}
    for file in artifact.files:
        _write(place, file)
    return {
        "path": str(place.relative_to(top)),
        "target": artifact.target,
        "files": len(artifact.files),
        "bytes": artifact.size,
        "sha256": artifact.digest,
    }


def _write(place: Path, file: ArtifactFile) -> None:
    parts = file.path.split("/") if file.path else []
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"artifact file {file.path!r}")  # no sandbox lists such an entry
    path = place.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600 | file.mode & 0o111)
    with os.fdopen(fd, "wb") as target:
        target.write(file.data)
