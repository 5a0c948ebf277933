"""A file in the sandbox has the expected content."""

from __future__ import annotations

import errno
from typing import Any

from hermes_rl import Score


def file_matches(ctx: Any, *, path: str, content: str, exact: bool = False) -> Score:
    """1 if the file at `path` holds `content`, else 0.

    Args:
        path: relative to the working directory, or absolute.
        content: the expected text, compared as UTF-8 bytes.
        exact: also compare the line break at the end; otherwise one at the end of either is ignored.
    """
    wanted = content.encode()
    try:
        found = ctx.read_bytes(path, limit=len(wanted) + 1)  # a line break at its end may be too much
    except OSError as error:
        if error.errno == errno.EFBIG:
            return Score(0.0, reason=f"the content of {path} differs: it is longer")
        return Score(0.0, reason=f"{path}: {error.strerror}")
    if not exact:
        found, wanted = found.removesuffix(b"\n"), wanted.removesuffix(b"\n")
    if found == wanted:
        return Score(1.0)
    return Score(0.0, reason=f"the content of {path} differs")
