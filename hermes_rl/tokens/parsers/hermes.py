"""Parse ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes 2 and later.

Qwen 2.5 and 3 write the same; LongCat-Flash writes it with its own tags.
"""

from __future__ import annotations

import re
from functools import partial

from hermes_rl.tokens.parsers.base import Ends, ParsedCall, Tools, json_block, openings


class Tagged:
    """A JSON object between two tags."""

    def __init__(self, opening: str, closing: str) -> None:
        self.markers = (opening, closing)

    def calls(self, text: str, tools: Tools | None) -> tuple[str, list[ParsedCall]]:
        opening, closing = self.markers
        ends = Ends(text, re.compile(re.escape(closing)))
        return openings(text, opening, closing, partial(json_block, text, ends))


HERMES = Tagged("<tool_call>", "</tool_call>")
LONGCAT = Tagged("<longcat_tool_call>", "</longcat_tool_call>")
