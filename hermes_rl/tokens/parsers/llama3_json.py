"""Parse Llama 3: a turn that is only JSON, ``{"name": …, "parameters": {…}}``, several separated by ``;``.

A text that contains JSON is not a call; neither is a JSON object that names none of the tools, unless
``<|python_tag|>`` marks it as a call.
"""

from __future__ import annotations

import re

from hermes_rl.tokens.parsers.base import ParsedCall, Status, Tools, decode, of_object

_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"[; \t\r\n]*+")


class Llama3Json:
    """Parser of Llama 3; see `base.Parser`."""

    markers = (_TAG,)

    def calls(self, text: str, tools: Tools | None) -> tuple[str, list[ParsedCall]]:
        body = text.strip()
        tagged = body.startswith(_TAG)
        body = body.removeprefix(_TAG).strip()
        if not body.startswith("{"):
            return (text, []) if not tagged else ("", [ParsedCall(body, Status.MALFORMED)])
        calls = _parse_calls(body)
        if tagged or _meant(body, calls, tools):
            return "", calls
        return text, []


def _parse_calls(text: str) -> list[ParsedCall]:
    calls: list[ParsedCall] = []
    position = 0
    while position < len(text):
        try:
            value, end = decode(text, position)
        except ValueError:
            following = text.find("};", position)
            raw = text[position : following + 1 if following >= 0 else len(text)]
            closed = following >= 0 or raw.rstrip().endswith("}")
            calls.append(ParsedCall(raw.strip(), Status.INVALID_JSON if closed else Status.UNCLOSED))
            end = following + 1 if following >= 0 else len(text)
        else:
            calls.append(of_object(text[position:end], value))
        position = end
        if (between := _BETWEEN.match(text, position)) is not None:
            position = between.end()
        if position < len(text) and text[position] != "{":
            calls.append(ParsedCall(text[position:], Status.MALFORMED))
            break
    return calls


def _meant(text: str, calls: list[ParsedCall], tools: Tools | None) -> bool:
    """Return True if bare JSON is a call: it has the form of one, for an existing tool."""
    if any(call.status is Status.MALFORMED and not call.name for call in calls):
        return False
    names = {str((tool.get("function") or tool).get("name")) for tool in tools or ()}
    named_calls = [call for call in calls if call.name]
    if not named_calls:
        return bool(names) and any(f'"name": "{name}"' in text[:200] for name in names)
    return all('"parameters"' in call.raw or '"arguments"' in call.raw for call in named_calls) and (
        not names or any(call.name in names for call in named_calls)
    )


LLAMA3_JSON = Llama3Json()
