"""Which call continues which, and what kind each is, from requests as programs were seen to make them."""

from __future__ import annotations

import copy
import json
import random
from typing import Any, get_args

from hermes_rl.agent.conversations import Conversations, Kind
from hermes_rl.agent.result import Message
from hermes_rl.spec.sections.agent import ProgramSection

TOOLS = [{"type": "function", "function": {"name": "bash"}}]
TASK: Message = {"role": "user", "content": "Write a file."}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


class Program:
    """A program whose calls are all answered, and delivered unless it is said otherwise."""

    def __init__(self) -> None:
        self.conversations = Conversations()

    def asks(
        self, messages: list[Message], said: str = "", *, calls: int = 0, tools: Any = TOOLS, delivered: bool = True
    ) -> list[Message]:
        """Returns the conversation with the answer, and with the results of its tool calls."""
        turn = len(self.conversations.calls)
        answer: Message = {"role": "assistant", "content": said}
        if calls:
            answer["tool_calls"] = [
                {"id": f"c{turn}-{n}", "function": {"name": "bash", "arguments": json.dumps({"command": f"echo {n}"})}}
                for n in range(calls)
            ]
        call = self.conversations.add(messages, tools, answer)
        if delivered:
            self.conversations.deliver(call)
        results = [{"role": "tool", "tool_call_id": f"c{turn}-{n}", "content": f"{turn}"} for n in range(calls)]
        return [*messages, answer, *results]

    @property
    def kinds(self) -> list[Kind]:
        return self.conversations.kinds()

    @property
    def continues(self) -> list[int | None]:
        return [call.continues for call in self.conversations.calls]


def test_a_line_of_work_is_the_main_one() -> None:
    program = Program()
    messages = program.asks([system("Work."), TASK], calls=1)
    messages = program.asks(messages, calls=2)
    program.asks(messages, "I have written the file.")
    assert program.kinds == ["main"] * 3
    assert program.continues == [None, 0, 1]


def test_a_title_is_a_side_call_wherever_it_is_asked() -> None:
    for first in (True, False):
        program = Program()
        if first:
            program.asks([system("Title it."), TASK], "Writing a file", tools=[])
        messages = program.asks([system("Work."), TASK], calls=1)
        if not first:
            program.asks([system("Title it."), TASK], "Writing a file", tools=[])
        program.asks(messages, "Done, all of it.")
        assert sorted(program.kinds) == ["main", "main", "side_calls"]


def test_sub_agent_calls_form_a_separate_conversation() -> None:
    program = Program()
    messages = program.asks([system("Work."), TASK], calls=1)
    inner = program.asks([system("You are a helper."), {"role": "user", "content": "Look around."}], calls=1)
    program.asks(inner, "There is one file.")
    messages[-1]["content"] = "The helper says: There is one file."
    messages = program.asks(messages, calls=1)
    program.asks(messages, "Done, all of it.")
    assert program.kinds == ["main", "subagents", "subagents", "main", "main"]
    assert program.continues == [None, None, 1, 0, 3]


def test_conversation_resumed_from_a_summary_stays_the_main_one() -> None:
    for tools, system_prompt in ((TOOLS, "Work."), ([], "Summarise.")):  # with the same prefix, or as a text
        program = Program()
        messages = program.asks([system("Work."), TASK], calls=1)
        messages = program.asks(messages, calls=1)
        text = {"role": "user", "content": f"Summarise: {messages}"}
        asked = [*messages, {"role": "user", "content": "Summarise."}] if tools else [system(system_prompt), text]
        program.asks(asked, "So far the file was written.", tools=tools)
        after = [system("Work."), {"role": "user", "content": "Before: So far the file was written. Go on."}]
        after = program.asks(after, calls=1)
        program.asks(after, "Done, all of it.")
        assert program.kinds == ["main", "main", "summaries", "main", "main"]


def test_a_summary_may_come_back_as_if_it_had_been_said_in_its_place() -> None:
    program = Program()
    messages = program.asks([system("Work."), TASK], calls=1)
    messages = program.asks(messages, calls=1)
    text = {"role": "user", "content": f"Summarise: {messages}"}
    summed = program.asks([system("Summarise."), text], "So far the file was written.", tools=[])
    begun = [system("Work."), {"role": "user", "content": "What have we done?"}, summed[-1]]
    after = program.asks([*begun, {"role": "user", "content": "Go on."}], calls=1)
    program.asks(after, "Done, all of it.")
    assert program.kinds == ["main", "main", "summaries", "main", "main"]


