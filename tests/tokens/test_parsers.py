"""Tool calls in what models write: every format, whole and broken, and 100,000 random texts without an exception."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.errors import UserError
from hermes_rl.servers.token_level import assistant_message
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.parsers.base import Parsed, Status, parse_ids, parse_text
from hermes_rl.tokens.parsers.table import ALIASES, PARSERS, UNREAD, load_parser
from tests.tokens.families import FAMILIES, tokenizer_of
from tests.tokens.formats import FORMATS, Format

TYPES = {"a": "integer", "b": "number", "text": "string", "flag": "boolean", "items": "array", "o": "object"}
PROPERTIES = {name: {"type": kind} for name, kind in TYPES.items()} | {"maybe": {"type": ["string", "null"]}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("add", "ns.search", "now")
]

every_format = pytest.mark.parametrize("name", FORMATS)


def read(name: str, text: str, **options: Any) -> Parsed:
    return parse_text(load_parser(name), text, TOOLS, **options)


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    form = FORMATS[name]
    return form.join([form.block(tool, form.args(args)) for tool, args in calls])


def called(parsed: Parsed) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in parsed.calls if call.status is Status.OK]


def statuses(parsed: Parsed) -> list[Status]:
    return [call.status for call in parsed.calls]


@every_format
def test_other_end_of_turn_tokens_are_not_text(name: str) -> None:
    tokenizer, parser = load_tokenizer(), load_parser(name)
    stops, other = tokenizer.encode("<|im_end|>"), tokenizer.encode("<|endoftext|>")
    text = written(name, ("add", {"a": 1}))
    for end in (other, other + stops, stops + other, other * 2):
        assert parse_ids(parser, tokenizer, tokenizer.encode("Paris") + end, (), stops, TOOLS) == Parsed("Paris")
        assert called(parse_ids(parser, tokenizer, tokenizer.encode(text) + end, (), stops, TOOLS)) == [
            ("add", {"a": 1})
        ]


def test_every_format_is_documented_once() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tokens.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", page.partition("## Choose a tool-call parser")[2], re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert set(PARSERS) <= set(names), "the table of docs/tokens.md, `Choose a tool-call parser`, lacks formats"
    assert not UNREAD & {*PARSERS, *ALIASES}, "a format with a parser is still listed in UNREAD"


def test_every_format_is_tested() -> None:
    assert set(FORMATS) == set(PARSERS), "tests/tokens/formats.py has how a model writes each format"
    with pytest.raises(UserError, match=r"did you mean.*hermes"):
        load_parser("hermez")


ARGUMENTS: dict[str, dict[str, Any]] = {
    "numbers": {"a": 2, "b": -1.5},
    "none": {},
    "a text": {"text": "hello"},
    "an empty text": {"text": ""},
    "a text that looks like a number": {"text": "123"},
    "a text that looks like null": {"text": "null"},
    "a text with quotes": {"text": 'say "hi" \\ {now}'},
    "lines": {"text": "first\n  second\n\nfourth"},
    "other alphabets": {"text": "größer 日本語 🙂"},
    "lists": {"items": [1, "two", None]},
    "objects": {"o": {"x": {"y": [True]}}},
    "booleans": {"flag": True, "a": 0},
    "nothing at all": {"maybe": None},
    "code with fences": {"text": "```py\nprint(1)\n```"},
}


@every_format
@pytest.mark.parametrize("what", ARGUMENTS)
def test_parsed_arguments_equal_the_intended_ones(name: str, what: str) -> None:
    assert called(read(name, written(name, ("add", ARGUMENTS[what])))) == [("add", ARGUMENTS[what])]


@every_format
def test_several_calls_in_order(name: str) -> None:
    calls = [("add", {"a": 1}), ("ns.search", {"text": "x"}), ("now", {})]
    assert called(read(name, written(name, *calls))) == calls


@every_format
def test_a_text_before_the_calls_stays(name: str) -> None:
    if not FORMATS[name].text_before:
        pytest.skip("a turn of this format is a call or a text")
    parsed = read(name, "Let me see.\n" + written(name, ("add", {"a": 1})))
    assert (parsed.content, called(parsed)) == ("Let me see.", [("add", {"a": 1})])


@every_format
@pytest.mark.parametrize("text", ["", "Just an answer.", "  kept \n\n as it is ", '{"a": 1} is JSON', "a < b > c"])
def test_text_without_calls_is_unchanged(name: str, text: str) -> None:
    assert read(name, text) == Parsed(text)


@every_format
@pytest.mark.parametrize("prefilled", [False, True])
def test_reasoning_is_not_content(name: str, prefilled: bool) -> None:
    opening = "" if prefilled else "<think>"
    parsed = read(name, f"{opening}\nhm\n</think>\n\n" + written(name, ("add", {"a": 1})), prefilled=prefilled)
    assert (parsed.reasoning, parsed.content, called(parsed)) == ("hm", "", [("add", {"a": 1})])


@every_format
def test_no_call_comes_out_of_reasoning(name: str) -> None:
    block = written(name, ("add", {"a": 1}))
    assert called(read(name, f"<think>\nI could write {block}\n</think>\n\nNo.")) == []
    assert called(read(name, f"<think>\n{block}")) == []
    assert called(read(name, block, prefilled=True)) == []


@every_format
@pytest.mark.parametrize("frame", ["Write `{}` to add.", "Like this:\n```\n{}\n```\nOr not.", "> {}", 'He wrote "{}".'])
def test_no_call_comes_out_of_a_quotation(name: str, frame: str) -> None:
    block = FORMATS[name].join([FORMATS[name].block("add", FORMATS[name].args({"a": 1}))]).replace("\n", "")
    text = frame.format(block)
    if "```json" in text:
        pytest.skip("the format's own fences")
    parsed = read(name, text)
    assert (called(parsed), parsed.content) == ([], text)


@every_format
def test_a_broken_call_does_not_take_the_good_ones_with_it(name: str) -> None:
    form = FORMATS[name]
    good = [form.block("add", form.args({"a": number})) for number in (1, 2)]
    parsed = read(name, form.join([good[0], form.broken(), good[1]]))
    assert statuses(parsed)[0] is Status.OK
    assert statuses(parsed)[1] is form.broken_status
    assert called(parsed) == [("add", {"a": 1}), ("add", {"a": 2})]
    assert parsed.calls[1].problem is not None


@every_format
def test_call_without_a_name_has_a_problem_status(name: str) -> None:
    form = FORMATS[name]
    assert statuses(read(name, form.join([form.nameless()]))) == [Status.MISSING_NAME]


@every_format
def test_a_call_that_was_cut_is_not_executed(name: str) -> None:
    form = FORMATS[name]
    text = form.join([form.block("add", form.args({"text": "some text", "a": 1}))])
    whole = text.rindex(form.closing)
    for end in range(len(text) // 3, whole, 3):
        assert called(read(name, text[:end])) == [], text[:end]


@every_format
def test_truncated_call_after_a_complete_one_keeps_the_complete_one(name: str) -> None:
    form = FORMATS[name]
    first = form.block("add", form.args({"a": 1}))
    text = form.join([first, form.block("add", form.args({"text": "cut off"}))])
    parsed = read(name, text[: text.index("cut")])
    assert called(parsed) == [("add", {"a": 1})]


JSON_FORMATS = [name for name, form in FORMATS.items() if form.json]
XML_FORMATS = [name for name, form in FORMATS.items() if not form.json]


@pytest.mark.parametrize("name", JSON_FORMATS)
@pytest.mark.parametrize(
    ("args", "status"),
    [
        ('"{\\"a\\": 1}"', Status.OK),
        ('""', Status.OK),
        ("null", Status.OK),
        ('{ "a" :\n 1 }', Status.OK),
        ('"not json"', Status.INVALID_JSON),
        ("[1, 2]", Status.MALFORMED),
        ("3", Status.MALFORMED),
        ('"[1]"', Status.MALFORMED),
        ('{"a": NaN}', Status.INVALID_JSON),
    ],
)
def test_arguments_in_any_form(name: str, args: str, status: Status) -> None:
    form = FORMATS[name]
    assert statuses(read(name, form.join([form.block("add", args)]))) == [status]


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_a_closing_tag_inside_of_an_argument_is_text(name: str) -> None:
    args = {"text": f"before {FORMATS[name].closing} after"}
    assert called(read(name, written(name, ("add", args), ("now", {})))) == [("add", args), ("now", {})]


@pytest.mark.parametrize("name", XML_FORMATS)
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "123", "123"),
        ("text", '{"x": 1}', '{"x": 1}'),
        ("text", "true", "true"),
        ("text", '"quoted"', '"quoted"'),
        ("a", "123", 123),
        ("b", "1e3", 1000.0),
        ("flag", "True", True),
        ("flag", "false", False),
        ("items", "[1, 2]", [1, 2]),
        ("o", '{"x": null}', {"x": None}),
        ("maybe", "null", None),
        ("maybe", "none of it", "none of it"),
        ("a", "many", "many"),
        ("unknown", "123", "123"),
    ],
)
def test_values_have_the_type_of_their_schema(name: str, key: str, text: str, value: Any) -> None:
    form = FORMATS[name]
    assert called(read(name, form.join([form.block("add", form.args({key: text}))]))) == [("add", {key: value})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[TOOL_CALLS]add[ARGS]{"a": 1}', [("add", {"a": 1})]),
        ('[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}', [("add", {"a": 1})]),
        ('[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]now{}', [("add", {"a": 1}), ("now", {})]),
        ('[TOOL_CALLS]add[ARGS]{"a": 1', []),
        ("[TOOL_CALLS]add", []),
        ('[TOOL_CALLS] {"name": "add", "arguments": {"a": 1}}', [("add", {"a": 1})]),
    ],
)
def test_mistral_of_version_11(text: str, expected: list[Any]) -> None:
    assert called(read("mistral", text)) == expected


def test_the_ids_of_mistral_and_kimi_are_the_models_own_and_stay_unique() -> None:
    assert read("mistral", '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}').calls[0].id == "abcdefghi"
    parsed = read("kimi_k2", written("kimi_k2", ("ns.search", {}), ("ns.search", {})))
    assert [call.id for call in parsed.calls] == ["functions.ns.search:0"] * 2
    first = assistant_message(parsed, [])
    second = assistant_message(parsed, [first])
    identities = [call["id"] for message in (first, second) for call in message["tool_calls"]]
    assert len(set(identities)) == 4
    assert all(len(identity) == 9 for identity in identities[1:])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ('<|python_tag|>{"name": "other", "parameters": {}}', [("other", {})]),
        ('{"name": "Ada", "born": 1815}', []),
        ('{"name": "other", "parameters": {}}', []),
        ('The call is {"name": "add", "parameters": {"a": 1}}', []),
        ('{"name": "add", "parameters": {"a": 1}} is what I would call', []),
    ],
)
def test_json_in_prose_is_not_a_llama_call(text: str, expected: list[Any]) -> None:
    assert called(read("llama3_json", text)) == expected


@pytest.mark.parametrize("name", ["hermes", "glm", "mistral", "kimi", "deepseek", "qwen3_coder"])
def test_only_the_token_of_a_marker_is_a_marker(name: str) -> None:
    """The letters of a marker, written without its token, call nothing and stay as they are."""
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    form = {"glm": "glm45", "kimi": "kimi_k2", "deepseek": "deepseek_v3"}.get(name, name)
    text = written(form, ("add", {"a": 1}))
    letters = [token for character in text for token in tokenizer.encode(character)]
    stops = tokenizer.encode(family.stop)
    parser = load_parser(form)
    assert called(parse_ids(parser, tokenizer, tokenizer.encode(text), (), stops, TOOLS)) == [("add", {"a": 1})]
    assert parse_ids(parser, tokenizer, letters + stops, (), stops, TOOLS) == Parsed(text)


def test_a_prompt_that_opens_reasoning_is_seen() -> None:
    tokenizer = load_tokenizer()
    ids = tokenizer.encode("hm\n</think>\n\nok<|im_end|>")
    prompt = tokenizer.encode("<|im_start|>assistant\n<think>\n")
    parsed = parse_ids(load_parser("hermes"), tokenizer, ids, prompt, tokenizer.encode("<|im_end|>"), None)
    assert (parsed.reasoning, parsed.content) == ("hm", "ok")


FUZZ = 100_000
PIECES = [
    "{", "}", "[", "]", '"', ":", ",", "\\", "\n", " ", "a", "1", "name", "arguments", "parameters", "null", "```", "`",
    ">",
    '{"name": "add", "arguments": {"a": 1}}', "<think>", "</think>", "<function=add>", "</function>", "<parameter=a>",
    "</parameter>", "[ARGS]", "[CALL_ID]", ";", "\ud800", "\x00", "日本", "1e999", "-" * 5, "[" * 50, "<tool_call>",
]  # fmt: skip


def _random_text(chance: random.Random, markers: tuple[str, ...]) -> str:
    return "".join(chance.choices([*PIECES, *markers * 4], k=chance.randrange(1, 14)))


@pytest.mark.slow
def test_nothing_that_a_model_can_write_raises() -> None:
    chance = random.Random(20)
    parsers = {name: load_parser(name) for name in PARSERS}
    names = sorted(parsers)
    for number in range(FUZZ):
        parser = parsers[names[number % len(names)]]
        text = _random_text(chance, parser.markers)
        parsed = parse_text(parser, text, TOOLS, prefilled=number % 7 == 0)
        message = assistant_message(parsed, [])
        assert len({call["id"] for call in message.get("tool_calls", ())}) == len(parsed.calls)
        assert all(isinstance(call.arguments, dict) for call in parsed.calls if call.status is Status.OK)


@every_format
def test_depth_and_size_do_no_harm(name: str) -> None:
    form: Format = FORMATS[name]
    deep = "[" * 100_000
    for text in (deep, form.join([form.block("add", deep)]), form.block("add", "1") * 300, "<tool_call>" * 3000):
        assert isinstance(read(name, text), Parsed)
