"""A conversation that a program sends back continues or is rendered anew, and is never guessed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl.tokens.rendering import next_prompt
from hermes_rl.tokens.transcript import snapshot
from tests.thorough import examples
from tests.tokens.conversations import Played
from tests.tokens.families import adder
from tests.tokens.test_exactness import CALL, begun, check, turn

Message = dict[str, Any]
Rewriting = Callable[[list[Message]], None]


def calling(message: Message, change: Callable[[str], str]) -> None:
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = change(call["function"]["arguments"])


def assistants(messages: list[Message]) -> list[Message]:
    return [message for message in messages if message["role"] == "assistant"]


def answers_changed(change: Callable[[Message], Any]) -> Rewriting:
    return lambda messages: [change(message) for message in assistants(messages)] and None


MEANING_KEPT: dict[str, Rewriting] = {
    "blanks around the text": answers_changed(lambda message: message.update(content=message["content"].strip())),
    "blanks added": answers_changed(lambda message: message.update(content=f"\n{message['content']} ")),
    "null for no text": answers_changed(lambda message: message.update(content=message["content"].strip() or None)),
    "reasoning trimmed": answers_changed(lambda message: message.update(reasoning_content="hm")),
    "compact arguments": answers_changed(
        lambda message: calling(message, lambda text: json.dumps(json.loads(text), separators=(",", ":")))
    ),
    "keys in another order": answers_changed(
        lambda message: calling(message, lambda text: json.dumps(dict(reversed(json.loads(text).items()))))
    ),
    "whole numbers": answers_changed(
        lambda message: calling(message, lambda text: text.replace("60000.0", "60000").replace("6e4", "60000"))
    ),
    "other ids": answers_changed(lambda message: [call.update(id="x") for call in message.get("tool_calls", ())]),
}
MEANING_CHANGED: dict[str, Rewriting] = {
    "a digit": answers_changed(lambda message: calling(message, lambda text: text.replace("60000.0", "60001"))),
    "a name twice": answers_changed(lambda message: calling(message, lambda text: text[:-1] + ', "a": 1}')),
    "a number that JavaScript rounds": answers_changed(
        lambda message: calling(message, lambda text: text.replace("9007199254740993", "9007199254740992"))
    ),
    "another tool": answers_changed(
        lambda message: [call["function"].update(name="sub") for call in message.get("tool_calls", ())]
    ),
    "a call less": answers_changed(lambda message: message.pop("tool_calls", None)),
    "a text cut short": answers_changed(lambda message: message.update(content=message["content"][:-2])),
    "a text under a call": answers_changed(lambda message: message.update(content="Got it.")),
    "other reasoning": answers_changed(lambda message: message.update(reasoning_content="I know better")),
    "a task extended": lambda messages: messages[0].update(content=messages[0]["content"] + " "),
    "a turn invented": lambda messages: messages.insert(1, {"role": "assistant", "content": "Sure."}),
    "a turn removed": lambda messages: messages.pop(1) and None,
}


def called() -> Played:
    """A conversation whose model has thought, spoken and called, and whose tool has answered."""
    played = begun("hermes")
    sampled = {"a": 60000.0, "b": 9007199254740993}
    played.play(turn(said=" Adding.\n", calls=(("add", sampled),)))
    return played


def resent(played: Played, rewrite: Rewriting) -> None:
    copied = json.loads(json.dumps(played.messages))
    played.messages = [{**message, "content": message["content"] or ""} for message in copied]
    rewrite(played.messages)


@pytest.mark.parametrize("name", MEANING_KEPT)
def test_equivalent_resent_reply_continues_from_the_sampled_tokens(name: str) -> None:
    played = called()
    for message in assistants(played.messages):
        message["reasoning_content"] = " hm\n"
    played.transcript.branches[0].history.snapshots[1] = snapshot(played.messages[1])
    resent(played, MEANING_KEPT[name])
    played.play(turn())
    check(played)
    assert [one.how for one in played.transcript.turns] == ["first", "extended"]


@pytest.mark.parametrize("name", MEANING_CHANGED)
def test_changed_conversation_is_rendered_again(name: str) -> None:
    played = called()
    resent(played, MEANING_CHANGED[name])
    played.play(turn())
    check(played)
    assert [one.how for one in played.transcript.turns] == ["first", "anew"]


def test_two_turns_joined_are_none_that_was_sampled() -> None:
    played = begun("hermes")
    for said in ("One, ", "two."):
        played.play(turn(said=said, event="go on"))
    first, last = assistants(played.messages)
    played.messages = [played.messages[0], {**last, "content": first["content"] + last["content"]}, played.messages[-1]]
    played.play(turn())
    check(played)
    assert played.transcript.turns[-1].how == "anew"


def test_a_sampled_answer_in_another_conversation_is_context() -> None:
    played = called()
    answer = played.messages[1]
    played.messages = [{"role": "user", "content": "What did you do?"}, answer, {"role": "user", "content": "Why?"}]
    played.play(turn())
    check(played)
    assert played.transcript.turns[-1].how == "anew"


def test_other_tools_make_another_context() -> None:
    played = called()
    for tools, how in ((None, "anew"), ([*adder(), *adder()], "anew"), (adder(), "extended")):
        prompt = next_prompt(played.renderer, played.transcript, played.messages, tools)
        assert ("extended" if prompt.onto is not None else "anew") == how


def test_a_history_that_is_rolled_back_branches_off_from_an_earlier_answer() -> None:
    played = called()
    back = list(played.messages)
    played.play(turn(said="", calls=CALL))
    played.play(turn())
    played.messages = [*back, {"role": "user", "content": "Try something else."}]
    first = len(played.transcript.branches[0].tokens)
    played.play(turn(said="", calls=CALL))
    played.play(turn())
    check(played)
    assert [each.how for each in played.transcript.turns] == ["first", "extended", "extended", "branched", "extended"]
    assert [[span.turn for span in line.spans] for line in played.transcript.sequences()] == [[0, 1, 2], [3, 4]]
    prompt, completion, _ = played.log[0]
    assert played.log[3][0].tolist()[: len(prompt) + len(completion)] == prompt.tolist() + completion
    assert len(played.log[3][0]) < first


def test_repeated_request_has_separate_sequences_and_continuations() -> None:
    played = begun("hermes")
    asked = list(played.messages)
    played.play(turn(said="First."))
    ended = list(played.messages)
    played.messages = asked
    played.play(turn(said="Second."))
    played.play(turn())
    played.messages = ended
    played.play(turn())
    check(played)
    assert [[span.turn for span in line.spans] for line in played.transcript.sequences()] == [[0, 3], [1, 2]]


def test_ambiguous_resent_reply_is_rendered_again() -> None:
    played = begun("hermes")
    asked = list(played.messages)
    for said in (" Sure.\n", "Sure.  "):
        played.messages = list(asked)
        played.play(turn(said=said))
    resent(played, MEANING_KEPT["blanks around the text"])
    played.play(turn())
    check(played)
    assert played.transcript.turns[-1].how == "anew"


def test_a_result_that_was_edited_later_is_another_context() -> None:
    played = called()
    played.play(turn(said="", calls=CALL))
    played.messages[2] = {**played.messages[2], "content": "60001"}
    played.play(turn())
    check(played)
    assert [each.how for each in played.transcript.turns] == ["first", "extended", "anew"]


def test_two_answers_of_the_same_tokens_may_stand_for_each_other() -> None:
    played = begun("hermes")
    asked = list(played.messages)
    for _ in range(2):
        played.messages = list(asked)
        played.play(turn(said="", calls=CALL))
    played.play(turn())
    check(played)
    assert [[span.turn for span in line.spans] for line in played.transcript.sequences()] == [[0], [1, 2]]


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)


def test_name_and_arguments_of_a_call_are_distinguished() -> None:
    def message(name: str, arguments: str) -> Message:
        call = {"function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    assert not snapshot(message("f", "1)(2")).has_same_meaning(message("f(1)", "2"))


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), st.data())
def test_arguments_are_known_however_they_are_written_and_by_nothing_else(sampled: dict[str, Any], data: Any) -> None:
    def message(arguments: str) -> Message:
        return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    written = snapshot(message(json.dumps(sampled)))
    ways = st.sampled_from([{"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}, {"sort_keys": True}])
    assert written.has_same_meaning(message(json.dumps(sampled, **data.draw(ways))))
    other = data.draw(st.dictionaries(st.text(max_size=4), VALUES, max_size=4))
    if json.dumps(other, sort_keys=True) != json.dumps(sampled, sort_keys=True) and written.has_same_meaning(
        message(json.dumps(other))
    ):
        assert other == sampled  # a number with a point and one without


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_each_token_is_trained_once_in_its_context_after_any_resending(data: Any) -> None:
    played = begun("hermes")
    every = {**MEANING_KEPT, **MEANING_CHANGED}
    for _ in range(data.draw(st.integers(2, 6))):
        played.play(
            turn(said=data.draw(st.sampled_from(["", " a\n", "Sure."])), calls=CALL * data.draw(st.integers(0, 2)))
        )
        if data.draw(st.booleans()):
            try:
                resent(played, every[data.draw(st.sampled_from(sorted(every)))])
            except IndexError:
                continue
        if data.draw(st.integers(0, 4)) == 0:
            places = [place for place, message in enumerate(played.messages) if message["role"] != "assistant"]
            played.messages = played.messages[: data.draw(st.sampled_from(places)) + 1]
    check(played)
