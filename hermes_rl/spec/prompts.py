"""Build the first messages of a rollout from a spec's prompt and a row."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hermes_rl.errors import UserError
from hermes_rl.others_files import read_regular
from hermes_rl.spec.argument_types import ChatMessages
from hermes_rl.spec.row_files import image_url
from hermes_rl.spec.section import is_template, to_plain
from hermes_rl.spec.sections.prompt import Message as SpecMessage
from hermes_rl.spec.sections.prompt import Part, Prompt
from hermes_rl.spec.sections.tools import TextFile
from hermes_rl.spec.templates import coerce, render, render_text

Message = dict[str, Any]


class PromptRow(Protocol):
    """The parts of a row that a prompt uses."""

    @property
    def key(self) -> str: ...

    @property
    def columns(self) -> Mapping[str, Any]: ...


def messages_of(prompt: Prompt, row: PromptRow, folder: Path = Path(), location: str = "prompt") -> list[Message]:
    """Return the messages, rendered for the row.

    `location` is the prompt's path in the spec; `folder` is the base of relative image paths. Raises `TemplateError`
    if a template fails for this row or an image is invalid, and `UserError` if a file of the prompt cannot be read.
    """
    return _Rendering(row, folder).messages(prompt, location)


def content_of(text: str | TextFile, row: PromptRow, location: str) -> str:
    """Return one text of a spec, inline or from a file, rendered for the row."""
    return str(_Rendering(row).content(text, location))


class _Rendering:
    """A row, and the path in the spec for error messages."""

    def __init__(self, row: PromptRow, folder: Path = Path()) -> None:
        self._row = row
        self._folder = folder

    def messages(self, prompt: Prompt, location: str) -> list[Message]:
        messages_location = f"{location}.messages"
        if is_template(prompt.messages):
            return self._checked(self._value(prompt.messages, messages_location), messages_location)
        if prompt.messages is not None:
            return self._checked(
                [self._message(one, f"{messages_location}[{i}]") for i, one in enumerate(prompt.messages)],
                messages_location,
            )
        parts = (("system", prompt.system), ("user", prompt.user))
        return [
            {"role": role, "content": self.content(content, f"{location}.{role}")}
            for role, content in parts
            if content is not None
        ]

    def _checked(self, messages: Any, location: str) -> list[Message]:
        checked: list[Message] = coerce(messages, ChatMessages, location=location, key=self._row.key)
        return checked

    def _message(self, message: SpecMessage, location: str) -> Message:
        content = None if message.content is None else self.content(message.content, f"{location}.content")
        written: Message = {"role": self._text(message.role, f"{location}.role"), "content": content}
        for key in ("name", "reasoning_content", "tool_calls", "tool_call_id"):
            value = getattr(message, key)
            if value is not None:
                written[key] = self._value(to_plain(value), f"{location}.{key}")
        return written

    def content(self, content: str | TextFile | tuple[Part, ...], location: str) -> str | list[dict[str, Any]]:
        if isinstance(content, TextFile):
            return self._text(_read_prompt_file(content.file), content.file)
        if isinstance(content, str):
            return self._text(content, location)
        parts = [self._part(part, f"{location}[{index}]") for index, part in enumerate(content)]
        return [part for part in parts if part is not None]

    def _part(self, part: Part, location: str) -> dict[str, Any] | None:
        """Return a part in the form of the chat API, or None if the row has no image."""
        if part.text is not None:
            return {"type": "text", "text": self._text(part.text, location)}
        location = f"{location}.{'image' if part.image_url is None else 'image_url'}"
        value = self._value(to_plain(part.image if part.image_url is None else part.image_url), location)
        if value is None or value == "":
            return None
        return {"type": "image_url", "image_url": image_url(value, self._folder, location)}

    def _text(self, template: str, location: str) -> str:
        return render_text(template, self._row.columns, location=location, key=self._row.key)

    def _value(self, template: Any, location: str) -> Any:
        return render(template, self._row.columns, location=location, key=self._row.key)


@functools.lru_cache(maxsize=64)
def _read_prompt_file(path: str) -> str:
    try:
        return read_regular(Path(path)).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
