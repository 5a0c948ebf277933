"""LongCat-Flash: the format of Hermes under tags of its own."""

from __future__ import annotations

from hermes_rl.tokens.parsers.hermes import Tagged

PARSER = Tagged("<longcat_tool_call>", "</longcat_tool_call>")
