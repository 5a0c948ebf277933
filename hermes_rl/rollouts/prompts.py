"""From a spec and a row to the messages that a rollout begins with."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from hermes_rl.agent.result import Message
from hermes_rl.data.rows import Row
from hermes_rl.errors import UserError
from hermes_rl.rollouts.images import image_url
from hermes_rl.spec.model import Message as SpecMessage
from hermes_rl.spec.model import Part, Prompt, TextFile, is_template, thaw
from hermes_rl.spec.templates import render, render_text


def messages_of(prompt: Prompt, row: Row, folder: Path = Path()) -> list[Message]:
    """The messages, rendered for the row; relative paths of images begin in `folder`.

    Raises:
        TemplateError: a template does not work for this row.
        UserError: a file of the prompt cannot be read, or an image is none.
    """
    return _Rendering(row, folder).messages(prompt)


def content_of(text: str | TextFile, row: Row, where: str) -> str:
    """One text of a spec, given there or in a file, rendered for the row."""
    return str(_Rendering(row).content(text, where))


def with_thinking(messages: list[Message], thinking: str | None) -> list[Message]:
    """The messages with Atropos' `custom_thinking_prompt` in front of the system message."""
    if not thinking:
        return messages
    first = messages[0] if messages and messages[0]["role"] == "system" else None
    text = f"{thinking}\n\n{first['content']}" if first is not None else thinking
    return [{"role": "system", "content": text}, *messages[1 if first is not None else 0 :]]


class _Rendering:
    """A row, and the place in the spec that an error is to name."""

    def __init__(self, row: Row, folder: Path = Path()) -> None:
        self._row = row
        self._folder = folder

    def messages(self, prompt: Prompt) -> list[Message]:
        if is_template(prompt.messages):
            return [dict(message) for message in self._value(prompt.messages, "prompt.messages")]
        if prompt.messages is not None:
            return [self._message(one, f"prompt.messages[{i}]") for i, one in enumerate(prompt.messages)]
        parts = (("system", prompt.system), ("user", prompt.user))
        return [
            {"role": role, "content": self.content(content, f"prompt.{role}")}
            for role, content in parts
            if content is not None
        ]

    def _message(self, message: SpecMessage, where: str) -> Message:
        content = None if message.content is None else self.content(message.content, f"{where}.content")
        made: Message = {"role": self._text(message.role, f"{where}.role"), "content": content}
        for key in ("name", "reasoning_content", "tool_calls", "tool_call_id"):
            value = getattr(message, key)
            if value is not None:
                made[key] = self._value(thaw(value), f"{where}.{key}")
        return made

    def content(self, content: str | TextFile | tuple[Part, ...], where: str) -> str | list[dict[str, Any]]:
        if isinstance(content, TextFile):
            return self._text(_read(content.file), content.file)
        if isinstance(content, str):
            return self._text(content, where)
        parts = [self._part(part, f"{where}[{number}]") for number, part in enumerate(content)]
        return [part for part in parts if part is not None]

    def _part(self, part: Part, where: str) -> dict[str, Any] | None:
        """A part as the chat API has it; None where the row has no image."""
        if part.text is not None:
            return {"type": "text", "text": self._text(part.text, where)}
        value = self._value(thaw(part.image_url if part.image_url is not None else part.image), where)
        if value is None or value == "":
            return None
        return {"type": "image_url", "image_url": image_url(value, self._folder, where)}

    def _text(self, template: str, where: str) -> str:
        return render_text(template, self._row.columns, where=where, key=self._row.key)

    def _value(self, template: Any, where: str) -> Any:
        return render(template, self._row.columns, where=where, key=self._row.key)


@functools.lru_cache(maxsize=64)
def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