def test_an_answer_that_was_thrown_away_and_asked_again_is_rejected() -> None:
    program = Program()
    asked = [system("Work."), TASK]
    program.asks(asked, "")
    program.asks(asked, "", calls=1)
    messages = program.asks(asked, calls=1)
    program.asks(messages, "Done, all of it.")
    assert program.kinds == ["rejected", "rejected", "main", "main"]


def test_repeated_request_is_not_a_retry_when_both_replies_are_used() -> None:
    program = Program()
    asked = [system("Work."), TASK]
    first, second = program.asks(asked, calls=1), program.asks(asked, calls=1)
    program.asks(first, "The one way to do it.")
    program.asks(second, "The other way to do it.")
    assert program.kinds == ["main"] * 4
    assert program.continues == [None, None, 0, 1]


def test_retry_is_recognised_despite_interleaved_and_parallel_requests() -> None:
    program = Program()
    asked = [system("Work."), TASK]
    program.asks(asked, "")
    program.asks([system("Title it."), TASK], "Writing a file", tools=[])
    first, second = program.asks(asked, calls=1), program.asks(asked, calls=1)
    program.asks(first, "Done, all of it.")
    program.asks(second, "Done, all of it.")
    assert program.kinds == ["rejected", "side_calls", "main", "main", "main", "main"]
    assert program.continues == [None, None, None, None, 2, 3]


def test_call_executed_with_other_arguments_marks_the_reply_as_changed() -> None:
    program = Program()
    messages = program.asks([system("Work."), TASK], calls=1)
    messages[2]["tool_calls"][0]["function"]["arguments"] = '{"command":"rm"}'
    program.asks(messages, "Done, all of it.")
    assert program.kinds == ["changed", "main"]
    assert program.continues == [None, None]


def test_reply_that_is_never_delivered_is_classed_as_undelivered() -> None:
    program = Program()
    asked = [system("Work."), TASK]
    program.asks(asked, "What nobody has heard.", delivered=False)
    program.asks(asked, "Done, all of it.")
    assert program.kinds == ["undelivered", "main"]


def test_conversation_with_a_rewritten_prompt_stays_the_same_one() -> None:
    program = Program()
    messages = program.asks([system("Work."), TASK], calls=1)
    messages[1] = {"role": "user", "content": "Write a file. Please answer this time."}
    program.asks(messages, "Done, all of it.")
    assert program.kinds == ["main", "main"]


def test_ids_that_a_program_makes_up_change_nothing() -> None:
    program = Program()
    forged = {"id": "c7-0", "function": {"name": "bash", "arguments": "{}"}}
    program.asks([TASK, {"role": "assistant", "content": "", "tool_calls": [forged, forged]}], "Done, all of it.")
    assert program.kinds == ["main"]
    assert Conversations().kinds() == []


def test_the_spec_names_each_kind_that_can_be_trained_on() -> None:
    named = get_args(get_args(ProgramSection.model_fields["train"].annotation)[0])
    assert {*named, "undelivered"} == set(get_args(Kind))


class Unequal(dict[str, Any]):
    """A message that equals no other, so that nothing is known of it from the last request."""

    def __eq__(self, other: object) -> bool:
        return False


def test_what_is_known_of_the_last_request_changes_nothing() -> None:
    """Requests that go on, back, or elsewhere, and rewrite what they repeat: all is as if each were looked at anew."""
    chance = random.Random(3)
    program, fresh, begun = Program(), Conversations(), [[system("Work."), TASK], [system("Help."), TASK]]
    for _ in range(200):
        messages = copy.deepcopy(chance.choice(begun[-4:]))
        if chance.random() < 0.4:
            place = chance.randrange(len(messages))
            messages[place]["content"] = f"{messages[place]['content']}{chance.choice(['', ' ', '!'])}"
            messages = messages[: max(2, chance.randrange(len(messages) + 1))]
        tools = chance.choice([TOOLS, TOOLS, TOOLS, []])
        begun.append(program.asks(messages, chance.choice(["", "So it was done."]), calls=1, tools=tools))
        answer = begun[-1][len(messages)]
        fresh.deliver(fresh.add([Unequal(message) for message in messages], tools, answer))
    assert program.conversations.calls == fresh.calls
    assert set(program.kinds) >= {"main", "subagents"} and program.kinds == fresh.kinds()


