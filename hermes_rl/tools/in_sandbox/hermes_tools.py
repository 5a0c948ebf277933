"""Module that a script of `execute_code` imports: one function for each tool, which asks the host to make the call.

The functions have the names of the tools, with their parameters in the schema's order. Each returns the result of the
tool: the value of its JSON, or text.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

_answers, _calls, _parameters = json.loads(os.environ["HERMES_TOOLS"])
_lock = threading.Lock()
for _fd in (_answers, _calls):
    os.set_inheritable(_fd, False)
_reader = os.fdopen(_answers, "rb")


def _call(name: str, arguments: dict[str, Any]) -> Any:
    line = json.dumps({"tool": name, "arguments": arguments}).encode() + b"\n"
    with _lock:
        while line:
            line = line[os.write(_calls, line) :]
        answer = _reader.readline()
    if not answer:
        raise RuntimeError("the tools are out of reach")
    text = json.loads(answer)
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return text


def _function(name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    def call(*values: Any, **keywords: Any) -> Any:
        if len(values) > len(parameters):
            raise TypeError(f"{name}() takes {len(parameters)} arguments at most")
        return _call(name, {**dict(zip(parameters, values)), **keywords})  # noqa: B905 (strict is of Python 3.10)

    call.__name__ = name
    return call


for _name, _of_tool in _parameters.items():
    globals()[_name] = _function(_name, _of_tool)


def json_parse(text: str) -> Any:
    """Return the value of a JSON text; unlike `json.loads`, accepts control characters within strings."""
    return json.loads(text, strict=False)


def shell_quote(text: str) -> str:
    """Return `text` quoted as one word of a shell command."""
    return shlex.quote(text)


def retry(fn: Callable[[], Any], max_attempts: int = 3, delay: float = 2) -> Any:
    """Return the result of `fn`, retried after an exception, each time after twice the delay."""
    for attempt in range(max_attempts):
        try:
            return fn()
        except Exception:
            if attempt + 1 == max_attempts:
                raise
            time.sleep(delay * 2**attempt)
    return None
