"""Tool calls: together and in order, and whatever is wrong with one is told to the model."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hermes_rl.agent.loop import UNPARSED_CALL_ERROR, HermesAgentLoop
from hermes_rl.agent.result import AgentResult
from hermes_rl.stop_reasons import StopReason
from tests.agent.scripted_chat import ScriptedChat, answer, call, calls, says

MakeLoop = Callable[..., HermesAgentLoop]
GO = [{"role": "user", "content": "go"}]
made: list[str] = []
"""The calls that reached a tool."""


@pytest.fixture(autouse=True)
def forget() -> None:
    made.clear()


def greet(name: str, times: int = 1) -> str:
    """Greet someone."""
    made.append(f"greet {name}")
    return f"hello {name}" * times


def ping() -> str:
    """Say pong."""
    made.append("ping")
    return "pong"


async def play(chat: ScriptedChat, loop: HermesAgentLoop, *tool_calls: object) -> AgentResult:
    """One turn with these calls, then the answer."""
    chat.script = [calls(*tool_calls)]
    result = await loop.run(GO)
    assert (result.stop_reason, result.turns_used) == (StopReason.FINISHED, 2)
    return result


def answers(result: AgentResult) -> list[str]:
    return [message["content"] for message in result.messages if message["role"] == "tool"]


# ------------------------------------------------------------------ left in the text


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (
            '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
            '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        ),
        ('<think>\nFirst.\n</think>\n\nSo: <tool_call>{"name": "pi', '<tool_call>{"name": "pi'),
        ("[TOOL_CALLS]ping[ARGS]{}", "[TOOL_CALLS]ping[ARGS]{}"),
        ("<think>\nI could write <tool_call> here.\n</think>\nDone.", None),
        ("<think>\nI could write <tool_call> here", None),
        ("Done.", None),
    ],
)
async def test_unparsed_call_in_the_text_is_counted_but_not_executed(
    chat: ScriptedChat, make_loop: MakeLoop, said: str, left: str | None
) -> None:
    chat.script = [says(said)]
    result = await make_loop(ping).run(GO)
    assert (result.stop_reason, result.turns_used, made) == (StopReason.FINISHED, 1, [])
    recorded = [(one.turn, str(one.arguments), one.error) for one in (*result.tool_calls, *result.tool_errors)]
    assert recorded == ([(1, left, UNPARSED_CALL_ERROR)] * 2 if left else [])


async def test_text_like_a_call_is_text_where_no_tool_is_offered(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    chat.script = [says("<tool_call>{}</tool_call>")]
    assert (await make_loop().run(GO)).tool_errors == []


# ------------------------------------------------------------------ together, in order


async def test_calls_of_one_turn_run_together_and_are_answered_in_order(
    chat: ScriptedChat, make_loop: MakeLoop
) -> None:
    ended: list[int] = []
    all_of_them = asyncio.Barrier(3)

    async def nap(turn: int) -> str:
        """Wait for the others, and then for one's turn to end."""
        await all_of_them.wait()
        while len(ended) < turn:
            await asyncio.sleep(0)
        ended.append(turn)
        return f"the end {turn}"

    turns = [2, 1, 0]
    tool_calls = [call("nap", {"turn": turn}, id=f"nap-{turn}") for turn in turns]
    result = await play(chat, make_loop(nap), *tool_calls)
    assert ended == [0, 1, 2]
    assert answers(result) == [f"the end {turn}" for turn in turns]
    assert [m["tool_call_id"] for m in chat.sent[-3:]] == [f"nap-{turn}" for turn in turns]


