"""Small conversations that find out what a chat template does.

Owns the conversations and the questions about a whole template: does it show tools, and how does it end a turn. No
template writes their words itself, so that they can be found again in the rendered text.
"""

from __future__ import annotations

from typing import Any

from hermes_rl.tokens.rendering import RendererRefused
from hermes_rl.tokens.tokenizer import TemplateRefused, Tokenizer, Tools

ANCHOR = "ANCHORxq7z"
RESULT = "resultxq7z"
QUESTION = {"role": "user", "content": "u"}
TOOL = {
    "type": "function",
    "function": {
        "name": "toolxq7z",
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
    },
}


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def call(name: str, arguments: dict[str, Any], identity: str = "callxq7z0") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def answering(role: str) -> dict[str, Any]:
    return {"tool_call_id": "callxq7z0", "name": "toolxq7z"} if role == "tool" else {}


def thinking(message: dict[str, Any], thought: bool) -> dict[str, Any]:
    return {**message, "reasoning_content": "thoughtxq7z"} if thought else message


def require_tools(tokenizer: Tokenizer) -> None:
    """Refuse a template that leaves out tools, calls or their results, because the model would not see them.

    Raises:
        RendererRefused: the template leaves something out; the message names it.
    """
    asked = call("toolxq7z", {"x": "argxq7z"})
    messages: list[dict[str, Any]] = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [asked]}]
    messages.append({"role": "tool", "tool_call_id": asked["id"], "name": "toolxq7z", "content": "resultxq7z"})
    try:
        told = tokenizer.render([QUESTION], [TOOL], add_generation_prompt=True)
        text = tokenizer.render(messages, [TOOL], add_generation_prompt=True)
    except TemplateRefused as error:
        raise RendererRefused(f"the chat template of {tokenizer.name} refuses tools: {error}") from error
    for what, found in (
        ("the tools", "toolxq7z" in told),
        ("the arguments of calls", "argxq7z" in text),
        ("the results of calls", "resultxq7z" in text),
    ):
        if not found:
            raise RendererRefused(f"the chat template of {tokenizer.name} leaves out {what}")


def closers(tokenizer: Tokenizer) -> list[str]:
    """Find the control tokens that end an assistant turn: after text, before another message, after calls."""
    asked = call("toolxq7z", {"x": ANCHOR})
    called = {"role": "assistant", "content": "", "tool_calls": [asked]}
    result = {"role": "tool", "tool_call_id": asked["id"], "name": "toolxq7z", "content": RESULT}
    shapes: list[tuple[list[dict[str, Any]], Tools | None]] = [
        ([QUESTION, said(ANCHOR)], None),
        ([QUESTION, said(ANCHOR), QUESTION], None),
        ([QUESTION, called, result], [TOOL]),
    ]
    found: list[str] = []
    refusals: list[str] = []
    for messages, tools in shapes:
        try:
            text = tokenizer.render(messages, tools, add_generation_prompt=False)
        except TemplateRefused as error:
            refusals.append(str(error))
            continue
        ended = text.rpartition(ANCHOR)[2].partition(RESULT)[0]
        # Behind a call its own tokens come first; the turn ends as others do, or with what only calls end with.
        if not any(stop in ended for stop in found):
            found += _first_control(ended, tokenizer)
    if not found:
        why = f" ({refusals[0]})" if refusals else ""
        raise RendererRefused(
            f"the chat template of {tokenizer.name} ends a turn with no control token{why}, so its tokens cannot be "
            "told from the next message; use another tokenizer, or `type: openai`"
        )
    return list(dict.fromkeys(found))


def _first_control(text: str, tokenizer: Tokenizer) -> list[str]:
    places = [(text.find(token), -len(token), token) for token in tokenizer.control if token in text]
    return [min(places)[2]] if places else []
