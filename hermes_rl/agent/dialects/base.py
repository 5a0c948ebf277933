"""What all dialects of agent programs share: a request, an answer, and what a dialect does with them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hermes_rl.agent.result import Message
from hermes_rl.values import read_bounded, write_message

MOST_MESSAGES = 5_000
UNREAD = "__unparsedToolInput"
"""Where a dialect of objects has arguments that are no JSON object: Claude Code's own name, under which it sends such
arguments back."""
LONGEST_NOTE = 200
"""Characters of what is written down of one field that a program asks for."""


class RefusedRequestError(Exception):
    """A request cannot be answered as it is; the text is what the program is told."""


@dataclass(frozen=True)
class ProgramRequest:
    """One request of a program for an answer of the model, as chat completions have it whatever the dialect."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    stream: bool
    sampling: Mapping[str, Any]
    """What it asks for of sampling, by name; it is written down, and the spec's own is sent."""
    usage_streamed: bool = True
    custom: frozenset[str] = frozenset()
    """Tools that take a text instead of arguments."""


@dataclass(frozen=True)
class ProgramAnswer:
    """An answer of the policy."""

    id: str
    created: int
    model: str
    message: Message
    finish: str
    """As chat completions have it: stop, tool_calls, length or content_filter."""
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None = None
    """Those of the completion that are reasoning, where the engine counts them."""


class ProgramDialect(Protocol):
    """How programs ask for an answer, and how they get it."""

    path: str
    """How the path of a request ends."""

    def read(self, body: Any) -> ProgramRequest:
        """Read the body of a request. Raises `RefusedRequestError` where it has another form, or asks for what no
        answer of ours can hold."""

    def written(self, answer: ProgramAnswer, request: ProgramRequest) -> bytes:
        """Write the body of an answer that is not streamed."""

    def events(self, answer: ProgramAnswer, request: ProgramRequest) -> Iterator[bytes]:
        """Write the events of one that is."""

    def error(self, message: str, code: str) -> bytes:
        """Write the body of an error; `code` is one of ours, such as ``rollout_over``."""


def require_object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RefusedRequestError(f"{what} must be a JSON object")
    return value


def require_list(value: Any, what: str, most: int = MOST_MESSAGES) -> list[dict[str, Any]]:
    """Return a list of objects; raises `RefusedRequestError`."""
    if not isinstance(value, list) or len(value) > most or not all(isinstance(each, dict) for each in value):
        raise RefusedRequestError(f"{what} must be a list of at most {most} objects")
    return value


def require_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise RefusedRequestError(f"{what} must be a text")
    return value


def noted(body: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return what a request says under these names, to be written down: plain values as they are, others as text."""
    values = {name: body[name] for name in names if body.get(name) is not None}
    return {
        name: value if isinstance(value, int | float) else _note(value)
        for name, value in values.items()
        if value not in ([], {}, "")
    }


def _note(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:LONGEST_NOTE]


def joined(parts: Any, kinds: frozenset[str], what: str) -> str | list[dict[str, Any]]:
    """Return a text where the content is nothing but texts, since programs send one text in either form."""
    if parts is None or isinstance(parts, str):
        return parts or ""
    parts = require_list(parts, what)
    if all(str(part.get("type")) in kinds and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    return list(parts)


def addresses_in(messages: Sequence[Message]) -> Iterator[str]:
    """Yield where pictures lie that are not in the messages themselves: a model's server fetches them."""
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            picture = part.get("image_url")
            address = picture.get("url") if isinstance(picture, dict) else picture
            if address is not None and not str(address).startswith("data:"):
                yield str(address)


def text_in(content: Any, kinds: frozenset[str], what: str) -> str:
    """Return a text as `joined` does; raises `RefusedRequestError` where there is anything else, such as a picture."""
    text = joined(content, kinds, what)
    if not isinstance(text, str):
        raise RefusedRequestError(f"{what} must be text alone: nothing else can be shown to the policy")
    return text


def add_text(message: Message, text: str, key: str = "content") -> None:
    """Add a piece to a text of a message that is being read; `join_texts` puts the pieces together.

    Appending to a text copies all that is there already, so that many small pieces would take a time that grows with
    the square of their number.
    """
    message.setdefault(key, []).append(text)


def join_texts(messages: list[Message]) -> list[Message]:
    """Put together the texts to which `add_text` has added, and return the messages."""
    for message in messages:
        for key in ("content", "reasoning_content"):
            if isinstance(pieces := message.get(key), list):
                message[key] = "".join(pieces)
    return messages


def function_call(identity: Any, name: Any, arguments: str) -> dict[str, Any]:
    function = {"name": str(name or ""), "arguments": arguments}
    return {"id": str(identity or ""), "type": "function", "function": function}


def arguments_of(arguments: Any) -> str:
    """Write the object of a call as the arguments that the model has written, or such that mean the same."""
    if isinstance(arguments, dict) and set(arguments) == {UNREAD}:
        unread = arguments[UNREAD]
        text = unread.get("raw") if isinstance(unread, dict) else unread
        if isinstance(text, str):
            return text
    return json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)


def object_of(arguments: str) -> dict[str, Any]:
    """Return the arguments that the model has written as an object, which `arguments_of` reads."""
    try:
        value = read_bounded(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {UNREAD: {"raw": arguments}}


def function_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Return a tool as chat completions have it; raises `RefusedRequestError`."""
    function = {
        "name": require_text(name, "the name of a tool"),
        "description": require_text(description or "", "the description of a tool"),
        "parameters": require_object(parameters or {"type": "object"}, "the parameters of a tool"),
    }
    return {"type": "function", "function": function}


def openai_error(message: str, code: str) -> bytes:
    """Write the body of an error as chat completions and Responses have it."""
    kind = "server_error" if code == "server_error" else "invalid_request_error"
    return write_message({"error": {"message": message, "type": kind, "param": None, "code": code}})


def event(content: Mapping[str, Any], name: str = "") -> bytes:
    """Write one server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + write_message(content) + b"\n\n"
