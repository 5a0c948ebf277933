"""List the formats of tool calls by their common names, and find the format of a tokenizer.

This module owns the table, and the search for a chat template's format: the template writes a call, and each parser
tries to parse it. A new format is one file in this directory and one line in the table.
"""

from __future__ import annotations

from collections.abc import Iterator

from hermes_rl.errors import UserError
from hermes_rl.plugins import did_you_mean
from hermes_rl.tokens.parsers.base import Parser, Status
from hermes_rl.tokens.parsers.deepseek import DEEPSEEK_V3, DEEPSEEK_V3_1
from hermes_rl.tokens.parsers.glm import GLM
from hermes_rl.tokens.parsers.hermes import HERMES, LONGCAT
from hermes_rl.tokens.parsers.kimi_k2 import KIMI_K2
from hermes_rl.tokens.parsers.llama3_json import LLAMA3_JSON
from hermes_rl.tokens.parsers.mistral import MISTRAL
from hermes_rl.tokens.parsers.qwen3_coder import QWEN3_CODER
from hermes_rl.tokens.probes import ANCHOR, ARGUMENT, QUESTION, RESULT, TOOL, TOOL_NAME, with_call
from hermes_rl.tokens.tokenizer import TemplateRefused, Tokenizer

_FORMATS: dict[str, tuple[str, Parser]] = {
    "hermes": ("Hermes 2 and later", HERMES),
    "mistral": ("Mistral, all versions", MISTRAL),
    "llama3_json": ("Llama 3", LLAMA3_JSON),
    "qwen": ("Qwen 2.5 and 3", HERMES),
    "qwen3_coder": ("Qwen3-Coder, Qwen 3.5 and later", QWEN3_CODER),
    "deepseek_v3": ("DeepSeek V3 and R1", DEEPSEEK_V3),
    "deepseek_v3_1": ("DeepSeek V3.1", DEEPSEEK_V3_1),
    "kimi_k2": ("Kimi K2", KIMI_K2),
    "longcat": ("LongCat-Flash", LONGCAT),
    "glm45": ("GLM-4.5", GLM),
    "glm47": ("GLM-4.7 and 5", GLM),
}
PARSERS = {name: models for name, (models, _) in _FORMATS.items()}
"""Formats and the models that write them."""
ALIASES = {
    "llama4_json": "llama3_json", "llama3": "llama3_json", "deepseek_v31": "deepseek_v3_1", "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v3_1", "qwen25": "qwen", "qwen3_xml": "qwen3_coder", "glm": "glm45",
}  # fmt: skip
"""Names of the same formats in vLLM and SGLang."""
UNREAD = frozenset({
    "deepseek_v32", "deepseekv32", "ernie45", "functiongemma", "gigachat3", "gpt-oss", "granite", "granite-20b-fc",
    "hunyuan_a13b", "interns1", "internlm", "jamba", "llama4_pythonic", "minimax", "minimax-m2", "minimax_m2", "olmo3",
    "openai", "phi4_mini_json", "pythonic", "seed_oss", "step3", "xlam",
})  # fmt: skip
"""Formats of vLLM and SGLang that no parser supports."""
OPENINGS = tuple({parser.markers[0]: None for _, parser in _FORMATS.values()})
"""Start of a call in each format."""
OTHERS = ("<function=", "<|channel|>commentary to=", "<｜DSML｜function_calls>", "<minimax:tool_call>")
"""Start of a call in formats that only servers parse, and in calls without their opening."""
_CUTS = 6


def load_parser(name: str) -> Parser:
    """Return the parser of that name; raise UserError if there is none."""
    name = ALIASES.get(name, name)
    if name in UNREAD:
        raise UserError(
            f"no parser reads the format {name!r}: let a chat server read the calls (`type: openai`). Formats: "
            f"{', '.join(PARSERS)}"
        )
    if name not in PARSERS:
        raise UserError(
            f"there is no tool parser {name!r}{did_you_mean(name, PARSERS)} (there are: {', '.join(PARSERS)})"
        )
    return _FORMATS[name][1]


JUDGED = 10_000
"""Number of characters from the start by which a turn of JSON counts as calls; parsed on the event loop."""


def unread_call(text: str) -> str | None:
    """Return the text of a turn from its first call on, or None if there is none after the model's thinking.

    For a server that parses calls itself, this is text that it did not recognize as a call.
    """
    answer = text.rpartition("</think>")[2]
    if LLAMA3_JSON.calls(answer.lstrip()[:JUDGED], None)[1]:
        return answer
    offsets = [offset for opening in (*OPENINGS, *OTHERS) if (offset := answer.find(opening)) >= 0]
    return answer[min(offsets) :] if offsets and not answer.lstrip().startswith("<think>") else None


def parser_for(name: str | None, tokenizer: Tokenizer) -> Parser:
    """Return the parser of that name; without a name, the one that parses the calls of the tokenizer's template.

    Raises:
        UserError: no parser supports them.
    """
    if name is not None:
        return load_parser(name)
    try:
        candidates = list(written_calls(tokenizer))
    except TemplateRefused:
        candidates = []
    if not candidates:
        return load_parser("hermes")  # the template has no tools, so there will be no calls
    for parser_name in PARSERS:
        if any(_reads(load_parser(parser_name), written) for written in candidates):
            return load_parser(parser_name)
    raise UserError(
        f"the chat template of {tokenizer.name} writes tool calls in a form that no parser reads: {candidates[0]!r}. "
        f"Name the nearest under renderer.tool_parser ({', '.join(PARSERS)})"
    )


def _reads(parser: Parser, written: str) -> bool:
    calls = parser.calls(written, [TOOL])[1]
    return [(call.status, call.name, call.arguments) for call in calls] == [(Status.OK, TOOL_NAME, {"x": ARGUMENT})]


def written_calls(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a call written by the template, cut at each control token after it. Raises `TemplateRefused`."""
    text = _turn(tokenizer)
    argument_start = text.rfind(ARGUMENT)
    if argument_start < 0:
        return
    cut_offsets = sorted(
        {cut_offset for token in tokenizer.control if (cut_offset := text.find(token, argument_start)) >= 0}
    )[:_CUTS]
    for cut_offset in cut_offsets or [len(text)]:
        yield text[:cut_offset]
    yield text


def _turn(tokenizer: Tokenizer) -> str:
    """Return the rendered text from the start of an assistant turn with a call to the result of the call."""
    with_text = tokenizer.render(with_call(ANCHOR, ARGUMENT), [TOOL], add_generation_prompt=False)
    if ANCHOR in with_text:
        return _before_result(with_text.rpartition(ANCHOR)[2])
    text = tokenizer.render(with_call("", ARGUMENT), [TOOL], add_generation_prompt=False)
    prompt = tokenizer.render([QUESTION], [TOOL], add_generation_prompt=True)
    common_length = next(
        (i for i, pair in enumerate(zip(text, prompt, strict=False)) if pair[0] != pair[1]), len(prompt)
    )
    common = text[:common_length]
    ends = [offset + len(token) for token in (*tokenizer.control, "\n") if (offset := common.rfind(token)) >= 0]
    return _before_result(text[max(ends, default=len(common)) :])


def _before_result(text: str) -> str:
    return text.partition(RESULT)[0]
