"""DeepSeek V3.1: ``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>``."""

from __future__ import annotations

from hermes_rl.tokens.parsers.base import ParsedCall, Status, loads, made
from hermes_rl.tokens.parsers.deepseek_v3 import SEPARATOR, DeepSeek


def _bare(body: str) -> ParsedCall:
    raw = body.strip()
    name, separator, arguments = body.partition(SEPARATOR)
    if not separator:
        return ParsedCall(raw, Status.MALFORMED)
    try:
        value = loads(arguments) if arguments.strip() else {}
    except ValueError:
        return ParsedCall(raw, Status.INVALID_JSON, name.strip())
    return made(raw, name, value)


PARSER = DeepSeek(_bare)
