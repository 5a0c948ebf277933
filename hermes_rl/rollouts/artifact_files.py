"""Artifacts on the host: one folder per rollout, files and folders only.

Nothing that the agent named is followed or executed: the folder is new, and holds no link through which a name of the
agent could lead elsewhere.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hermes_rl.tools.artifacts import Artifact, File


def keep_artifacts(folder: Path, rollout: str, artifacts: Mapping[str, Artifact]) -> dict[str, Any]:
    """Write a rollout's artifacts below `folder` and describe them, as its record does; blocks.

    An attempt of an earlier run under the same id is replaced.
    """
    own = folder / quote(rollout, safe=":")
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    return {name: _keep(own / quote(name, safe=""), artifact, folder.parent) for name, artifact in artifacts.items()}


def _keep(place: Path, artifact: Artifact, top: Path) -> dict[str, Any]:
    if artifact.problem is not None:
        return {"problem": artifact.problem}
    for file in artifact.files:
        _write(place, file)
    return {
        "path": str(place.relative_to(top)),
        "files": len(artifact.files),
        "bytes": artifact.size,
        "sha256": artifact.digest,
    }


def _write(place: Path, file: File) -> None:
    parts = file.path.split("/") if file.path else []
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"artifact file {file.path!r}")  # no sandbox lists such an entry
    path = place.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600 | file.mode & 0o111)
    with os.fdopen(fd, "wb") as target:
        target.write(file.data)
