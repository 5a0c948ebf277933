"""A file in the sandbox has the expected content."""

from __future__ import annotations

from typing import Any

from hermes_rl import Score


def file_matches(ctx: Any, *, path: str, content: str, exact: bool = False) -> Score:
    """1 if the file at `path` holds `content`, else 0.

    Args:
        path: relative to the working directory, or absolute.
        content: the expected text, compared as UTF-8 bytes.
        exact: also compare the line break at the end; otherwise one at the end of either is ignored.
    """
    try:
        found, wanted = ctx.read_bytes(path), content.encode()
    except OSError as error:
        return Score(0.0, reason=f"{path}: {error.strerror}")
    if not exact:
        found, wanted = found.removesuffix(b"\n"), wanted.removesuffix(b"\n")
    if found == wanted:
        return Score(1.0)
    return Score(0.0, reason=f"the content of {path} differs")
