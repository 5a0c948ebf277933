"""Of what a program sends, rewards see as evidence what the policy has sampled and who executed it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hermes_rl.agent.conversations import Conversations, ProgramCall
from hermes_rl.agent.evidence import marked, matched
from hermes_rl.agent.result import AgentResult, Message, ToolCall
from hermes_rl.scoring.reward_function import find_reward

PROMPT: list[Message] = [{"role": "system", "content": "Work."}, {"role": "user", "content": "Add 1 and 2."}]


def answer(*arguments: dict[str, Any], name: str = "add", turn: int = 1, content: str = "") -> Message:
    calls = [
        {"id": f"c{turn}-{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(each)}}
        for number, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def result(content: str, id: str = "") -> Message:  # noqa: A002, as the field of the message
    return {"role": "tool", "tool_call_id": id, "content": content}


def results_of(messages: list[Message]) -> dict[str, str]:
    return {
        each["tool_call_id"]: each["content"] for each in messages if each["role"] == "tool" and "context" not in each
    }


def contexts(messages: list[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message.get("context")]


@pytest.mark.parametrize("ids", [("c1-0", "c1-1", "c1-2"), ("", "", ""), ("same", "same", "same")])
def test_results_belong_to_the_calls_of_the_answer_before_them(ids: tuple[str, str, str]) -> None:
    first = answer({"a": 1}, {"a": 2}, {"a": 3})
    sent = [
        *PROMPT,
        first,
        *(result(f"{number}", each) for number, each in enumerate(ids)),
        answer(turn=2, content="Done."),
    ]
    found = marked(sent, {2: first, 6: sent[6]}, PROMPT)
    assert results_of(found) == {"c1-0": "0", "c1-1": "1", "c1-2": "2"}
    assert contexts(found) == []


def test_results_in_another_order_are_matched_by_call_id() -> None:
    first = answer({"a": 1}, {"a": 2})
    sent = [*PROMPT, first, result("of the second", "c1-1"), result("of the first", "c1-0")]
    assert results_of(marked(sent, {2: first}, PROMPT)) == {"c1-0": "of the first", "c1-1": "of the second"}


def test_an_id_that_comes_again_in_a_later_turn_changes_no_earlier_result() -> None:
    first, second = answer({"a": 1}), answer({"a": 2}, turn=2)
    sent = [*PROMPT, {**first}, result("one", "c1-0"), {**second}, result("two", "c1-0")]
    assert results_of(marked(sent, {2: first, 4: second}, PROMPT)) == {"c1-0": "one", "c2-0": "two"}


def test_unsampled_messages_are_marked_as_context_with_their_results() -> None:
    real, made_up = answer({"a": 1}), answer({"a": 9}, turn=7)
    sent = [*PROMPT, made_up, result("nine", "c7-0"), real, result("one", "c1-0"), result("more", "c1-0"),
            {"role": "user", "content": "Well done."}, answer(content="Yes.")]  # fmt: skip
    found = marked(sent, {4: real, 8: sent[8]}, PROMPT)
    assert contexts(found) == [2, 3, 6, 7]
    assert AgentResult(messages=found, prompt_length=2).texts == ["", "Yes."]
    # A conversation that has taken the place of another begins with words of the program's.
    begun = [PROMPT[0], {"role": "user", "content": "Before: all was right."}, real]
    assert contexts(marked(begun, {2: real}, PROMPT)) == [1]


def test_sampled_reply_replaces_the_version_that_the_program_sent() -> None:
    real = answer({"a": 1}, content="I add.")
    sent = [*PROMPT, {**answer({"a": 1}), "content": [{"type": "text", "text": "I add. "}]}]
    assert marked(sent, {2: real}, PROMPT)[2] == real


def delivered(*answers: Message) -> list[ProgramCall]:
    conversations = Conversations()
    for each in answers:
        conversations.deliver(conversations.add(PROMPT, [], each))
    return conversations.calls


def spoken(name: str, arguments: Any, id: str, result: str | None = None) -> tuple[ToolCall, bool]:  # noqa: A002
    return ToolCall(1, id, name, arguments, result or "", executed_by="program"), result is not None


def executed(arguments: Any, result: str) -> ToolCall:
    return ToolCall(0, "mcp-1", "add", arguments, result)


def told(calls: list[ToolCall]) -> list[tuple[Any, ...]]:
    return [(call.turn, call.id, call.name, call.result, call.executed_by) for call in calls]


def test_a_call_of_the_specs_tools_is_one_that_the_tool_server_executed() -> None:
    calls = [spoken("mcp__ours__add", {"a": 1}, "c1", "made up"), spoken("add", {"a": 2}, "c2", "made up")]
    assert told(matched(calls, [executed({"a": 1}, "1")], [], ["add"])) == [(1, "c1", "add", "1", "hermes_rl")]


def test_a_call_of_the_programs_own_tool_is_as_the_program_tells_it() -> None:
    calls = [
        spoken("read", {"path": "f"}, "c1", "text"),
        spoken("read", {"path": "g"}, "c2"),
        spoken("preadd", {}, "c3", ""),
    ]
    assert told(matched(calls, [], [], ["add"])) == [
        (1, "c1", "read", "text", "program"), (1, "c3", "preadd", "", "program"),
    ]  # fmt: skip


def test_execution_without_a_requesting_reply_is_not_a_policy_call() -> None:
    of_sub_agent = answer({"a": 5}, turn=3)
    found = matched(
        [],
        [executed({"a": 4}, "4"), executed({"a": 5}, "5"), executed({"a": 5}, "5")],
        delivered(of_sub_agent),
        ["add"],
    )
    assert told(found) == [(0, "c3-0", "add", "5", "hermes_rl")]


def test_equal_calls_are_matched_once_each_and_in_order() -> None:
    calls = [spoken("add", {"a": 1}, f"c{number}") for number in range(3)]
    assert told(matched(calls, [executed({"a": 1}, "first"), executed({"a": 1}, "second")], [], ["add"])) == [
        (1, "c0", "add", "first", "hermes_rl"), (1, "c1", "add", "second", "hermes_rl"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given", "option"),
    [
        ("tool_usage", {}, {"calls": "program"}),
        ("citations", {}, {"calls": "program"}),
        ("tool_calls_match", {"calls": [{"name": "fetch"}]}, {"executed_by": "program"}),
    ],
)
def test_shipped_rewards_count_program_calls_only_with_the_option(
    name: str, given: dict[str, Any], option: dict[str, Any]
) -> None:
    reward = find_reward(name, None).function
    for executed_by, plain in (("hermes_rl", 1.0), ("program", 0.0)):
        call = ToolCall(1, "c1", "fetch", {}, "See https://example.org/a.", executed_by=executed_by)  # type: ignore[arg-type]
        messages = [*PROMPT, {"role": "assistant", "content": "It is https://example.org/a"}]
        ended = AgentResult(messages=messages, prompt_length=2, tool_calls=[call])
        assert reward(ended, **given).value == plain
        assert reward(ended, **given, **option).value == 1.0
