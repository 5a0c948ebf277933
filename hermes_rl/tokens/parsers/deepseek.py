"""Parse DeepSeek's section of calls.

V3 and R1 write ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`` and a fenced block of JSON; V3.1 writes
``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>``.
"""

from __future__ import annotations

from collections.abc import Callable

from hermes_rl.tokens.parsers.base import ParsedCall, Status, Tools, decode, loads, make_call, section, skip_blanks

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE = "```"


class DeepSeek:
    """A section of calls; `read` parses one call from the text between its tags."""

    markers = (SECTION, SECTION_END, CALL, CALL_END, SEPARATOR)

    def __init__(self, read: Callable[[str], ParsedCall]) -> None:
        self._read = read

    def calls(self, text: str, tools: Tools | None) -> tuple[str, list[ParsedCall]]:
        def read(start: int) -> tuple[ParsedCall, int]:
            end = _call_end(text, start)
            if end is None:
                return ParsedCall(text[start:].strip(), Status.UNCLOSED), len(text)
            return self._read(text[start:end]), end + len(CALL_END)

        return section(text, SECTION, SECTION_END, CALL, read)


def _call_end(text: str, start: int) -> int | None:
    """Return the end of the call, or None; an end tag inside its JSON does not count."""
    first = text.find(CALL_END, start)
    if (opened := text.find("{", start, max(first, start))) >= 0:
        try:
            _, json_end = decode(text, opened)
        except ValueError:
            return first
        first = text.find(CALL_END, json_end)
    return first if first >= 0 else None


def _fenced_call(body: str) -> ParsedCall:
    raw = body.strip()
    kind, separator, rest = body.partition(SEPARATOR)
    head, _, fenced = rest.partition("`")
    name = head.strip()
    if not separator or not fenced.startswith(_FENCE[1:]) or "\n" in name or kind.strip() != "function":
        return ParsedCall(raw, Status.MALFORMED)
    json_start = len(head) + len(_FENCE)
    json_start += len("json") if rest.startswith("json", json_start) else 0
    try:
        value, end = decode(rest, skip_blanks(rest, json_start))
    except ValueError:
        return ParsedCall(raw, Status.INVALID_JSON, name)
    if rest[end:].strip() not in (_FENCE, ""):
        return ParsedCall(raw, Status.INVALID_JSON, name)
    return make_call(raw, name, value)


def _bare_call(body: str) -> ParsedCall:
    raw = body.strip()
    name, separator, arguments = body.partition(SEPARATOR)
    if not separator:
        return ParsedCall(raw, Status.MALFORMED)
    try:
        value = loads(arguments) if arguments.strip() else {}
    except ValueError:
        return ParsedCall(raw, Status.INVALID_JSON, name.strip())
    return make_call(raw, name, value)


DEEPSEEK_V3 = DeepSeek(_fenced_call)
DEEPSEEK_V3_1 = DeepSeek(_bare_call)
