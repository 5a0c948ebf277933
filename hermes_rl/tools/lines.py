"""JSON texts, one a line, to and from a process in the sandbox."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from hermes_rl.sandbox.base import Conversation
from hermes_rl.tools.errors import ToolInputError


class Lines:
    """The lines of one conversation.

    Args:
        conversation: with the process; the caller's to close.
        limit: bytes of one line.
    """

    def __init__(self, conversation: Conversation, limit: int) -> None:
        self.conversation = conversation
        self._limit = limit

    async def write(self, value: Any) -> None:
        """Send one value; does nothing when nobody listens any more, which `read` tells."""
        try:
            await self.conversation.write(json.dumps(value).encode() + b"\n")
        except OSError:
            return

    async def read(self) -> AsyncIterator[dict[str, Any]]:
        """The objects that come, until the process closes its output.

        Raises `ToolInputError` for a line that is too long or holds no JSON object.
        """
        rest = bytearray()
        while data := await self.conversation.read():
            rest += data
            *lines, rest = rest.split(b"\n") if b"\n" in data else [rest]
            if max(len(rest), *map(len, lines), 0) > self._limit:
                raise ToolInputError(f"a line of more than {self._limit} bytes came from the script")
            for line in lines:
                yield _object(bytes(line))


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ToolInputError("the script wrote to the pipe of its tool calls")
    return value
