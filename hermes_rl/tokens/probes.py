"""Parts of small conversations that show the behaviour of a chat template.

They contain no external text, and their marker words are random, so that no template contains them.
"""

from __future__ import annotations

from typing import Any

from hermes_rl.tokens.texts import stand_in

ANCHOR, RESULT, THOUGHT, ARGUMENT = (stand_in() for _ in range(4))
TOOL_NAME = f"tool_{stand_in()}"
CALL_ID = "c00000000"
QUESTION: dict[str, Any] = {"role": "user", "content": "u"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
    },
}


def make_reply(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def call(name: str, arguments: dict[str, Any], identity: str = CALL_ID) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def answering(role: str) -> dict[str, Any]:
    return {"tool_call_id": CALL_ID, "name": TOOL_NAME} if role == "tool" else {}


def thinking(message: dict[str, Any], thought: bool) -> dict[str, Any]:
    return {**message, "reasoning_content": THOUGHT} if thought else message


def with_call(content: str, argument: str) -> list[dict[str, Any]]:
    """Return a conversation with a call of the tool, and `RESULT`."""
    turn = {**make_reply(content), "tool_calls": [call(TOOL_NAME, {"x": argument})]}
    return [QUESTION, turn, {"role": "tool", **answering("tool"), "content": RESULT}]
