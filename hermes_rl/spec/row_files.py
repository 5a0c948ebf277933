"""Files and images that the values of a row name: found and checked the same way by `validate` and by a run.

A file lies below the spec's folder after symlinks, since it is the host's. Copying files into a sandbox belongs to
`hermes_rl.rollouts.sandboxes`.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hermes_rl.others_files import RefusedFileError, read_file
from hermes_rl.spec.section import TEMPLATE_MARK
from hermes_rl.spec.sections.common import File
from hermes_rl.spec.sections.prompt import UserWords
from hermes_rl.spec.suggest import choices
from hermes_rl.spec.templates import TemplateError


class PlacedFile(NamedTuple):
    """A file for a sandbox: its path there, its bytes or the file that has them, and its permissions."""

    to: str
    data: bytes | Path
    mode: int | None


def placed_files(files: Sequence[File], folder: Path, location: str = "sandbox.files") -> list[PlacedFile]:
    """Return the rendered files of a spec; a folder gives all files in it. Raises `TemplateError` for one that cannot
    be had, or that is there twice."""
    placed = [each for file in files for each in _placed_files(file, folder, location)]
    targets: set[str] = set()
    for each in placed:
        target = posixpath.normpath(each.to)
        if target in targets:
            raise TemplateError(f"two files are put at {each.to!r}", location=location)
        targets.add(target)
    return placed


def _placed_files(file: File, folder: Path, location: str) -> list[PlacedFile]:
    sources = {"content": file.content, "from": file.from_, "base64": file.base64}
    if sum(value is not None for value in sources.values()) != 1:
        raise TemplateError(f"{file.to!r} needs exactly one of content, from, base64", location=location)
    source = None if file.from_ is None else source_of(file.from_, folder, location)
    if source is not None and source.is_dir():
        file_paths = sorted(path for path in source.rglob("*") if path.is_file())
        return [
            PlacedFile(f"{file.to}/{path.relative_to(source)}", source_of(str(path), folder, location), file.mode)
            for path in file_paths
        ]
    if file.to.endswith("/") or posixpath.basename(file.to) in (".", "..", "~"):
        raise TemplateError(f"{file.to!r} is a folder; give the path of the file", location=location)
    if source is not None:
        return [PlacedFile(file.to, source, file.mode)]
    if file.content is not None:
        return [PlacedFile(file.to, file.content.encode(), file.mode)]
    try:
        return [PlacedFile(file.to, base64.b64decode("".join((file.base64 or "").split()), validate=True), file.mode)]
    except (binascii.Error, ValueError):  # other characters than ASCII are a ValueError
        raise TemplateError(f"{file.to!r} is not base64", location=location) from None


def require_offered(turns: Sequence[UserWords], names: Collection[str]) -> None:
    """Raise `TemplateError` for a tool that a scripted user message names but the agent does not have."""
    for index, each in enumerate(turns):
        for tool in each.tools or ():
            if tool not in names:
                message = f"there is no tool {tool!r}{choices(tool, names)}"
                raise TemplateError(message, location=f"user.turns.{index}.tools")


def require_in_home(workdir: str | None, targets: Sequence[str]) -> None:
    """Raise `TemplateError` for a path of a sandbox of the backend none outside of its home directory."""
    located_paths = [(workdir or "", "sandbox.workdir")]
    for path, location in [*located_paths, *((to, f"sandbox.files.{index}.to") for index, to in enumerate(targets))]:
        if path.startswith("/") or ".." in path.split("/"):
            message = (
                f"the path {path!r} is outside of the home directory; without a sandbox (backend none) it would be a "
                "path of this machine"
            )
            raise TemplateError(message, location=location)


def source_of(source: str, folder: Path, location: str) -> Path:
    """Return the path of a host file or directory after resolving symlinks. Raises `TemplateError` if it cannot be
    read, or is outside the spec's directory."""
    try:
        path = (folder / source).resolve()
        is_usable = path.is_file() or path.is_dir()
    except (OSError, ValueError) as error:  # the name is too long, or holds a null byte
        reason = getattr(error, "strerror", error)
        raise TemplateError(f"the file {source[:200]!r} cannot be read: {reason}", location=location) from None
    if not path.is_relative_to(folder.resolve()):
        raise TemplateError(
            f"{source[:200]!r} lies outside of {folder}: put it there, or let the row give its text as `content`",
            location=location,
        )
    if not is_usable or not os.access(path, os.R_OK):
        raise TemplateError(
            f"there is no file or directory {source[:200]!r} in {folder} that can be read", location=location
        )
    return path


