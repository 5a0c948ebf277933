"""Tool calls in what a model wrote: one file per format, by the names that people know.

Owns the table of formats, which of them a tokenizer's template writes, and the way from token ids to a turn.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import cast

from hermes_rl.errors import UserError
from hermes_rl.plugins import did_you_mean
from hermes_rl.tokens.parsers.base import Call, Parsed, Parser, Status, Tools
from hermes_rl.tokens.parsers.detect import ARGUMENTS, NAME, TOOL, written_calls
from hermes_rl.tokens.parsers.reading import REASONING, marked_text, opens_reasoning
from hermes_rl.tokens.parsers.text import without_reasoning
from hermes_rl.tokens.tokenizer import TemplateRefused, Tokenizer

__all__ = ["PARSERS", "Call", "Parsed", "Parser", "Status", "load_parser", "parse_ids", "parse_text", "parser_for"]

PARSERS = {
    "hermes": "Hermes 2 and later",
    "mistral": "Mistral, all versions",
    "llama3_json": "Llama 3",
    "qwen": "Qwen 2.5 and 3",
    "qwen3_coder": "Qwen3-Coder, Qwen 3.5 and later",
    "deepseek_v3": "DeepSeek V3 and R1",
    "deepseek_v3_1": "DeepSeek V3.1",
    "kimi_k2": "Kimi K2",
    "longcat": "LongCat-Flash",
    "glm45": "GLM-4.5",
    "glm47": "GLM-4.7 and 5",
}
"""Formats and the models that write them."""
ALIASES = {"llama4_json": "llama3_json", "deepseek_v31": "deepseek_v3_1"}
"""Names that other projects have for the same formats."""


def load_parser(name: str) -> Parser:
    """The parser of that name; raises UserError where there is none."""
    name = ALIASES.get(name, name)
    if name not in PARSERS:
        raise UserError(
            f"there is no tool parser {name!r}{did_you_mean(name, list(PARSERS))} (there are: {', '.join(PARSERS)})"
        )
    return cast(Parser, importlib.import_module(f"{__name__}.{name}").PARSER)


def parser_for(name: str | None, tokenizer: Tokenizer) -> Parser:
    """The parser of that name; None: the one that reads what the tokenizer's template writes.

    Raises:
        UserError: no parser reads it.
    """
    if name is not None:
        return load_parser(name)
    try:
        candidates = list(written_calls(tokenizer))
    except TemplateRefused:
        candidates = []
    if not candidates:
        return load_parser("hermes")  # the template has no tools, so nothing will be called
    for known in PARSERS:
        if any(_reads(load_parser(known), written) for written in candidates):
            return load_parser(known)
    raise UserError(
        f"the chat template of {tokenizer.name} writes tool calls in a form that no parser reads: {candidates[0]!r}. "
        f"Name the nearest under renderer.tool_parser ({', '.join(PARSERS)})"
    )


def _reads(parser: Parser, written: str) -> bool:
    found = parser.calls(written, [TOOL])[1]
    return [(call.status, call.name, call.arguments) for call in found] == [(Status.OK, NAME, ARGUMENTS)]


def parse_ids(
    parser: Parser,
    tokenizer: Tokenizer,
    completion: Sequence[int],
    prompt: Sequence[int],
    stops: Sequence[int],
    tools: Tools | None,
) -> Parsed:
    """What a model said; of `prompt` the end is enough. Never raises.

    Control tokens at its end are no part of it: a server may stop at other ends of a turn than the template's, as a
    model's generation_config.json can name several.
    """
    ended = list(completion)
    while ended and (ended[-1] in stops or _ends(tokenizer.decode([ended[-1]]), tokenizer, parser)):
        ended.pop()
    text, plain = marked_text(tokenizer, ended, parser.markers)
    found = parse_text(parser, text, tools, prefilled=opens_reasoning(tokenizer, prompt))
    return plain(found)


def _ends(token: str, tokenizer: Tokenizer, parser: Parser) -> bool:
    """Whether a token is one of control that has no meaning in what the parser reads."""
    return token in tokenizer.control and token not in (*parser.markers, *REASONING)


def parse_text(parser: Parser, text: str, tools: Tools | None = None, *, prefilled: bool = False) -> Parsed:
    """A turn from its text; control tokens at its end are taken away already."""
    reasoning, rest = without_reasoning(text, prefilled=prefilled)
    content, calls = parser.calls(rest, tools)
    return Parsed(content, reasoning, calls)
