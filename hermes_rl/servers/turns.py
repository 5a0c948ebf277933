"""What a model sampled, as an assistant message.

Every call gets an id that no other call of the conversation has. A call that cannot be executed is kept as it was
written, with the problem that the model is told as the answer to it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hermes_rl.servers.base import Message
from hermes_rl.tokens.parsers import Parsed, ParsedCall
from hermes_rl.tokens.parsers.text import without_reasoning
from hermes_rl.tokens.tokenizer import Tokenizer

_ID_LENGTH = 9
"""Characters; some chat templates take no other length."""


def cut_message(tokenizer: Tokenizer, completion: Sequence[int]) -> dict[str, Any]:
    """The message of a turn that was cut: text alone, as a call in it may lack its end."""
    reasoning, content = without_reasoning(tokenizer.decode(completion).rstrip("\ufffd"))
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return {**message, "reasoning_content": reasoning} if reasoning else message


def assistant_message(parsed: Parsed, history: Sequence[Message]) -> dict[str, Any]:
    """The message of a turn that follows `history`."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        turn = sum(one.get("role") == "assistant" for one in history)
        taken = {str(call.get("id")) for one in history for call in one.get("tool_calls") or ()}
        message["tool_calls"] = [_call(call, turn, place, taken) for place, call in enumerate(parsed.calls)]
    return message


def _call(call: ParsedCall, turn: int, place: int, taken: set[str]) -> dict[str, Any]:
    identity = call.id if call.id and call.id not in taken else _fresh(turn, place, taken)
    taken.add(identity)
    arguments = call.raw if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False)
    made: dict[str, Any] = {
        "id": identity,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
    return made if call.problem is None else {**made, "error": call.problem}


def _fresh(turn: int, place: int, taken: set[str]) -> str:
    number = turn * 1000 + place
    while (identity := f"c{number:0{_ID_LENGTH - 1}d}") in taken:
        number += 1
    return identity
