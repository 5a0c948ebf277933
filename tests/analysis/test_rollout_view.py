"""A rollout is shown as it was: its conversation, its tokens and its prompt, whatever their form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hermes_rl.analysis.record import RunRecord
from hermes_rl.analysis.rollout_view import Screen, shown_rollout
from hermes_rl.analysis.tokens import prompt_text, shown_tokens, tokenizer_of
from hermes_rl.errors import UserError
from hermes_rl.tokens import hub
from hermes_rl.tokens.tokenizer import small_tokenizer
from hermes_rl.tokens.transcript import MASKED, TokenSequence, packed
from tests.analysis.recorded import programmed, recorded, write_run


def shown(folder: Path, line: dict[str, Any], screen: Screen | None = None) -> dict[str, Any]:
    record = RunRecord(write_run(folder / "run", [line]))
    record.refresh()
    return shown_rollout(record, line["id"], screen or Screen())


def with_tokens(prompt: str, answer: str) -> dict[str, Any]:
    tokenizer = small_tokenizer()
    before, said = tokenizer.encode(prompt), tokenizer.encode(answer)
    masks = [MASKED] * len(before) + said
    logprobs = [1.0] * len(before) + [-0.5] * len(said)
    sequence = packed(TokenSequence.from_lists(before + said, masks, logprobs))
    return {**recorded("a"), "sequences": [sequence], "sampled": [[len(said), "00", len(before), 0, 3, 4]]}


def test_a_result_stands_with_its_call_though_an_id_comes_again(tmp_path: Path) -> None:
    line = recorded("a")
    again = {"id": "c1", "type": "function", "function": {"name": "again", "arguments": "{}"}}
    line["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [again]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "second"}]},
        {"role": "tool", "tool_call_id": "unknown", "content": "nobody asked"},
    ]
    found = shown(tmp_path, line)["messages"]
    calls = [call for message in found for call in message["calls"]]
    assert [(call["name"], call["result"]) for call in calls] == [
        ("terminal", '{"], \\"turns\\": 7": 1}'),
        ("again", "second"),
    ]
    assert calls[0]["seconds"] == 0.25
    assert (found[-1]["role"], found[-1]["text"]) == ("tool", "nobody asked")
    assert [message["turn"] for message in found] == [None, 1, 2, 3, None]


def test_a_text_that_is_too_long_is_cut_with_a_note(tmp_path: Path) -> None:
    found = shown(tmp_path, recorded("a", text="x" * 500), Screen(longest=100))
    assert found["messages"][-1]["text"] == "x" * 100 + "\n[… 400 more characters are in rollouts.jsonl]"
    assert found["cut"] == 0
    assert shown(tmp_path, recorded("a"), Screen(room=600))["cut"] > 0


@pytest.mark.parametrize("text", ["größer ☕", "日本語 😀😀", "plain"])
def test_shown_tokens_join_to_the_text_and_carry_logprobs_and_versions(text: str) -> None:
    line = with_tokens("Say it: ", text)
    found = shown_tokens(line, 0, 0, 1000, small_tokenizer())
    sampled = [token for token in found["tokens"] if token[1] >= 0]
    assert "".join(token[0] for token in sampled) == text
    assert {(turn, logprob) for _, turn, logprob in sampled} == {(0, -0.5)}
    assert {(turn, logprob) for _, turn, logprob in found["tokens"][: -len(sampled)]} == {(-1, None)}
    assert found["versions"] == [[3, 4]]
    assert prompt_text(line, small_tokenizer()) == "Say it: "


def test_without_a_tokenizer_there_are_ids(tmp_path: Path) -> None:
    line = with_tokens("Say it: ", "yes")
    found = shown_tokens(line, 0, 1, 1, None)
    assert (found["decoded"], found["start"], found["end"]) == (False, 1, 2)
    assert found["tokens"][0][0].isdigit()
    assert prompt_text(line, None) is None
    with pytest.raises(UserError, match="no sequence 1"):
        shown_tokens(line, 1, 0, 1, None)


def test_a_tokenizer_is_never_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hub_reachable", lambda: pytest.fail("the network was asked"))
    found, why = tokenizer_of({"tokenizer": {"name": "nobody/has-this-one"}})
    assert found is None
    assert "cannot be loaded" in why
    assert tokenizer_of({"tokenizer": {"name": "hermes-rl/small"}})[0] is not None
    assert tokenizer_of({})[0] is None


def test_show_reports_an_invalid_record(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: it has 'messages'"):
        shown(tmp_path, {**recorded("a"), "messages": ["no message"]})


CALLS = [
    ("side_calls", None, 9, False),
    ("main", None, 5, True),
    ("subagents", None, 3, True),
    ("main", 1, 7, True),
    ("subagents", 2, 2, True),
    ("main", 1, 4, True),
    ("rejected", 3, 1, False),
    ("main", 3, 6, True),
    ("main", None, 2, True),
]


def test_the_calls_of_a_program_are_a_tree(tmp_path: Path) -> None:
    played = shown(tmp_path, programmed("a", CALLS))["program"]
    names = ("depth", "kind", "turns", "from", "tokens", "trained")
    assert [tuple(line[name] for name in names) for line in played["lines"]] == [
        (0, "main", "2, 4, 8", None, 18, 18),
        (1, "main", "6", 2, 4, 4),
        (1, "rejected", "7", 4, 1, 0),
        (0, "main", "9", None, 2, 2),
        (1, "side_calls", "1", None, 9, 0),
        (1, "subagents", "3, 5", None, 5, 5),
    ]
    assert [call["preview"] for call in played["lines"][-1]["calls"]] == ["answer 3", "answer 5"]
    assert (played["output"], played["sampling"]) == ("working <b>\\u001b[31m\n", "temperature 0.2")
    assert shown(tmp_path, recorded("b"))["program"] is None


def test_a_long_program_and_one_that_continues_itself_are_shown(tmp_path: Path) -> None:
    long = [("main", number - 1 if number else None, 1, True) for number in range(5_000)]
    (line,) = shown(tmp_path, programmed("a", long))["program"]["lines"]
    assert (line["turns"], line["tokens"]) == ("1–5000", 5_000)
    damaged = shown(tmp_path, programmed("b", [("main", 0, 1, True), ("main", 7, 1, True)]))["program"]
    assert [line["turns"] for line in damaged["lines"]] == ["1", "2"]
