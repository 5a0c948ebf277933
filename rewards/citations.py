"""Check that the addresses cited by the policy came from its tools."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal
from urllib.parse import unquote

from hermes_rl import Score

URL = re.compile(r"https?://[^\s<>\"'`\])}，。；：！？、…（）【】「」『』《》〈〉“”‘’]+")


WITHIN = frozenset(
    {"terminal", "process", "execute_code", "read_file", "write_file", "patch", "search_files", "todo", "memory"}
)
"""Tools whose result the policy writes itself: commands and files of its sandbox, and notes."""
WORD = re.compile(r"[^\W_]+")


def citations(
    result: Any,
    *,
    at_least: int = 1,
    calls: Literal["hermes_rl", "program"] = "hermes_rl",
    tools: list[str] | None = None,
) -> Score:
    """Return the share of the addresses cited in the final response that tools returned; 0 for fewer than `at_least`.

    An address counts if a tool result contains it. It does not count if the result is an error, or if the policy had
    sent the address to a tool before, with or without `https://`, because the tool may have echoed it. Addresses of
    the prompt may be sent. Command output and sandbox files do not count, since the policy writes them itself.
    Addresses start with http:// or https:// and end at white space, quotes, closing brackets or full-width
    punctuation; trailing punctuation, Markdown characters and a final `/` are ignored. Equal ones count once.

    Args:
        at_least: minimum number of different addresses to cite.
        calls: hermes_rl: only the spec's tools, which hermes-rl executed, are sources; program: an agent program's
            own tools too, as the program reports them.
        tools: names of the tools that are sources. Default: all except the sandbox tools, such as `terminal`.
    """
    cited = addresses(result.final_response)
    prompt = [message for message in result.messages[: result.prompt_length] if not message.get("context")]
    relevant_calls = [call for call in result.tool_calls if calls == "program" or call.executed_by == calls]
    sources = {call.name for call in relevant_calls} - WITHIN if tools is None else set(tools)
    tool_addresses = _returned_addresses(
        relevant_calls, sources, {address for text in _texts_in(prompt) for address in addresses(text)}
    )
    if len(cited) < at_least or not cited:
        return Score(0.0, reason=f"{len(cited)} of {at_least} sources", metrics={"cited": len(cited)})
    made_up = sorted(cited - tool_addresses)
    reason = f"not from a tool: {', '.join(made_up)[:300]}" if made_up else None
    return Score(1 - len(made_up) / len(cited), reason=reason, metrics={"cited": len(cited)})


def _returned_addresses(calls: Iterable[Any], sources: set[str], prompt: set[str]) -> set[str]:
    """Return the addresses that tools returned and the policy had not sent before."""
    provided: set[str] = set()
    sent = " "
    for call in calls:
        sent += _plain_words(" ".join(_texts_in(call.arguments)))
        if call.error is None and call.name in sources:
            echoes = {
                address for address in addresses(call.result) if _plain_words(address.partition("://")[2]) in sent
            }
            provided |= addresses(call.result) - (echoes - prompt)
    return provided


def _plain_words(text: str) -> str:
    """Return the letters and digits of a text as words, so that escapes and separators cannot hide an address."""
    return f" {' '.join(WORD.findall(unquote(text).casefold()))} "


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, in order."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, Mapping):
            pending += reversed([each for item in part.items() for each in item])
        elif isinstance(part, list):
            pending += reversed(part)


def addresses(text: str) -> set[str]:
    """Return the distinct URLs in a text."""
    return {address.rstrip(".,;:!?*_~|").rstrip("/") for address in URL.findall(text)}
