"""Which format of tool calls a chat template writes: found by letting it write one and reading it again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hermes_rl.tokens.tokenizer import Tokenizer

NAME, ARGUMENTS = "toolxq7z", {"x": "argxq7z"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
    },
}
_SAID, _RESULT = "saidxq7z", "resultxq7z"
_QUESTION: dict[str, Any] = {"role": "user", "content": "u"}
_CUTS = 6


def written_calls(tokenizer: Tokenizer) -> Iterator[str]:
    """What the template makes of a call, cut at each of the control tokens behind it; raises `TemplateRefused`."""
    text = _turn(tokenizer)
    inner = text.rfind(str(ARGUMENTS["x"]))
    if inner < 0:
        return
    places = sorted({place for token in tokenizer.control for place in _found(text, token, inner)})[:_CUTS]
    for place in places or [len(text)]:
        yield text[:place]
    yield text


def _turn(tokenizer: Tokenizer) -> str:
    """From the beginning of an assistant turn with a call to the result of the call."""
    with_text = tokenizer.render(_conversation(_SAID), [TOOL], add_generation_prompt=False)
    if _SAID in with_text:
        return _before_result(with_text.rpartition(_SAID)[2])
    text = tokenizer.render(_conversation(""), [TOOL], add_generation_prompt=False)
    asked = tokenizer.render([_QUESTION], [TOOL], add_generation_prompt=True)
    same = next((i for i, pair in enumerate(zip(text, asked, strict=False)) if pair[0] != pair[1]), len(asked))
    common = text[:same]
    ends = [place + len(token) for token in (*tokenizer.control, "\n") if (place := common.rfind(token)) >= 0]
    return _before_result(text[max(ends, default=len(common)) :])


def _before_result(text: str) -> str:
    return text.partition(_RESULT)[0]


def _conversation(said: str) -> list[dict[str, Any]]:
    call = {"id": "callxq7z0", "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
    return [
        _QUESTION,
        {"role": "assistant", "content": said, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "callxq7z0", "name": NAME, "content": _RESULT},
    ]


def _found(text: str, token: str, start: int) -> Iterator[int]:
    place = text.find(token, start)
    if place >= 0:
        yield place
