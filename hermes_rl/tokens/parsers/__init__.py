"""Tool calls in what a model wrote.

Owns the formats, one file each (`table` has them by name), and the way from token ids to a turn (`reading`).
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
