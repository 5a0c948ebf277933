"""How models write tool calls, format by format: whole, broken and cut, for the tests of the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl.tokens.parsers.base import Status

Args = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """One format of tool calls."""

    block: Callable[[str, str], str]
    """Name and arguments as they are written → one block."""
    args: Callable[[Args], str]
    """Arguments as the format writes them."""
    join: Callable[[Sequence[str]], str]
    """Blocks → what the model writes."""
    closing: str
    """Behind it a block is whole."""
    broken: Callable[[], str]
    """A block whose arguments cannot be read."""
    broken_status: Status
    nameless: Callable[[], str]
    json: bool = True
    """Arguments are JSON, so that they may be written as a text."""
    text_before: bool = True
    """A text may stand before the calls."""


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tagged(opening: str, closing: str) -> Format:
    def block(name: str, args: str) -> str:
        return f'{opening}\n{{"name": {dump(name)}, "arguments": {args}}}\n{closing}'

    return Format(
        block,
        dump,
        "\n".join,
        closing,
        lambda: f'{opening}\n{{"name": "add", "arguments": {{"a": 1,}}\n{closing}',
        Status.INVALID_JSON,
        lambda: f'{opening}\n{{"arguments": {{}}}}\n{closing}',
    )


def _mistral() -> Format:
    def block(name: str, args: str) -> str:
        return f'{{"name": {dump(name)}, "arguments": {args}}}'

    return Format(
        block,
        dump,
        lambda blocks: f"[TOOL_CALLS] [{', '.join(blocks)}]",
        "]",
        lambda: '{"name": "add", "arguments": {"a": 1,}}',
        Status.INVALID_JSON,
        lambda: '{"arguments": {}}',
    )


def _llama() -> Format:
    def block(name: str, args: str) -> str:
        return f'{{"name": {dump(name)}, "parameters": {args}}}'

    return Format(
        block,
        dump,
        "; ".join,
        "}",
        lambda: '{"name": "add", "parameters": {"a": 1,}}',
        Status.INVALID_JSON,
        lambda: '<|python_tag|>{"parameters": {}}',
        text_before=False,
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dump(value)


def _coder() -> Format:
    def args(given: Args) -> str:
        return "".join(f"<parameter={k}>\n{_text(v)}\n</parameter>\n" for k, v in given.items())

    return Format(
        lambda name, args: f"<tool_call>\n<function={name}>\n{args}</function>\n</tool_call>",
        args,
        "\n".join,
        "</tool_call>",
        lambda: "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>",
        Status.MALFORMED,
        lambda: "<tool_call>\n<function=>\n</function>\n</tool_call>",
        json=False,
    )


def _glm(line: str) -> Format:
    def args(given: Args) -> str:
        return "".join(f"<arg_key>{k}</arg_key>{line}<arg_value>{_text(v)}</arg_value>{line}" for k, v in given.items())

    return Format(
        lambda name, args: f"<tool_call>{name}{line}{args}</tool_call>",
        args,
        "\n".join,
        "</tool_call>",
        lambda: f"<tool_call>add{line}<arg_key>a</arg_key>{line}1{line}</tool_call>",
        Status.MALFORMED,
        lambda: f"<tool_call>{line}<arg_key>a</arg_key>{line}<arg_value>1</arg_value>{line}</tool_call>",
        json=False,
    )


def _deepseek(*, fenced: bool) -> Format:
    def block(name: str, args: str) -> str:
        body = f"function<｜tool▁sep｜>{name}\n```json\n{args}\n```" if fenced else f"{name}<｜tool▁sep｜>{args}"
        return f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>"

    return Format(
        block,
        dump,
        lambda blocks: f"<｜tool▁calls▁begin｜>{''.join(blocks)}<｜tool▁calls▁end｜>",
        "<｜tool▁call▁end｜>",
        lambda: block("add", '{"a": 1,}'),
        Status.INVALID_JSON,
        lambda: block("", "{}"),
    )


def _kimi() -> Format:
    def block(name: str, args: str) -> str:
        identity = f"functions.{name}:0" if name else ""
        return f"<|tool_call_begin|>{identity}<|tool_call_argument_begin|>{args}<|tool_call_end|>"

    return Format(
        block,
        dump,
        lambda blocks: f"<|tool_calls_section_begin|>{''.join(blocks)}<|tool_calls_section_end|>",
        "<|tool_call_end|>",
        lambda: block("add", '{"a": 1,}'),
        Status.INVALID_JSON,
        lambda: block("", "{}"),
    )


FORMATS = {
    "hermes": _tagged("<tool_call>", "</tool_call>"),
    "qwen": _tagged("<tool_call>", "</tool_call>"),
    "longcat": _tagged("<longcat_tool_call>", "</longcat_tool_call>"),
    "mistral": _mistral(),
    "llama3_json": _llama(),
    "qwen3_coder": _coder(),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "deepseek_v3": _deepseek(fenced=True),
    "deepseek_v3_1": _deepseek(fenced=False),
    "kimi_k2": _kimi(),
}
