"""Images of rows, as the chat API takes them: an address, or the bytes themselves in a data URL."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError

KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
"""First bytes of a file → the last part of its media type."""


def image_url(value: Any, folder: Path, where: str) -> dict[str, Any]:
    """The `image_url` of a part.

    Args:
        value: an address (http, https, data), a path, bytes, an image of the `datasets` package (decoded, or
            ``{"bytes", "path"}``), or a mapping as the API has it.
        folder: where relative paths begin.
        where: the place in the spec, for errors.

    Raises:
        UserError: the file cannot be read, or the value is no image.
    """
    if isinstance(value, dict) and "url" in value:
        return value
    if isinstance(value, str) and value.startswith(("http://", "https://", "data:")):
        return {"url": value}
    data = _bytes(value, folder, where)
    kind = next((kind for start, kind in KINDS.items() if data.startswith(start)), None)
    if kind is None:
        raise UserError(f"{where}: this is no PNG, JPEG, GIF or WebP image")
    return {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}


def _bytes(value: Any, folder: Path, where: str) -> bytes:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return (folder / value).read_bytes()
        except OSError as error:
            raise UserError(f"{where}: the image {value} cannot be read: {error.strerror}") from error
    if hasattr(value, "save"):  # decoded by `datasets`, with Pillow
        file = io.BytesIO()
        value.save(file, format="PNG")
        return file.getvalue()
    raise UserError(f"{where}: {type(value).__name__} is no image; give an address, a path or bytes")
