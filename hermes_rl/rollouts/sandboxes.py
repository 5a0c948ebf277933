"""From a spec and a row to the configuration of the rollout's sandbox."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.errors import UserError
from hermes_rl.sandbox.config import ResourceLimits, SandboxConfig, SandboxFile
from hermes_rl.spec.model import File, Sandbox, Spec
from hermes_rl.spec.templates import render, render_section


def sandbox_config(spec: Spec, row: Row, environ: Mapping[str, str] | None = None) -> SandboxConfig:
    """The sandbox for a row; `environ` has the addresses and keys of backends on other machines.

    Raises:
        TemplateError: a template does not work for this row.
        UserError: a file cannot be read, lies outside of the spec's folder, or is laid down twice.
    """
    section = render_section(spec.sandbox, row.columns, where="sandbox", key=row.key)
    return SandboxConfig(
        backend=section.backend,
        image=_image(section, spec.folder),
        workdir=section.workdir,
        env=dict(section.env),
        packages=tuple(section.python),
        files=laid_files(section.files, spec.folder),
        setup=tuple(section.setup),
        network=section.network,
        limits=ResourceLimits(**section.limits.model_dump()),
        timeout=spec.command_timeout,
        lifetime=section.lifetime,
        keep_processes=section.keep_processes,
        environ=environ,
    )


def reward_args(folder: Path, args: Mapping[str, Any], columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a reward for a row; files to lay down `from` this machine are found in the spec's folder.

    Raises:
        TemplateError: a template does not work for this row.
        UserError: a file lies outside of that folder.
    """
    given: Mapping[str, Any] = render(args, columns, where="rewards")
    files = given.get("files")
    if not isinstance(files, list | tuple):
        return given
    found = [
        {**file, "from": str(_inside(str(file["from"]), folder))}
        if isinstance(file, Mapping) and "from" in file
        else file
        for file in files
    ]
    return {**given, "files": found}


def _image(section: Sandbox, folder: Path) -> str | None:
    """For bubblewrap a path, which a template may have made a relative one; for others a name."""
    if section.image is None or section.backend != "bubblewrap":
        return section.image
    return str(folder / section.image)


def laid_files(files: tuple[File, ...], folder: Path, where: str = "sandbox.files") -> tuple[SandboxFile, ...]:
    """The files that a spec lays down; raises `UserError` for one that cannot be had, or that is there twice."""
    laid = [file for entry in files for file in _expand(entry, folder)]
    targets = [file.to for file in laid]
    for target in targets:
        if targets.count(target) > 1:
            raise UserError(f"{where} lays {target!r} down twice")
    return tuple(laid)


def _expand(entry: File, folder: Path) -> list[SandboxFile]:
    """One entry as files; a folder gives all that is in it."""
    mode = entry.mode
    if entry.content is not None:
        return [SandboxFile(entry.to, entry.content.encode(), 0o644 if mode is None else mode)]
    if entry.base64 is not None:
        try:
            data = base64.b64decode(entry.base64, validate=True)
            return [SandboxFile(entry.to, data, 0o644 if mode is None else mode)]
        except binascii.Error as error:
            raise UserError(f"sandbox.files: {entry.to!r} is not base64: {error}") from error
    source = _inside(str(entry.from_), folder)
    if source.is_dir():
        inner = sorted(path for path in source.rglob("*") if path.is_file())
        return [_read_file(path, f"{entry.to}/{path.relative_to(source)}", mode, folder) for path in inner]
    return [_read_file(source, entry.to, mode, folder)]


def _inside(source: str, folder: Path) -> Path:
    """The path after symlinks; it must stay below the spec's folder, so that a spec cannot take the host's files."""
    path = (folder / source).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise UserError(f"files: from: {source} lies outside of {folder}")
    return path


def _read_file(path: Path, to: str, mode: int | None, folder: Path) -> SandboxFile:
    try:
        real = _inside(str(path), folder)
        return SandboxFile(to, real.read_bytes(), real.stat().st_mode & 0o777 if mode is None else mode)
    except OSError as error:
        raise UserError(f"sandbox.files: {path} cannot be read: {error.strerror}") from error
