"""Texts that once held the runner, by whom they held; each is read at once now."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from hermes_rl.agent.history import kept_message, sendable
from hermes_rl.sandbox.base import Conversation
from hermes_rl.scoring.judge import number_in, verdict_in
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.parsers.base import parse_ids, parse_text
from hermes_rl.tokens.parsers.table import PARSERS, load_parser
from hermes_rl.tokens.rendering import for_template
from hermes_rl.tools import editing, execute
from hermes_rl.tools.base import Tool, ToolInputError, Toolkit, ToolRuntime
from hermes_rl.tools.editing import NoMatchError, PatchFormError
from hermes_rl.tools.execute import MAX_CALLS_PER_TURN, TOO_MANY, checked_arguments, execute_calls
from hermes_rl.tools.mcp_client import MOST_BLOCKS, _Pump, _result_text, over_process
from hermes_rl.tools.toolsets._patch import _diff_lines
from hermes_rl.values import MOST_VALUES, too_many_values

MANY = 60_000
BROAD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def parse(name: str, text: str) -> Any:
    return parse_text(load_parser(name), text)


TEXTS: dict[str, Callable[[], Any]] = {
    "blanks behind a separator": lambda: parse(
        "deepseek_v3", f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{' ' * MANY}x<｜tool▁call▁end｜>"
    ),
    "calls that are quoted": lambda: [parse(name, "`<tool_call>` " * MANY) for name in ("hermes", "qwen3_coder")],
    "lists that are quoted": lambda: parse("mistral", "`[TOOL_CALLS]` " * MANY),
    "values without an end": lambda: parse(
        "glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call>" * (MANY // 4)
    ),
    "functions without an end": lambda: parse("qwen3_coder", "<tool_call><function=f></tool_call>" * (MANY // 4)),
    "parameters without an end": lambda: parse(
        "qwen3_coder", "<tool_call><function=f>" + "<parameter=a>x</parameter> y" * MANY + "</function></tool_call>"
    ),
    "calls that are no JSON": lambda: parse("hermes", '<tool_call>{"a"x</tool_call>' * (MANY // 4)),
    "broken calls in each other": lambda: parse("mistral", "[TOOL_CALLS][" + '{"a":[{},' * MANY),
    "a judge's braces": lambda: _refused(verdict_in, "{" * MANY),
    "a judge's objects in each other": lambda: _refused(verdict_in, ('{"a":[' + "1," * 500) * 500),
    "blanks behind @@": lambda: editing.parse("*** Update File: a\n@@" + " " * MANY + "x\n-a\n+b"),
    "blanks in a header": lambda: _refused(editing.parse, "*** Update File: a" + " " * MANY + "b"),
    "a diff of equal lines": lambda: list(
        _diff_lines("".join(f"x\nu{i}\n" for i in range(2500)), "x\n" * 199, "a", "b")
    ),
    "an indentation of megabytes": lambda: _refused(
        lambda new: editing.replace(" " * 2_000_000 + "x", "x\n", new), "z\n" * 50_000
    ),
}  # fmt: skip


def _refused(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises((ValueError, PatchFormError, NoMatchError)):
        read(text)


@pytest.mark.parametrize("what", TEXTS)
def test_a_text_that_held_the_runner_is_read_at_once(what: str) -> None:
    began = time.thread_time()
    TEXTS[what]()
    assert time.thread_time() - began < 1.0


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_never_takes_what_is_nested_without_end(name: str) -> None:
    nested = '{"a":' * 900 + "1" + "}" * 900
    for text in (f"<tool_call>{nested}</tool_call>", f"[TOOL_CALLS][{nested}]", nested):
        assert not any(call.arguments for call in parse(name, text).calls)


def test_refused_arguments_are_not_parsed_for_templates_or_requests() -> None:
    for arguments in (
        '{"a": ' * 300 + "1" + "}" * 300,
        '{"a": [' + "1," * MOST_VALUES + "1]}",
        '{"a": %s}' % ("1" * 4000),
    ):
        called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        read = for_template(called)["tool_calls"][0]["function"]["arguments"]
        (sent,) = sendable([kept_message(called, 1)])
        refused = len(arguments) != 4007
        assert read == (arguments if refused else json.loads(arguments))
        assert sent["tool_calls"][0]["function"]["arguments"] == ("{}" if refused else arguments)


def test_what_is_read_at_once_lets_others_have_their_turn() -> None:
    """Python reads JSON in one piece, and no other thread has its turn meanwhile."""
    texts = [
        json.dumps({f"key{number}": 1 for number in range(100_000)}),
        "[" + "1.2345e-300," * 190_000 + "1]",
        "[" + ("1" * 4300 + ",") * 900 + "1]",
        "[" + "[]," * 95_000 + "1]",
    ]
    for text in texts:
        if not too_many_values(text):
            began = time.thread_time()
            json.loads(text)
            assert time.thread_time() - began < 0.2
    assert any(map(too_many_values, texts))


def test_the_letters_of_a_break_in_an_argument_are_an_argument() -> None:
    tokenizer = load_tokenizer()
    written = json.dumps({"name": "f", "arguments": {"a": "\\ufdd0 <tool_call>"}})
    pieces = ("<tool_call>", written, "</tool_call>")
    ids = [token for piece in pieces for token in tokenizer.encode(piece)]
    parse_ids(load_parser("hermes"), tokenizer, ids, (), (), None)


class Taking(Tool):
    """Takes what a schema says."""

    name = "taking"
    description = ""
    parameters: dict[str, Any] = {}

    def __init__(self, schema: dict[str, Any]) -> None:
        self.parameters = schema

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        return ""


async def test_arguments_are_bounded() -> None:
    with pytest.raises(ToolInputError, match="too large to be read"):
        await checked_arguments('{"a": [' + "1," * MOST_VALUES + "1]}", Taking(BROAD))
    with pytest.raises(ToolInputError, match="within each other"):
        await checked_arguments('{"a": ' + "[" * 300 + "]" * 300 + "}", Taking(BROAD))
    # Numbers that have one hash, of which a set would compare each with all others.
    alike = [number * ((1 << 61) - 1) for number in range(1, 40_000)]
    began = time.process_time()
    assert await checked_arguments(json.dumps({"a": alike}), Taking(BROAD)) == ({"a": alike}, 0)
    with pytest.raises(ToolInputError, match="no item twice"):
        await checked_arguments('{"a": [1, {"b": 1.0}, {"b": 1}]}', Taking(BROAD))
    assert time.process_time() - began < 5


async def test_checking_many_unknown_parameters_is_fast() -> None:
    known = {"type": "object", "properties": {f"a_parameter_with_a_long_name_{n}": {} for n in range(20)}}
    written = json.dumps({f"a_parameter_with_a_long_name_n{n}": 1 for n in range(15_000)})
    began = time.process_time()
    with pytest.raises(ToolInputError, match="did you mean"):
        await checked_arguments(written, Taking(known))
    assert time.process_time() - began < 1


async def test_a_pattern_of_a_tool_that_never_ends_is_the_calls_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "CHECK_SECONDS", 0.2)
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    assert await checked_arguments('{"a": "aaa"}', Taking(schema)) == ({"a": "aaa"}, 0)
    with pytest.raises(ToolInputError, match="text that matches"):
        await checked_arguments('{"a": "b"}', Taking(schema))
    with pytest.raises(ToolInputError, match="cannot be checked"):
        await checked_arguments(json.dumps({"a": "a" * 40 + "b"}), Taking(schema))


async def test_a_schema_with_many_ways_is_not_followed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "CHECK_SECONDS", 0.2)
    node = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}, "b": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": {"anyOf": [node, {**node, "required": ["b"]}]}}}
    nested: Any = {"b": "x"}
    for _ in range(60):
        nested = {"a": nested}
    began = time.process_time()
    with pytest.raises(ToolInputError):
        await checked_arguments(json.dumps(nested), Taking(schema))
    assert time.process_time() - began < 5


async def test_tool_calls_over_the_limit_of_a_turn_are_not_executed() -> None:
    calls = [
        {"id": str(i), "function": {"name": "nothing", "arguments": "{}"}} for i in range(MAX_CALLS_PER_TURN + 500)
    ]
    async with ToolRuntime(toolkit=Toolkit()) as runtime:
        outcomes = await execute_calls(calls, runtime.toolkit, runtime, turn=1)
    assert [outcome.id for outcome in outcomes] == [call["id"] for call in calls]
    assert [TOO_MANY in outcome.content for outcome in outcomes] == [False] * MAX_CALLS_PER_TURN + [True] * 500


def test_values_are_counted_outside_of_strings() -> None:
    assert not too_many_values(json.dumps({"a": ",[{" * MOST_VALUES}))
    assert not too_many_values(json.dumps({"a": '"\\,' * MOST_VALUES}).encode())
    assert too_many_values("[" + "[]," * MOST_VALUES)
    assert too_many_values('{"a"' * MOST_VALUES)


def test_score_with_hundreds_of_digits_is_not_a_verdict() -> None:
    with pytest.raises(ValueError, match="must be a number"):
        number_in({"score": 10**400}, "score", 0, 1)


async def test_parts_and_values_of_an_mcp_servers_answers_are_bounded() -> None:
    from mcp_types import CallToolResult

    blocks = [{"type": "text", "text": "x"}] * (MOST_BLOCKS + 7)
    read = _result_text(CallToolResult.model_validate({"content": blocks}))
    assert read.count("x") == MOST_BLOCKS
    assert read.endswith("[... 7 parts omitted ...]")
    line = json.dumps({"jsonrpc": "2.0", "id": 1, "result": {"content": blocks * 400}}).encode()
    to_session = Session()
    transport = over_process(cast(Conversation, Server([line + b"\n"])))
    await _Pump(cast(Conversation, Server([line + b"\n"])), transport, to_session, None).receive()
    assert to_session.messages == []
    assert transport.ended
    assert to_session.closed  # so that the call hears at once that the server is gone


class Session:
    """The stream to a session of the protocol."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.closed = False

    async def send(self, message: object) -> None:
        self.messages.append(message)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.closed = True


class Server:
    """The process of a server that has written this much."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def read(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""
