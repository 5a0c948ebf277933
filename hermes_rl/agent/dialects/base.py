"""Define the requests, replies and methods that all dialects of agent programs share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hermes_rl.agent.result import Message
from hermes_rl.values import read_object, write_message

MOST_MESSAGES = 5_000
UNPARSED_INPUT_KEY = "__unparsedToolInput"
"""Key for arguments that are not a JSON object, in dialects that send objects: the name that Claude Code uses when it
sends such arguments back.
"""
LONGEST_NOTE = 200
"""Characters of one requested field that are recorded."""


class RefusedRequestError(Exception):
    """A request cannot be processed; the text is sent to the program."""


@dataclass(frozen=True)
class ProgramRequest:
    """One model request of a program, in the form of chat completions for every dialect."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    stream: bool
    sampling: Mapping[str, Any]
    """Requested sampling options by name. They are recorded; the spec's options are used instead."""
    usage_streamed: bool = True
    custom: frozenset[str] = frozenset()
    """Tools that take a text instead of arguments."""


@dataclass(frozen=True)
class ProgramAnswer:
    """One reply of the policy."""

    id: str
    created: int
    model: str
    message: Message
    finish: str
    """Finish reason as in chat completions: stop, tool_calls, length or content_filter."""
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None = None
    """Reasoning tokens of the completion, if the engine counts them."""


class ProgramDialect(Protocol):
    """Request and reply format of an API for agent programs."""

    path: str
    """Suffix of the request path."""

    def read(self, body: Any) -> ProgramRequest:
        """Parse the body of a request.

        Raises:
            RefusedRequestError: the body has another form, or requests a feature that hermes-rl does not support.
        """

    def written(self, answer: ProgramAnswer, request: ProgramRequest) -> bytes:
        """Return the body of a reply that is not streamed."""

    def events(self, answer: ProgramAnswer, request: ProgramRequest) -> Iterator[bytes]:
        """Yield the events of a streamed reply."""

    def error(self, message: str, code: str) -> bytes:
        """Return the body of an error; `code` is one of hermes-rl's codes, such as ``rollout_over``."""


def require_object(value: Any, label: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RefusedRequestError(f"{label} must be a JSON object")
    return value


def require_list(value: Any, label: str, max_items: int = MOST_MESSAGES) -> list[dict[str, Any]]:
    """Return a list of objects; raises `RefusedRequestError`."""
    if not isinstance(value, list) or len(value) > max_items or not all(isinstance(each, dict) for each in value):
        raise RefusedRequestError(f"{label} must be a list of at most {max_items} objects")
    return value


def require_text(value: Any, label: str) -> str:
    if not isinstance(value, str):
        raise RefusedRequestError(f"{label} must be a text")
    return value


def noted(body: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the named fields of a request for recording: plain values unchanged, others as text."""
    values = {name: body[name] for name in names if body.get(name) is not None}
    return {
        name: value if isinstance(value, int | float) else _cut_note(value)
        for name, value in values.items()
        if value not in ([], {}, "")
    }


def _cut_note(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:LONGEST_NOTE]


def joined(parts: Any, kinds: frozenset[str], label: str) -> str | list[dict[str, Any]]:
    """Return a text if the content consists only of texts, because programs send one text in either form."""
    if parts is None or isinstance(parts, str):
        return parts or ""
    parts = require_list(parts, label)
    if all(str(part.get("type")) in kinds and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    return list(parts)


def addresses_in(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the addresses of images that are not embedded in the messages: a model server fetches these."""
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            picture = part.get("image_url")
            address = picture.get("url") if isinstance(picture, dict) else picture
            if address is not None and not str(address).startswith("data:"):
                yield str(address)


def text_in(content: Any, kinds: frozenset[str], label: str) -> str:
    """Return a text as `joined` does; raise `RefusedRequestError` if the content includes other parts, such as an
    image.
    """
    text = joined(content, kinds, label)
    if not isinstance(text, str):
        raise RefusedRequestError(f"{label} must be text alone: nothing else can be shown to the policy")
    return text


def add_text(message: Message, text: str, key: str = "content") -> None:
    """Append a piece to a text of a message that is being parsed; `join_texts` joins the pieces.

    Appending to a string copies it, which would take quadratic time for many small pieces.
    """
    message.setdefault(key, []).append(text)


def join_texts(messages: list[Message]) -> list[Message]:
    """Join the pieces that `add_text` appended, and return the messages."""
    for message in messages:
        for key in ("content", "reasoning_content"):
            if isinstance(chunks := message.get(key), list):
                message[key] = "".join(chunks)
    return messages


def function_call(identity: Any, name: Any, arguments: str) -> dict[str, Any]:
    function = {"name": str(name or ""), "arguments": arguments}
    return {"id": str(identity or ""), "type": "function", "function": function}


def arguments_of(arguments: Any) -> str:
    """Return the arguments of a call as the model wrote them, or an equivalent text."""
    if isinstance(arguments, dict) and set(arguments) == {UNPARSED_INPUT_KEY}:
        unread = arguments[UNPARSED_INPUT_KEY]
        text = unread.get("raw") if isinstance(unread, dict) else unread
        if isinstance(text, str):
            return text
    return json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)


def object_of(arguments: str) -> dict[str, Any]:
    """Return the model's arguments as an object that `arguments_of` can read."""
    value = read_object(arguments or "{}")
    return {UNPARSED_INPUT_KEY: {"raw": arguments}} if value is None else value


def function_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Return a tool in the form of chat completions; raises `RefusedRequestError`."""
    function = {
        "name": require_text(name, "the name of a tool"),
        "description": require_text(description or "", "the description of a tool"),
        "parameters": require_object(parameters or {"type": "object"}, "the parameters of a tool"),
    }
    return {"type": "function", "function": function}


def openai_error(message: str, code: str) -> bytes:
    """Return the body of an error in the form of chat completions and Responses."""
    kind = "server_error" if code == "server_error" else "invalid_request_error"
    return write_message({"error": {"message": message, "type": kind, "param": None, "code": code}})


def event(content: Mapping[str, Any], name: str = "") -> bytes:
    """Return one encoded server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + write_message(content) + b"\n\n"
