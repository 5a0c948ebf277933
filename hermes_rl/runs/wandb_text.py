"""Rollouts as readable text for wandb, with the limits that Atropos' users know."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_rl.agent.result import reasoning_of, text_of

REASONING, ARGUMENTS, RESULTS = 300, 200, 500
"""Characters of each that are shown."""


def readable(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the conversation, a block per message."""
    return "\n".join(line for message in messages for line in _message_lines(message))


def _message_lines(message: Mapping[str, Any]) -> list[str]:
    role, text = str(message.get("role")), text_of(message.get("content"))
    if role == "tool":
        return [f"[TOOL RESULT] {cut(text, RESULTS)}"]
    if role != "assistant":
        return [f"[{role.upper()}]", text]
    reasoning = reasoning_of(message)
    lines = [f"[ASSISTANT thinking] {cut(reasoning, REASONING)}"] if reasoning else []
    if text:
        lines += ["[ASSISTANT]", text]
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        arguments_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        lines.append(f"[TOOL CALL] {call['function']['name']}({cut(arguments_text, ARGUMENTS)})")
    return lines


def cut(text: str, limit: int) -> str:
    """Return at most `limit` characters, with a mark where text was omitted."""
    return text if len(text) <= limit else text[:limit] + "..."