async def test_blocking_tools_run_together_too(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    all_of_them = threading.Barrier(4)

    def block(number: int) -> str:
        """Block until all others do."""
        all_of_them.wait(60)
        return f"went on {number}"

    result = await play(chat, make_loop(block), *[call("block", {"number": n}, id=str(n)) for n in range(4)])
    assert answers(result) == [f"went on {n}" for n in range(4)]


async def test_one_call_that_goes_wrong_does_not_touch_the_others(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    result = await play(
        chat, make_loop(greet), call("greet", {"name": "a"}), call("gret"), call("greet", {"name": "b"})
    )
    assert answers(result)[0::2] == ["hello a", "hello b"]
    assert [error.tool_name for error in result.tool_errors] == ["gret"]
    assert [record.error is None for record in result.tool_calls] == [True, False, True]


async def test_calls_with_missing_or_duplicate_ids_get_unique_ids(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    loop = make_loop(ping)
    await play(chat, loop, call("ping", id="x"), call("ping", id="x"), call("ping", id=None), call("ping", id=7))
    ids = [tool_call["id"] for tool_call in chat.sent[1]["tool_calls"]]
    assert ids == [message["tool_call_id"] for message in chat.sent[2:]]
    assert (ids[0], ids[3], len(set(ids))) == ("x", "7", 4)


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    "arguments",
    ["null", "[]", '"x"', "3", "true", "", " ", '{"name": "a"', "{'name': 'a'}", '{"name": "a"} {}', "[" * 100_000],
)
async def test_arguments_that_are_not_a_json_object_return_an_error_to_the_model(
    chat: ScriptedChat, make_loop: MakeLoop, arguments: str
) -> None:
    result = await play(chat, make_loop(greet), call("greet", arguments))
    (error,) = result.tool_errors
    assert (error.turn, error.tool_name, error.arguments) == (1, "greet", arguments)
    assert set(json.loads(error.tool_result)) == {"error"}
    assert chat.sent[-1] == {"role": "tool", "tool_call_id": "id-greet", "content": error.tool_result}
    assert made == []


@pytest.mark.parametrize("arguments", ["null", "[]", '"x"', "", '{"name": "a"'])
async def test_history_keeps_raw_arguments_and_requests_carry_valid_json(
    chat: ScriptedChat, make_loop: MakeLoop, arguments: str
) -> None:
    fine = call("greet", {"name": "a"}, id="fine")
    result = await play(chat, make_loop(greet), call("greet", arguments), fine)
    kept, sent = result.messages[1]["tool_calls"], chat.sent[1]["tool_calls"]
    assert (kept[0]["function"]["arguments"], kept[1]) == (arguments, fine)
    assert (sent[0]["function"]["arguments"], sent[1]) == ("{}", fine)


async def test_arguments_that_are_an_object_already_are_taken(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    function = {"name": "greet", "arguments": {"name": "a"}}
    result = await play(chat, make_loop(greet), {"id": "1", "function": function})
    assert (answers(result), result.tool_errors) == (["hello a"], [])
    assert chat.sent[1]["tool_calls"][0]["function"]["arguments"] == '{"name": "a"}'


@pytest.mark.parametrize("function", [{"name": "greet"}, {"name": "greet", "arguments": None}])
async def test_missing_arguments_are_an_error(
    chat: ScriptedChat, make_loop: MakeLoop, function: dict[str, Any]
) -> None:
    result = await play(chat, make_loop(greet), {"id": "1", "type": "function", "function": function})
    assert (len(result.tool_errors), made) == (1, [])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "name"),
        ({"times": 2}, "name"),
        ({"name": "a", "colour": "red"}, "colour"),
        ({"name": "a", "times": "often"}, "times"),
        ({"name": None}, "name"),
        ({"name": ["a"]}, "name"),
    ],
)
async def test_missing_unknown_and_mistyped_parameters_are_named_in_the_error(
    chat: ScriptedChat, make_loop: MakeLoop, arguments: dict[str, Any], told: str
) -> None:
    result = await play(chat, make_loop(greet), call("greet", arguments))
    assert told in json.loads(result.tool_errors[0].tool_result)["error"]
    assert made == []


