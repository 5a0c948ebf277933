"""The shipped rewards over what was said: the right thing, the near miss, and the edges that the docs name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.agent.result import AgentResult, ToolCall
from hermes_rl.errors import UserError
from hermes_rl.scoring.reward_function import find_reward
from hermes_rl.servers.usage import Usage
from hermes_rl.shipped import shipped_rewards
from hermes_rl.spec.sections.rewards import INJECTED
from tests.rewards.played import graded, said


async def value(name: str, result: AgentResult, **args: Any) -> float | None:
    return (await graded(name, result=result, **args)).value


def spoke(*texts: str, tokens: int = 0) -> AgentResult:
    """A rollout of some turns after an example in the prompt."""
    example = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "example"}]
    messages = [*example, *({"role": "assistant", "content": text} for text in texts)]
    usage = Usage(completion_tokens=tokens)
    return AgentResult(messages=messages, prompt_length=2, turns_used=len(texts), usage=usage)


def called(*calls: tuple[str, dict[str, Any]], failed: tuple[str, ...] = ()) -> AgentResult:
    records = [ToolCall(1, str(i), name, args, "ok") for i, (name, args) in enumerate(calls)]
    records += [ToolCall(1, name, name, {}, "no", error="no") for name in failed]
    return AgentResult(tool_calls=records, turns_used=1)


CASES: list[tuple[str, AgentResult, dict[str, Any], float]] = [
    ("contains_all", spoke("It is 12 Euro.", "Done"), {"values": ["12 euro", "done"]}, 1),
    ("contains_all", spoke("It is 12 Euro.", "Done"), {"values": ["12 euro"], "where": "final"}, 0),
    ("contains_all", spoke("It is 12 Euro."), {"values": ["12 euro"], "ignore_case": False}, 0),
    ("contains_all", spoke("nothing"), {"values": ["example"]}, 0),
    ("contains_all", spoke("x"), {"values": []}, 1),
    ("contains_all", spoke("12"), {"values": [12]}, 1),
    ("keyword_overlap", said("Philip Dick wrote it"), {"reference": "Philip K. Dick"}, 2 / 3),
    ("keyword_overlap", said("PHILIP k dick"), {"reference": "the Philip K. Dick"}, 1),
    ("keyword_overlap", said("something else"), {"reference": "Philip K. Dick"}, 0),
    ("keyword_overlap", said("to be or not"), {"reference": "to be"}, 1),
    ("length_penalty", spoke("x", tokens=800), {"soft_limit": 800, "hard_limit": 2000}, 0),
    ("length_penalty", spoke("x", tokens=1400), {"soft_limit": 800, "hard_limit": 2000}, -0.5),
    ("length_penalty", spoke("x", tokens=9000), {"soft_limit": 800, "hard_limit": 2000}, -1),
    ("length_penalty", spoke("x" * 6, "x" * 9), {"soft_limit": 10, "hard_limit": 20, "unit": "characters"}, -0.5),
    ("regex_count", said("http://a http://b"), {"pattern": r"https?://\S+", "at_least": 2}, 1),
    ("regex_count", said("http://a http://a"), {"pattern": r"https?://\S+", "at_least": 2, "distinct": True}, 0.5),
    ("regex_count", said("none"), {"pattern": r"https?://\S+"}, 0),
    ("regex_count", said("Aa"), {"pattern": "a", "at_least": 2, "ignore_case": True}, 1),
    ("fuzzy_match", said(" New   YORK "), {"target": "new york"}, 1),
    ("fuzzy_match", said("abcd"), {"target": "abxy"}, 0.5),
    ("fuzzy_match", said("abcd"), {"target": "abce", "threshold": 0.7}, 1),
    ("fuzzy_match", said("abcd"), {"target": "wxyz", "threshold": 0.7}, 0),
    ("fuzzy_match", said(None), {"target": "wxyz"}, 0),
    ("multiple_choice", said("B"), {"target": "b"}, 1),
    ("multiple_choice", said("**(b).**"), {"target": "B"}, 1),
    ("multiple_choice", said(r"So \boxed{C}. The answer is A."), {"target": "C"}, 1),
    ("multiple_choice", said("The answer is A. No, the answer is: (B)"), {"target": "B"}, 1),
    ("multiple_choice", said("(A) is wrong, so (D)"), {"target": "D"}, 1),
    ("multiple_choice", said("Surely Berlin."), {"target": "B", "choices": ["Rome", "Berlin"]}, 1),
    ("multiple_choice", said("Rome or Berlin"), {"target": "B", "choices": ["Rome", "Berlin"]}, 0),
    ("multiple_choice", said("It is New York."), {"target": "B", "choices": ["York", "New York"]}, 1),
    ("multiple_choice", said("答案是苹果。"), {"target": "A", "choices": ["苹果", "香蕉"]}, 1),
    ("multiple_choice", said("我选苹果汁"), {"target": "B", "choices": ["苹果", "苹果汁"]}, 1),
    ("multiple_choice", said("ฉันเลือกแมวครับ"), {"target": "A", "choices": ["แมว", "หมา"]}, 1),
    ("multiple_choice", said("котёл"), {"target": "A", "choices": ["кот", "пёс"]}, 0),
    ("multiple_choice", said("anything"), {"target": "A", "choices": ["", ""]}, 0),
    ("keyword_overlap", said("我喜欢吃苹果"), {"reference": "苹果"}, 1),
    ("keyword_overlap", said("हानदा"), {"reference": "हिन्दी"}, 0),
    ("keyword_overlap", said("यह हिन्दी है"), {"reference": "हिन्दी भाषा"}, 0.5),
    ("multiple_choice", said("The answer is a long one"), {"target": "B"}, 0),
    ("multiple_choice", said("I think A or B"), {"target": "B"}, 0),
    ("multiple_choice", said(None), {"target": "B"}, 0),
    ("numeric_close", said("about 1,234.5 km"), {"target": 1234.5}, 1),
    ("numeric_close", said("it is 70{,}000"), {"target": 70000}, 1),
    ("numeric_close", said("from 3 to -7e-2"), {"target": -0.07}, 1),
    ("numeric_close", said("50%"), {"target": 50}, 1),
    ("numeric_close", said("−5"), {"target": -5}, 1),
    ("numeric_close", said("答案是42个"), {"target": 42}, 1),
    ("numeric_close", said("ราคา3.5บาท"), {"target": 3.5}, 1),
    ("numeric_close", said("$.5"), {"target": 0.5}, 1),
    ("numeric_close", said("101"), {"target": 100, "relative": 0.01}, 1),
    ("numeric_close", said("102"), {"target": 100, "relative": 0.01}, 0),
    ("numeric_close", said("0.4"), {"target": 0, "absolute": 0.5}, 1),
    ("numeric_close", said("x2 and v1.2.3"), {"target": 2}, 0),
    ("numeric_close", said("none"), {"target": 2}, 0),
    ("numeric_close", said("e7"), {"target": 2}, 0),
    ("numeric_close", said("2 apples, or +E7, −e1, ,e3"), {"target": 2}, 1),
    ("numeric_close", said("9e99999999"), {"target": 2}, 0),
    ("numeric_close", said("1" * 100_000), {"target": 2}, 0),
    ("numeric_close", said("1" + ",111" * 30_000 + "x"), {"target": 2}, 0),
    ("json_matches", said('{"b": 1, "a": [1, 2]}'), {"equals": {"a": [1, 2], "b": 1.0}}, 1),
    ("json_matches", said('Here:\n```json\n{"n": 3}\n```\nDone'), {"schema": {"required": ["n"]}}, 1),
    ("json_matches", said('{"n": "3"}'), {"schema": {"properties": {"n": {"type": "integer"}}}}, 0),
    ("json_matches", said('{"n": true}'), {"equals": {"n": 1}}, 0),
    ("json_matches", said('[1, true, [1], {"a": 1}, {"a": true}, "1"]'), {"schema": {"uniqueItems": True}}, 1),
    ("json_matches", said('[{"a": 1, "b": 2}, {"b": 2.0, "a": 1}]'), {"schema": {"uniqueItems": True}}, 0),
    (
        "json_matches",
        said(str([{"a": i} for i in range(9000)]).replace("'", '"')),
        {"schema": {"uniqueItems": True}},
        1,
    ),
    ("json_matches", said("[1, 1]"), {"schema": {"uniqueItems": False}}, 1),
    ("json_matches", said('{"n": [2, 1]}'), {"equals": {"n": [1, 2]}}, 0),
    ("json_matches", said("{n: 3}"), {}, 0),
    ("json_matches", said("[" * 100_000), {}, 0),
    ("json_matches", said("NaN"), {"schema": {"minimum": 0}}, 0),
    ("json_matches", said('{"n": [-Infinity]}'), {}, 0),
    ("json_matches", said("1e999"), {"schema": {"multipleOf": 0.5}}, 0),
    ("json_matches", said("1" * 400), {"schema": {"multipleOf": 0.5}}, 0),
    ("json_matches", said("1.5"), {"schema": {"multipleOf": 0.5}}, 1),
    ("json_matches", said("[" * 450 + "]" * 450), {"schema": {"items": {"$ref": "#"}}}, 0),
    ("tool_calls_match", called(("add", {"a": 1, "b": 2})), {"calls": [{"name": "add", "args": {"a": 1.0}}]}, 1),
    ("tool_calls_match", called(("add", {"a": 1})), {"calls": [{"name": "add", "args": {"a": 2}}]}, 0),
    ("tool_calls_match", called(("add", {"a": True})), {"calls": [{"name": "add", "args": {"a": 1}}]}, 0),
    ("tool_calls_match", called(("say", {"t": " hi\n"})), {"calls": [{"name": "say", "args": {"t": "hi"}}]}, 1),
    ("tool_calls_match", called(("b", {}), ("a", {})), {"calls": [{"name": "a"}, {"name": "b"}]}, 1),
    ("tool_calls_match", called(("b", {}), ("a", {})), {"calls": [{"name": "a"}, {"name": "b"}], "in_order": True}, 0),
    ("tool_calls_match", called(("a", {}), ("a", {})), {"calls": [{"name": "a"}]}, 0),
    ("tool_calls_match", called(("a", {}), ("c", {})), {"calls": [{"name": "a"}], "allow_extra": True}, 1),
    ("tool_calls_match", called(failed=("a",)), {"calls": [{"name": "a"}]}, 0),
    ("tool_calls_match", called(("add", {"a": 1})), {"calls": [{"name": "add", "arguments": {"a": 1}}]}, 1),
    ("tool_calls_match", called(("add", {"a": 1})), {"calls": [{"name": "add", "arguments": {"a": 2}}]}, 0),
    ("tool_calls_match", called(("add", {"a": 1})), {"calls": [{"name": "add", "args": '{"a": 1}'}]}, 1),
    ("tool_calls_match", called(("add", {"a": 1})), {"calls": [{"name": "add", "arguments": '{"a": 2}'}]}, 0),
    ("tool_calls_match", called(("add", {})), {"calls": [{"name": "add", "args": None, "arguments": ""}]}, 1),
    ("tool_calls_match", called(), {"calls": []}, 1),
    ("tool_calls_match", called(("a", {})), {"calls": []}, 0),
    ("token_efficiency", spoke("x", tokens=100), {"best": 100, "worst": 300}, 1),
    ("token_efficiency", spoke("x", tokens=200), {"best": 100, "worst": 300}, 0.5),
    ("token_efficiency", spoke("x", tokens=999), {"best": 100, "worst": 300}, 0),
    ("repetition_penalty", spoke("a b c d e f"), {"words": 2}, 0),
    ("repetition_penalty", spoke("a b A b", "a b"), {"words": 2}, -0.6),
    ("repetition_penalty", spoke("a"), {"words": 2}, 0),
    ("format_tags", said("<think>x</think>\n<answer> 4 </answer>"), {"tags": ["think", "answer"]}, 1),
    ("format_tags", said("<think>x</think> so <answer>4</answer>"), {"tags": ["think", "answer"]}, 0),
    ("format_tags", said("<answer>4</answer><think>x</think>"), {"tags": ["think", "answer"]}, 0),
    ("format_tags", said("<answer>4</answer><answer>5</answer>"), {"tags": ["answer"]}, 0),
    ("format_tags", said("<answer> </answer>"), {"tags": ["answer"]}, 0),
    ("format_tags", said("<answer>\u200b</answer>"), {"tags": ["answer"]}, 0),
    ("format_tags", said("<answer>\u3164 \u2060</answer>"), {"tags": ["answer"]}, 0),
    ("format_tags", said("<answer>\u200b∅</answer>"), {"tags": ["answer"]}, 1),
    ("format_tags", said(None), {"tags": ["answer"]}, 0),
]


@pytest.mark.parametrize(
    ("name", "result", "args", "expected"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
async def test_value(name: str, result: AgentResult, args: dict[str, Any], expected: float) -> None:
    assert await value(name, result, **args) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("length_penalty", {"soft_limit": 5, "hard_limit": 5}),
        ("regex_count", {"pattern": "a", "at_least": 0}),
        ("regex_match", {"pattern": "("}),
        ("multiple_choice", {"target": "AB"}),
        ("multiple_choice", {"target": "C", "choices": ["one", "two"]}),
        ("json_matches", {"schema": {"type": "nothing"}}),
        ("token_efficiency", {"best": 5, "worst": 5}),
        ("turn_efficiency", {"best": 5, "worst": 5}),
        ("repetition_penalty", {"words": 0}),
        ("numeric_close", {"target": "nan"}),
        ("tool_calls_match", {"calls": [{"name": "add", "parameters": {"a": 1}}]}),
        ("tool_calls_match", {"calls": [{"name": "add", "args": {"a": 1}, "arguments": {"a": 2}}]}),
        ("tool_calls_match", {"calls": [{"name": "add", "args": '{"a": '}]}),
        ("tool_calls_match", {"calls": [{"name": "add", "args": "[1]"}]}),
        ("tool_calls_match", {"calls": [{"add": {"a": [1]}}]}),
        ("tests_pass", {"command": "true", "files": [{"path": "a", "content": "b"}]}),
        ("tests_pass", {"command": "true", "files": [{"to": "a"}]}),
        ("tests_pass", {"command": "true", "reference": [{"tools": [{"name": "a", "arguments": {}}]}]}),
        ("reward_file", {"command": "true", "files": [{"to": "a", "content": "b", "from": "c"}]}),
        ("state_matches", {"gold": [{"tools": [{"args": {}}]}]}),
    ],
)
async def test_arguments_of_another_shape_are_the_users_mistake(name: str, args: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        await value(name, said("x"), **args)


async def test_an_argument_that_says_nothing_fails_the_reward() -> None:
    with pytest.raises(UserError, match="the reference does not contain a word"):
        await value("keyword_overlap", said("x"), reference="!")


@pytest.mark.parametrize(
    ("name", "args"),
    [("length_penalty", {"soft_limit": 1, "hard_limit": 2}), ("token_efficiency", {"best": 1, "worst": 2})],
)
async def test_missing_token_counts_give_no_value(name: str, args: dict[str, Any]) -> None:
    assert await value(name, spoke("x"), **args) is None


async def test_a_policy_that_says_nothing_has_used_no_tokens() -> None:
    silent = said("")
    silent.usage.prompt_tokens = 10
    assert await value("length_penalty", silent, soft_limit=1, hard_limit=2) == 0
    assert await value("token_efficiency", silent, best=1, worst=2) == 1


@pytest.mark.parametrize(
    ("answer", "at_least", "expected"),
    [
        ("See http://a.example/x, and (https://b.example/).", 2, 1),
        ("See http://a.example/x and http://made.up/.", 1, 0.5),
        ("See http://a.example/x.", 2, 0),
        ("nothing", 0, 0),
        ("请看 http://a.example/x，然后是「https://b.example」。", 2, 1),
        ("**http://a.example/x** and _https://b.example_ | …", 2, 1),
    ],
)
async def test_citations(answer: str, at_least: int, expected: float) -> None:
    result = said(answer)
    told = '{"web": [{"url": "http://a.example/x"}, {"url": "https://b.example"}]}'
    result.tool_calls.append(ToolCall(1, "1", "web_search", {}, told))
    assert await value("citations", result, at_least=at_least) == expected


MADE_UP = "https://made.up/x"


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([("search", {"query": "x"}, f"found {MADE_UP}", None)], 1),
        ([("search", {"query": "x"}, f"found {MADE_UP}", None), ("open", {"url": MADE_UP}, "text", None)], 1),
        ([("open", {"url": MADE_UP}, f"{MADE_UP}: text", None)], 0),
        ([("open", {"urls": [{"at": f"{MADE_UP}/"}]}, f"{MADE_UP}: text", None)], 0),
        ([("open", f"{{broken {MADE_UP}", f"{MADE_UP}: text", None)], 0),
        ([("open", {MADE_UP: 1}, f'{{"error": "unknown parameter {MADE_UP}"}}', "unknown")], 0),
        ([(MADE_UP, {}, f"there is no tool named {MADE_UP}", "unknown")], 0),
        ([("write", {"content": MADE_UP}, "ok", None), ("read", {"path": "x"}, MADE_UP, None)], 0),
        ([("open", {"url": "https://in.prompt/"}, "https://in.prompt", None)], 1),
        ([("search", {"query": "made.up/x"}, f"no results for {MADE_UP}", None)], 0),
        ([("search", {"query": r"https:\/\/MADE%2Eup\/x"}, f"no results for {MADE_UP}", None)], 0),
        ([("terminal", {"command": "printf 'htt%s://ma%s.up/x' ps de"}, MADE_UP, None)], 0),
        ([("search", {"query": "made up words"}, f"found {MADE_UP}", None)], 1),
    ],
)
async def test_url_that_the_policy_gave_to_a_tool_is_not_a_source(
    calls: list[tuple[str, Any, str, str | None]], expected: float
) -> None:
    cited = "https://in.prompt" if "in.prompt" in str(calls) else MADE_UP
    result = said(f"See {cited}.")
    result.messages[0]["content"] = "Look at https://in.prompt/"
    result.prompt_length = 1
    result.tool_calls += [
        ToolCall(i, f"{i}", name, given, answer, error) for i, (name, given, answer, error) in enumerate(calls)
    ]
    assert await value("citations", result) == expected


async def test_command_output(ctx: Any) -> None:
    assert await looked(ctx, command="echo hi", expected="hi") == 1
    assert await looked(ctx, command="echo hi", expected="hi", exact=True) == 0
    assert await looked(ctx, command="printf hi", expected="hi", exact=True) == 1
    assert await looked(ctx, command="echo hi; exit 3", expected="hi") == 0
    assert await looked(ctx, command="sleep 20", expected="", timeout=0.3) == 0


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("reward.txt", "\ufeff0.5\n", 0.5),
        ("reward.json", '\ufeff{"reward": 0.5}', 0.5),
        ("reward.json", '{"reward": true, "fast": 0}', 1.0),
        ("reward.json", '{"right": true, "fast": false}', 0.5),
    ],
)
async def test_reward_file_reads_what_programs_write(ctx: Any, name: str, content: str, expected: float) -> None:
    files = [{"to": "given", "content": content}]
    value = await graded("reward_file", ctx=ctx, command=f"cp given out/{name}", files=files, folder="/home/user/out")
    assert value.value == expected


async def looked(ctx: Any, **args: Any) -> float | None:
    return (await graded("command_output", ctx=ctx, **args)).value


def test_the_docs_have_every_shipped_reward_with_its_arguments() -> None:
    table = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    rows = {row[0]: row[1] for row in re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE)}
    for name in shipped_rewards():
        reward = find_reward(name, None)
        arguments = {key for key in reward.parameters if key not in INJECTED}
        assert name in rows, f"the table of docs/rewards.md, `Choose a shipped reward`, lacks {name}"
        assert set(re.findall(r"`(\w+)", rows[name])) == arguments, name
