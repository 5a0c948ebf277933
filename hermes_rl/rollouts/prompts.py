"""From a spec and a row to the messages that a rollout begins with."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hermes_rl.agent.result import Message
from hermes_rl.errors import UserError
from hermes_rl.spec.model import Message as SpecMessage
from hermes_rl.spec.model import Part, Prompt, TextFile, is_template
from hermes_rl.spec.templates import render, render_text

Columns = Mapping[str, Any]


def messages_of(prompt: Prompt, row: Columns) -> list[Message]:
    """The messages, rendered for the row.

    Raises:
        TemplateError: a template does not work for this row.
        UserError: a file of the prompt cannot be read.
    """
    if is_template(prompt.messages):
        return [dict(message) for message in render(prompt.messages, row, where="prompt.messages")]
    if prompt.messages is not None:
        return [_message(message, row, f"prompt.messages[{i}]") for i, message in enumerate(prompt.messages)]
    messages: list[Message] = []
    if prompt.system is not None:
        messages.append({"role": "system", "content": _content(prompt.system, row, "prompt.system")})
    if prompt.user is not None:
        messages.append({"role": "user", "content": _content(prompt.user, row, "prompt.user")})
    return messages


def _message(message: SpecMessage, row: Columns, where: str) -> Message:
    made: Message = {"role": render_text(message.role, row, where=f"{where}.role")}
    made["content"] = None if message.content is None else _content(message.content, row, f"{where}.content")
    for key in ("name", "reasoning_content", "tool_calls", "tool_call_id"):
        value = getattr(message, key)
        if value is not None:
            made[key] = render(value, row, where=f"{where}.{key}")
    return made


def _content(content: str | TextFile | tuple[Part, ...], row: Columns, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, TextFile):
        return render_text(_read(content.file), row, where=content.file)
    if isinstance(content, str):
        return render_text(content, row, where=where)
    parts = [_part(part, row, f"{where}[{number}]") for number, part in enumerate(content)]
    return [part for part in parts if part is not None]


def _part(part: Part, row: Columns, where: str) -> dict[str, Any] | None:
    if part.text is not None:
        return {"type": "text", "text": render_text(part.text, row, where=where)}
    source = part.image_url if part.image_url is not None else part.image
    value = render(source, row, where=where)
    if value is None or value == "":
        return None
    return {"type": "image_url", "image_url": value if isinstance(value, dict) else {"url": str(value)}}


@functools.lru_cache(maxsize=64)
def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
