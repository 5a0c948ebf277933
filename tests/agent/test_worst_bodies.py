"""The worst bodies that the bounds of a request allow take a time that grows with their size, in every dialect."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from hermes_rl.agent.conversations import Conversations
from hermes_rl.agent.dialects import dialect_at
from hermes_rl.agent.dialects.base import RefusedRequestError
from hermes_rl.values import read_bounded
from tests.thorough import THOROUGH

SIZE = (8 if THOROUGH else 1) << 20
"""Bytes of the larger body; one of half its size is read beside it."""
MOST = 2_400
"""Entries of a list: half of those that a request may have, as more values than that are counted first."""
GROWTH = 2.5
"""Of the processor time, for twice the size."""
LIMIT = 16 << 20
PATHS = {
    "chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages",
    "google": "/v1beta/models/m:generateContent",
}  # fmt: skip


def user(dialect: str, content: Any) -> dict[str, Any]:
    """Return a message of the user in a dialect; `content` is a text, or parts as the dialect has them."""
    if dialect == "google":
        return {"role": "user", "parts": [{"text": content}] if isinstance(content, str) else content}
    return {"role": "user", "content": content}


def body(dialect: str, messages: list[Any], **more: Any) -> dict[str, Any]:
    name = {"responses": "input", "google": "contents"}.get(dialect, "messages")
    return {"model": "m", name: messages, **({"max_tokens": 9} if dialect == "messages" else {}), **more}


def text_part(dialect: str, text: str) -> dict[str, Any]:
    kind = "input_text" if dialect == "responses" else "text"
    return {"text": text} if dialect == "google" else {"type": kind, "text": text}


def of_the_model(dialect: str, part: dict[str, Any]) -> dict[str, Any]:
    if dialect == "google":
        return {"role": "model", "parts": [part]}
    if dialect == "responses":
        return {"role": "assistant", "content": [{**part, "type": "output_text"}]}
    return {"role": "assistant", "content": [part]}


def tools(dialect: str, count: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {}}
    match dialect:
        case "google":
            return {
                "tools": [{"functionDeclarations": [{"name": f"f{n}", "parameters": schema} for n in range(count)]}]
            }
        case "messages":
            return {"tools": [{"name": f"f{n}", "input_schema": schema} for n in range(count)]}
        case "responses":
            return {"tools": [{"type": "function", "name": f"f{n}", "parameters": schema} for n in range(count)]}
    return {"tools": [{"type": "function", "function": {"name": f"f{n}", "parameters": schema}} for n in range(count)]}


Maker = Callable[[str, int, int], Any]
"""Makes a body of a dialect, with so many entries of a list and so many bytes."""
BODIES: dict[str, Maker] = {
    "one text": lambda d, count, size: body(d, [user(d, "\U0001f600" + "a" * size)]),
    "empty parts behind a long text": lambda d, count, size: body(
        d, [user(d, [text_part(d, "\U0001f600" + "a" * size), *[text_part(d, "")] * count])]
    ),
    "small parts": lambda d, count, size: body(d, [user(d, [text_part(d, "é" * (size // count // 6))] * count)]),
    "messages of the user": lambda d, count, size: body(d, [user(d, "é" * (size // count // 6))] * count),
    "empty messages of the model behind a long one": lambda d, count, size: body(
        d,
        [
            user(d, "go"),
            of_the_model(d, text_part(d, "\U0001f600" + "a" * size)),
            *[of_the_model(d, text_part(d, ""))] * count,
            user(d, "on"),
        ],
    ),
    "tools": lambda d, count, size: body(d, [user(d, "go")], **tools(d, count // 10)),
    "a key that nobody knows": lambda d, count, size: body(d, [user(d, "go")], **{"x" * size: 1}),
    "keys": lambda d, count, size: body(d, [user(d, "go")], **{f"x{each}": "a" * 100 for each in range(count)}),
    "objects in each other": lambda d, count, size: body(d, [user(d, "go")], metadata=[{"a": [[]]}] * count),
    "no messages": lambda d, count, size: [[]] * (size // len("[], ")),
}


def read(dialect: str, data: bytes) -> float:
    """Return the seconds of processor time that a body takes, read and compared with what was asked before."""
    began = time.process_time()
    try:
        known = dialect_at(PATHS[dialect])
        assert known is not None
        query = known.read(read_bounded(data, LIMIT))
        conversations = Conversations()
        answer = {"role": "assistant", "content": "Done."}
        conversations.deliver(conversations.add(query.messages, query.tools, answer))
        conversations.add([*query.messages, answer, {"role": "user", "content": "on"}], query.tools, answer)
    except (RefusedRequestError, ValueError):
        pass  # in time, which is what counts
    return time.process_time() - began


@pytest.mark.generated
@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("dialect", PATHS)
def test_twice_the_size_takes_little_more_than_twice_the_time(dialect: str, kind: str) -> None:
    make = BODIES[kind]
    small, large = (json.dumps(make(dialect, MOST // part, SIZE // part)).encode() for part in (2, 1))
    assert len(large) <= LIMIT
    for _ in range(4):  # a machine that is busy takes longer at one moment than at another
        before = min(read(dialect, small) for _ in range(3))
        after = min(read(dialect, large) for _ in range(3))
        if after <= GROWTH * before + 0.02:
            return
    raise AssertionError(f"{after:.3f} s, where half of it takes {before:.3f} s")


ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    1 << 70,
    1e308,
    "",
    "\ud800",
    [],
    {},
    [[]],
    {"": {}},
    "image_url",
    {"type": "x"},
)


def change(value: Any, chance: random.Random) -> Any:
    """Return a body with one value replaced, doubled or removed, at a place that does not depend on its size."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value)[:9])
        if chance.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: change(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.choice([0, len(value) - 1])
        return [*value[:at], *chance.choice([[], [value[at]] * 2, [change(value[at], chance)]]), *value[at + 1 :]]
    return chance.choice(ODD)


@pytest.mark.generated
def test_drawn_bodies_are_read_or_refused_in_a_time_that_grows_with_their_size() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    seconds = {(dialect, part): 0.0 for dialect in PATHS for part in (2, 1)}
    for number in range(2_000 if THOROUGH else 100):
        dialect, kind = list(PATHS)[number % len(PATHS)], random.Random(f"{seed} {number}").choice(list(BODIES))
        for part in (2, 1):
            chance = random.Random(f"{seed} {number} change")
            drawn = BODIES[kind](dialect, MOST // part // 4, (SIZE >> (7 if THOROUGH else 4)) // part)
            for _ in range(chance.randrange(5)):
                drawn = change(drawn, chance)
            try:
                seconds[dialect, part] += read(dialect, json.dumps(drawn).encode())
            except Exception as error:
                raise AssertionError(f"seed {seed}, number {number}: {dialect}, {kind}") from error
    for dialect in PATHS:
        assert seconds[dialect, 1] <= GROWTH * seconds[dialect, 2] + 0.1, (seed, dialect, seconds)