def image_path(image: str, template: str, folder: Path, location: str) -> Path:
    """Return the path of the root file system of a sandbox.

    Raises `TemplateError` if a value of the row leads outside the directories that the template itself names: the agent
    could then read any directory of this machine.
    """
    match = TEMPLATE_MARK.search(template)
    if match is not None:
        allowed_folders = [_normalize(folder / each) for each in _folders_in_template(template, match.start())]
        if not any(_normalize(folder / image).is_relative_to(each) for each in allowed_folders):
            raise TemplateError(
                f"{image[:200]!r} is outside {allowed_folders[0]}: start the template with the directory of the "
                "images, "
                'as in image: "/data/images/{{ image }}"',
                location=location,
            )
    return folder / image


def _normalize(path: Path) -> Path:
    """Return a path without `..`, and with one leading slash."""
    return Path("/", os.path.normpath(path).lstrip("/"))


def _folders_in_template(template: str, start: int) -> list[str]:
    """Return the directory in front of the first template, and the directories below / at the start of texts in
    templates."""
    return [
        template[: template.rfind("/", 0, start) + 1],
        *re.findall(r"(?:['\"]|%\})(/[^'\"{/]+/(?:[^'\"{/]*/)*)", template),
    ]


def located_files(files: Any, folder: Path, location: str) -> Any:
    """Return the files that a reward is given with the paths of their sources; raises as `source_of`."""
    if not isinstance(files, list | tuple):
        return files
    return [
        {**file, "from": str(source_of(str(file["from"]), folder, location))}
        if isinstance(file, Mapping) and file.get("from") is not None
        else file
        for file in files
    ]


LOCATED_ARGUMENTS = ("files", "reference")
"""Arguments of rewards that may name files of this machine."""

# ----------------- Images of rows, as the chat API takes them: an address, or the bytes themselves in a data URL

IMAGE_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
"""First bytes of a file → the last part of its media type."""
ADDRESSES = ("http://", "https://", "data:")


def image_url(value: Any, folder: Path, location: str) -> dict[str, Any]:
    """Return the `image_url` of a part.

    Args:
        value: an address (http, https, data), a path, bytes, an image of the `datasets` package (decoded, or
            ``{"bytes", "path"}``), or a mapping as the API has it.
        folder: base of relative paths.
        location: the path in the spec, for errors.

    Raises:
        TemplateError: the file cannot be read, or the value is not an image.
    """
    if isinstance(value, Mapping) and "url" in value:
        if not isinstance(value["url"], str) or not value["url"].startswith(ADDRESSES):
            raise TemplateError("the `url` of an image starts with http://, https:// or data:", location=location)
        return dict(value)
    if isinstance(value, str) and value.startswith(ADDRESSES):
        return {"url": value}
    data = _image_bytes(value, folder, location)
    kind = next((kind for start, kind in IMAGE_KINDS.items() if data.startswith(start)), None)
    if kind is None:
        raise TemplateError("the file is not a PNG, JPEG, GIF or WebP image", location=location)
    return {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}


def _image_bytes(value: Any, folder: Path, location: str) -> bytes:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return read_file(folder / value)
        except (OSError, ValueError, RefusedFileError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TemplateError(f"the image {value[:200]!r} cannot be read: {reason}", location=location) from error
    if hasattr(value, "save"):  # decoded by `datasets`, with Pillow
        file = io.BytesIO()
        value.save(file, format="PNG")
        return file.getvalue()
    raise TemplateError(
        f"{type(value).__name__} is not an image; expected an address, a path or bytes", location=location
    )