async def test_failed_calls_do_not_reuse_the_result_of_an_earlier_call(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    tool_calls = [call("greet", {"name": "a"}), call("greet", "null"), call("greet", "[]"), call("greet", "")]
    result = await play(chat, make_loop(greet), *tool_calls)
    assert [("hello a" in text) for text in answers(result)] == [True, False, False, False]


@pytest.mark.parametrize("name", ["gret", "", "greet ", "os.system", "__class__"])
async def test_unknown_tool_error_lists_the_available_tools(chat: ScriptedChat, make_loop: MakeLoop, name: str) -> None:
    result = await play(chat, make_loop(greet), call(name, {"name": "a"}))
    (error,) = result.tool_errors
    assert (error.tool_name, "greet" in error.tool_result, made) == (name, True, [])


@pytest.mark.parametrize("name", [None, 3, ["greet"], {"name": "greet"}])
async def test_non_string_tool_name_is_unknown_tool(chat: ScriptedChat, make_loop: MakeLoop, name: object) -> None:
    result = await play(chat, make_loop(greet), {"id": "1", "function": {"name": name, "arguments": "{}"}})
    assert (len(result.tool_errors), made) == (1, [])


# ------------------------------------------------------------------ tools that fail


def raises_value() -> str:
    """Fail."""
    made.append("value")
    raise ValueError("odd /home/someone/secret/file.py")


def raises_runtime() -> str:
    """Fail as asyncio does."""
    made.append("runtime")
    raise RuntimeError("This event loop is already running")


def raises_stop() -> str:
    """Fail by an empty iterator."""
    made.append("stop")
    return str(next(iter(())))


def raises_exit() -> str:
    """Fail by leaving."""
    made.append("exit")
    sys.exit(1)


async def raises_cancelled() -> str:
    """Fail by cancelling itself."""
    made.append("cancelled")
    raise asyncio.CancelledError


async def raises_timeout() -> str:
    """Fail by a timeout of its own."""
    made.append("timeout")
    raise TimeoutError("the other side")


FAILING = [raises_value, raises_runtime, raises_stop, raises_exit, raises_cancelled, raises_timeout]


@pytest.mark.parametrize("tool", FAILING)
async def test_tool_that_raises_is_called_once_and_its_error_reaches_the_model(
    chat: ScriptedChat, make_loop: MakeLoop, tool: Callable[..., Any]
) -> None:
    result = await play(chat, make_loop(tool, ping), call(tool.__name__), call("ping"))
    assert made.count(tool.__name__.removeprefix("raises_")) == 1
    assert answers(result)[1] == "pong"
    (error,) = result.tool_errors
    assert (error.turn, error.tool_name, error.arguments) == (1, tool.__name__, "{}")
    assert tool.__name__ in json.loads(answers(result)[0])["error"]
    assert "secret" not in answers(result)[0]


async def hangs_alone() -> str:
    """Never end."""
    await asyncio.Event().wait()
    return "never"


def hangs_in_a_thread() -> str:
    """Take long, where nothing can stop it."""
    time.sleep(30)
    return "late"


@pytest.mark.parametrize("tool", [hangs_alone, hangs_in_a_thread])
async def test_hanging_tool_times_out_and_the_conversation_continues(
    chat: ScriptedChat, make_loop: MakeLoop, tool: Callable[..., Any]
) -> None:
    began = time.perf_counter()
    result = await play(chat, make_loop(tool, ping, tool_timeout=0.2), call(tool.__name__), call("ping"))
    assert time.perf_counter() - began < 20
    assert (result.tool_errors[0].error, answers(result)[1]) == ("timeout", "pong")
    assert "0.2 s" in answers(result)[0]


async def test_tool_results_are_sent_as_json_unless_they_are_text(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    def give(what: str) -> Any:
        """Give something odd."""
        return {"none": None, "list": [1], "object": object(), "nan": float("nan"), "text": "{"}[what]

    kinds = ["none", "list", "object", "nan", "text"]
    result = await play(chat, make_loop(give), *[call("give", {"what": kind}) for kind in kinds])
    texts = answers(result)
    assert (texts[0], texts[1], texts[4], result.tool_errors) == ("null", "[1]", "{", [])
    assert all(isinstance(text, str) for text in texts)


# ------------------------------------------------------------------ replies out of shape


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"content": 3},
        {"content": {"text": "x"}},
        {"content": True},
        {"content": "x", "tool_calls": {"name": "ping"}},
        {"content": "x", "tool_calls": "ping"},
        {"content": "x", "tool_calls": 3},
        {"content": "x", "role": "user"},
        {"content": "x", "role": None},
    ],
)
async def test_a_message_out_of_shape_ends_the_conversation(
    chat: ScriptedChat, make_loop: MakeLoop, message: dict[str, Any]
) -> None:
    chat.script = [answer(message)]
    result = await make_loop(ping).run(GO)
    assert (result.stop_reason in {StopReason.FINISHED, StopReason.EMPTY}, result.turns_used) == (True, 1)
    assert result.messages[-1]["role"] == "assistant"
    assert isinstance(result.final_response, str)


@pytest.mark.parametrize(
    "tool_call", [None, 3, "ping", [], {}, {"function": "ping"}, {"function": {}}, {"name": "ping"}]
)
async def test_malformed_tool_call_returns_an_error_to_the_model(
    chat: ScriptedChat, make_loop: MakeLoop, tool_call: object
) -> None:
    result = await play(chat, make_loop(ping), tool_call, call("ping"))
    assert (len(result.tool_errors), made) == (1, ["ping"])
    assert [message["role"] for message in chat.sent] == ["user", "assistant", "tool", "tool"]
    assert all({"id", "type", "function"} == set(sent) for sent in chat.sent[1]["tool_calls"])


async def test_arguments_are_repaired_only_with_repair_arguments(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    """Fault 31: a list handed over as JSON text is an error of the call, or converted as the spec says."""

    def add(numbers: list[int]) -> str:
        """Add numbers."""
        return str(sum(numbers))

    written = call("add", {"numbers": "[1, 2]"})
    refused = await play(chat, make_loop(add), written)
    assert "must be array, not string" in answers(refused)[0]
    assert len(refused.tool_errors) == 1
    repaired = await play(chat, make_loop(add, repair_arguments=True), written)
    assert (answers(repaired), repaired.tool_calls[0].arguments) == (["3"], {"numbers": [1, 2]})