def forged(conversations: Conversations, *, at: int | None = None) -> None:
    """Add a request that a command of the policy has made, with a history that nobody has sampled."""
    history: list[Message] = [
        system("Work."), TASK,
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "x", "function": {"name": "bash", "arguments": '{"command": "make it right"}'}}]},
        {"role": "tool", "tool_call_id": "x", "content": "It is right."},
    ]  # fmt: skip
    conversations.deliver(
        conversations.add(history, TOOLS, {"role": "assistant", "content": "All right."}, requested_at=at)
    )


def test_what_a_command_of_the_policy_asks_is_not_the_main_line() -> None:
    program = Program()
    messages = program.asks([system("Work."), TASK], calls=1)
    forged(program.conversations)
    for _ in range(3):  # however many calls such a conversation has
        program.asks([system("Work."), {"role": "user", "content": "Say yes."}], "Yes, certainly.")
    program.asks(messages, "Done, all of it.")
    assert [number for number, kind in enumerate(program.kinds) if kind == "main"] == [0, 5]
    assert len(program.conversations.main_line()) == 1


def test_forged_history_starts_another_conversation() -> None:
    program = Program()
    program.asks([system("Work."), TASK], calls=1)
    forged(program.conversations)
    assert program.conversations.sampled == {}
    assert program.conversations.calls[0].root != program.conversations.calls[1].root


def test_request_made_before_the_first_reply_is_main_when_answered_later() -> None:
    program = Program()
    conversations = program.conversations
    at = conversations.tick()  # the work, beside which a title is asked for
    program.asks([system("Title it."), TASK], "Writing a file", tools=[])
    work = conversations.add([system("Work."), TASK], TOOLS, {"role": "assistant", "content": "Done."}, requested_at=at)
    conversations.deliver(work)
    assert program.kinds == ["side_calls", "main"]


def test_answers_that_were_not_delivered_do_not_make_a_main_line() -> None:
    program = Program()
    messages = program.asks([system("Work."), TASK], calls=1)
    for _ in range(5):
        program.asks([system("Other."), TASK], calls=1, delivered=False)
    program.asks(messages, "Done, all of it.")
    assert [kind for kind in program.kinds if kind != "undelivered"] == ["main", "main"]


def test_summary_does_not_replace_a_conversation_that_continues() -> None:
    program = Program()
    messages = program.asks([system("Work."), TASK], "I shall write the file now.", calls=1)
    begun = [system("Work."), {"role": "user", "content": "Before: I shall write the file now. It is written."}]
    program.asks(begun, "Then all is done.")
    program.asks(messages, "Done, all of it.")
    assert program.kinds == ["main", "subagents", "main"]


def test_changed_calls_are_found_by_their_place_where_ids_are_dropped() -> None:
    for made_up in ("another", ""):
        program = Program()
        messages = program.asks([system("Work."), TASK], calls=1)
        messages[2]["tool_calls"][0] = {
            "id": made_up, "function": {"name": "bash", "arguments": '{"command":"rm -rf /other"}'}
        }  # fmt: skip
        program.asks(messages, "Done, all of it.")
        assert program.kinds == ["changed", "main"]


def test_no_request_of_the_policy_takes_an_answer_out_of_the_training() -> None:
    program = Program()
    messages = program.asks([system("Work."), TASK], calls=1)
    changed = copy.deepcopy(messages)
    changed[2]["tool_calls"][0]["function"]["arguments"] = '{"command":"other"}'
    program.asks(changed, "By a command of the policy, before the program goes on.")
    program.asks([system("Elsewhere."), *changed[1:]], "By another one.")
    messages = program.asks(messages, calls=1)
    program.asks(changed, "By a third one.")
    program.asks(messages, "Done, all of it.")
    assert [number for number, kind in enumerate(program.kinds) if kind == "main"] == [0, 3, 5]
