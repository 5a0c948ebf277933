"""Messages of processes of user code: large texts pass, and many values do not."""

from __future__ import annotations

import json

import pytest

from hermes_rl.user_code.wire import MOST_BETWEEN, MOST_TEXTS, WireError, from_json, to_json

SIZE = MOST_BETWEEN + 1000


@pytest.mark.parametrize(
    "value",
    [
        "x" * (4 * SIZE),
        "[{,:" * SIZE,
        '"' * SIZE,
        "\\" * SIZE,
        '\\"' * SIZE,
        "\\,\\[" * SIZE,
        b'"' * SIZE,
        ["x, y" * 100] * (MOST_TEXTS // 2),
        [0.123456789] * 100_000,
    ],
    ids=["letters", "commas", "quotes", "backslashes", "both", "pairs", "bytes", "many texts", "many numbers"],
)
def test_large_texts_and_honest_lists_are_carried(value: object) -> None:
    assert from_json(to_json({"call": 1, "returned": value})) == {"call": 1, "returned": value}


@pytest.mark.parametrize(
    "message",
    [
        b"[" + b"0," * SIZE + b"0]",
        b"[" + b"[]," * SIZE + b"0]",
        b"[" * SIZE,
        b" " * SIZE + b"0",
        b"[" + b'"",' * SIZE + b"0]",
        json.dumps({str(key): 0 for key in range(SIZE // 10)}).encode(),
        b"[" + rb'"\\",' * SIZE + b"0]",
        b"[" + rb'"\"",' * SIZE + b"0]",
        b"[" + rb'"\\\\",0,' * (SIZE // 2) + b"0]",
        b'{"a":"' + b'\\\\","' * SIZE,
        b'"' + b"[]," * SIZE,
        b'"\\\\"' + b"[]," * SIZE,
    ],
    ids=range(12),
)
def test_message_of_many_values_is_refused(message: bytes) -> None:
    with pytest.raises(WireError):
        from_json(message)
