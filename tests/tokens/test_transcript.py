"""A message of the history is the one that was sampled only where it says the same."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_rl.tokens.transcript import snapshot


def calling(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("sampled", "sent", "same"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', True),
        ('{"a": 1}', {"a": 1}, True),
        ('{"a": 1}', '{"a": 2}', False),
        ('{"a": NaN}', '{"a": null}', False),
        ('{"a": 1e999}', '{"a": null}', False),
        ("no JSON", "no JSON", True),
        ("[" * 100_000, "[" * 99_999, False),
    ],
)
def test_a_call_whose_arguments_say_the_same_is_known_again(sampled: str, sent: Any, same: bool) -> None:
    assert snapshot(calling(sampled)).has_same_meaning(calling(sent)) is same
