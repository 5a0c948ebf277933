"""Parse tool calls in a model's text.

This package owns the formats, one file each (`table` lists them by name), and the conversion from token ids to a turn
(`base`).
"""

from hermes_rl.tokens.parsers.base import Parsed, ParsedCall, Parser, Status, Tools, parse_ids, parse_text
from hermes_rl.tokens.parsers.table import PARSERS, load_parser, parser_for

__all__ = [
    "PARSERS",
    "Parsed",
    "ParsedCall",
    "Parser",
    "Status",
    "Tools",
    "load_parser",
    "parse_ids",
    "parse_text",
    "parser_for",
]
