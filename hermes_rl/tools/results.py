"""What tools answer: JSON texts of a bounded size.

Owns the form of answers and errors, and the limits. Nothing of the host (paths, tracebacks) may be in them.
"""

from __future__ import annotations

import json
import re
from typing import Any

RESULT_LIMIT = 100_000
"""Characters that the model is told for one call; of more, head and tail are kept."""
OUTPUT_LIMIT = 50_000
"""Characters of a command's output; less than `RESULT_LIMIT`, so that the JSON around it stays whole."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_HOST_PATH = re.compile(r"(?<![\w.])/(?:[^\s/'\"`:,;()<>\[\]]+/)+(?=[^\s/])")


def as_json(value: Any) -> str:
    """JSON as models read it best: text as it is, not escaped."""
    return json.dumps(value, ensure_ascii=False)


def error_json(message: str) -> str:
    """The answer to a call that failed."""
    return as_json({"error": message})


def capped(text: str, limit: int) -> str:
    """`text`, or its head (40 %) and tail with a line between them that says how much is missing."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 5
    dropped = len(text) - limit
    return f"{text[:head]}\n[... {dropped} characters left out ...]\n{text[-(limit - head) :]}"


def readable(output: bytes) -> str:
    """A command's output for the model: text without terminal control sequences."""
    return capped(_ANSI.sub("", output.decode("utf-8", "replace")).rstrip(), OUTPUT_LIMIT)


def describe(error: BaseException) -> str:
    """An exception in one line, without the folders of files on the host."""
    if isinstance(error, OSError) and error.strerror:
        return f"{type(error).__name__}: {error.strerror}"
    return _HOST_PATH.sub("", f"{type(error).__name__}: {error}".removesuffix(": "))
