"""Calls that models write badly: executed as they were meant, or reported to the model; never changed, never lost."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest

from hermes_rl.tokens.parsers.base import Parsed, Status, parse_ids, parse_text
from hermes_rl.tokens.parsers.table import load_parser, unread_call
from tests.thorough import THOROUGH
from tests.tokens.families import FAMILIES, tokenizer_of
from tests.tokens.formats import FORMATS
from tests.tokens.test_parsers import JSON_FORMATS, TOOLS, called, every_format, read, written

TAGS = re.compile(
    r"</?tool_call>|</?longcat_tool_call>|</?arg_(?:key|value)>|</?function(?:=[^>]*)?>|</?parameter(?:=[^>]*)?>"
    r"|<[|｜]tool[^>]*>|\[(?:TOOL_CALLS|ARGS)\]"
)
Call = tuple[str, dict[str, Any]]
BEFORE = [
    "", "Let me see.\n", 'He said "yes"', "It's `add`", "```\nx = 1\n```", "```\nx = 1\n```\n", "“So.”", "the users'",
    '"', "`", "```python\n", "Tell '", "1 > 0: ",
]  # fmt: skip
"""What may stand before a call without quoting it: all of these are closed, or never closed."""


def drawn_call(chance: random.Random) -> Call:
    values: dict[str, Any] = {
        "a": chance.randrange(100),
        "b": chance.choice([1.5, -2.0]),
        "text": chance.choice(["x", "two\nlines", "a < b", "it's", "", '{"n": 1}']),
        "flag": chance.random() < 0.5,
        "items": [1, "two"],
    }
    return chance.choice(["add", "ns.search"]), {key: values[key] for key in chance.sample(list(values), 2)}


def damaged(text: str, chance: random.Random) -> str:
    """Return the text with one tag left out, doubled, or in the place of another."""
    tags = list(TAGS.finditer(text))
    if not tags:
        return text[1:] if chance.random() < 0.5 else text[:-1]
    tag, other = chance.choice(tags), chance.choice(tags)
    # Another tag that names something would be another call.
    new = chance.choice(["", tag[0] * 2, "" if "=" in other[0] else other[0]])
    return text[: tag.start()] + new + text[tag.end() :]


@pytest.mark.generated
@pytest.mark.timeout(600)
def test_damaged_calls_are_executed_as_meant_or_reported() -> None:
    seed = random.SystemRandom().randrange(1 << 40)
    chance = random.Random(seed)
    for number in range(20_000 if THOROUGH else 1_000):
        name = chance.choice(list(FORMATS))
        calls = [drawn_call(chance) for _ in range(chance.randrange(1, 4))]
        text = written(name, *calls)
        before = chance.choice(BEFORE) if FORMATS[name].text_before else ""
        if name == "deepseek_v3" and before == "```python\n":
            continue  # the format's own fence closes it
        whole = number % 3 == 0
        said = before + (text if whole else damaged(text, chance))
        parsed = read(name, said)
        where = f"seed {seed}, {name}: {said!r}: {parsed}"
        if whole:
            assert called(parsed) == calls, where
        else:
            meant = [(tool, item) for tool, arguments in calls for item in arguments.items()]
            made = [(tool, item) for tool, arguments in called(parsed) for item in arguments.items()]
            assert all(item in meant for item in made), where
            reported = any(call.problem for call in parsed.calls)
            assert reported or all(call in calls for call in called(parsed)), where
            assert parsed.calls or name == "llama3_json" or not TAGS.search(said), where


@every_format
@pytest.mark.parametrize("before", BEFORE)
def test_a_mark_that_closes_something_else_quotes_no_call(name: str, before: str) -> None:
    if not FORMATS[name].text_before:
        pytest.skip("a turn of this format is a call or a text")
    assert called(read(name, before + written(name, ("add", {"a": 1})))) == [("add", {"a": 1})]


@every_format
def test_call_after_a_quoted_one_is_parsed(name: str) -> None:
    if not FORMATS[name].text_before or (name.startswith("deepseek_v3") and "_1" not in name):
        pytest.skip("a turn of this format is a call or a text, or its calls hold fences")
    quoted = written(name, ("add", {"a": 1})).replace("\n", "")
    parsed = read(name, f"I would write `{quoted}`, so:\n" + written(name, ("add", {"a": 2})))
    assert called(parsed) == [("add", {"a": 2})]


@pytest.mark.parametrize("name", ["hermes", "glm", "mistral", "kimi", "deepseek", "qwen3_coder"])
def test_control_token_is_not_part_of_a_value(name: str) -> None:
    tokenizer = tokenizer_of(name)
    form = {"glm": "glm45", "kimi": "kimi_k2", "deepseek": "deepseek_v3"}.get(name, name)
    parser, stops = load_parser(form), tokenizer.encode(FAMILIES[name].stop)
    for token in [*sorted(tokenizer.control)[:6], *(mark for mark in parser.markers if mark in tokenizer.control)]:
        before, _, behind = written(form, ("add", {"text": "xPLACEx"})).partition("PLACE")
        if form == "deepseek_v3" or tokenizer.encode(token)[0] in stops:
            continue
        for inner, made in ((tokenizer.encode(token), False), ([i for c in token for i in tokenizer.encode(c)], True)):
            ids = [*tokenizer.encode(before), *inner, *tokenizer.encode(behind)]
            parsed = parse_ids(parser, tokenizer, ids, (), stops, TOOLS)
            assert called(parsed) == ([("add", {"text": f"x{token}x"})] if made else []), (token, parsed)
            assert parsed.calls


ADD = "<function=add>\n<parameter=text>\n1\n</parameter>\n</function>\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", f"<tool_call>\n{ADD}<function=now>\n</function>\n</tool_call>"),
        ("qwen3_coder", f"<tool_call>{ADD.replace('</parameter>', '<parameter=a>2</parameter>')}</tool_call>"),
        ("qwen3_coder", "<function=add><parameter=a>1</parameter></function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter></function>"),
        ("hermes", '{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("deepseek_v3_1", "<｜tool▁calls▁begin｜>add<｜tool▁calls▁end｜>"),
        ("mistral", "[TOOL_CALLS]"),
        ("glm45", "<tool_call>add<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key></arg_value></tool_call>"),
    ],
)  # fmt: skip
def test_what_looks_like_a_call_and_is_none_is_reported(name: str, text: str) -> None:
    parsed = read(name, text)
    assert called(parsed) == []
    assert [call.problem for call in parsed.calls if call.status is not Status.OK]


def test_a_second_call_does_not_disappear_in_a_value() -> None:
    """Its closing tag is missing, so the first call is cut and the second one is made."""
    first = "<tool_call>\n<function=add>\n<parameter=text>\n1\n</parameter>\n</function>\n"
    parsed = read("qwen3_coder", first + written("qwen3_coder", ("now", {})))
    assert called(parsed) == [("now", {})]
    assert parsed.calls[0].status is Status.UNCLOSED


@pytest.mark.parametrize(
    "value", ["<parameter name='x'>1</parameter>", "<parameter>\n1\n</parameter>\n<tool>", "a </function> b"]
)
def test_elements_of_a_document_are_text(value: str) -> None:
    call = ("add", {"text": value})
    assert called(read("qwen3_coder", written("qwen3_coder", call))) == [call]


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_arguments_may_hold_what_quotes(name: str) -> None:
    call = ("add", {"text": 'use ` and ``` and " in one line'})
    before = "Run ` now: " if FORMATS[name].text_before else ""
    assert called(read(name, before + written(name, call))) == [call] or name == "deepseek_v3"


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "add", "parameters": {"a": 1}}',
        "<function=add><parameter=a>1</parameter></function>",
        "<|channel|>commentary to=functions.add <|message|>{}",
        '<｜DSML｜function_calls><｜DSML｜invoke name="add">',
        '<minimax:tool_call><invoke name="add">',
        "[TOOL_CALLS]add{}",
    ],
)
def test_calls_that_a_server_left_in_the_text_are_recognised(text: str) -> None:
    assert unread_call(text) == text
    assert unread_call(f"<think>\nhm\n</think>\n{text}") is not None
    assert unread_call("An answer with {braces} and a function of x.") is None


def test_many_marks_take_no_longer_than_they_are_long() -> None:
    for piece in ('"<tool_call>', "`<tool_call>{", "```<tool_call>", "'<tool_call></tool_call>", '"[TOOL_CALLS]['):
        for name in ("hermes", "qwen3_coder", "glm45", "mistral", "kimi_k2"):
            parser = load_parser(name)

            def seconds(size: int, parser: Any = parser, piece: str = piece) -> float:
                began = time.thread_time()
                assert isinstance(parse_text(parser, piece * size), Parsed)
                return time.thread_time() - began

            short = seconds(4_000)
            # A busy machine makes a run several times as slow; one of three is enough.
            assert any(seconds(16_000) < 0.2 + 8 * short for _ in range(3)), (piece, name)
