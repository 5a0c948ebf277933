"""Qwen 2.5 and 3: the format of Hermes."""

from __future__ import annotations

from hermes_rl.tokens.parsers.hermes import Tagged

PARSER = Tagged("<tool_call>", "</tool_call>")
