"""A chat server on loopback whose answers a test writes as a function of the conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.env.writer_model import WriterModel

Messages = list[dict[str, Any]]


def call(name: str, said: str | None = None, **arguments: Any) -> dict[str, Any]:
    """An assistant message that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": f"call_{name}", "type": "function", "function": function}]
    return {"role": "assistant", "content": said, "tool_calls": calls}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


class Model(WriterModel):
    def __init__(self, answer: Callable[[Messages], dict[str, Any]]) -> None:
        super().__init__()
        self.answer = answer

    def _message(self, messages: Messages) -> dict[str, Any]:
        return self.answer(messages)
