"""A rollout whose turns come from outside: endings, tools, simulated user, budgets and rewards stay ours."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import StopReason, open_env
from hermes_rl.api.session import ExternalPolicy, Session
from hermes_rl.errors import UserError
from hermes_rl.rollouts.rollout import Group, Rollout, RolloutKey, attach_provenance
from hermes_rl.servers.base import ChatReply, ChatRequest
from hermes_rl.spec.load import parse_spec
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from hermes_rl.tools.base import ToolRuntime, find_runtime
from tests.agent.scripted_chat import ScriptedChat, refused, says
from tests.api.summing import COMPARED, END, TEXT, TOKENIZER, Sampler, sampled, spec_in, trained, write

SMALL = small_tokenizer_path()
UNUSABLE: Any = (
    ([2**40], None), ([10**400], None), (["1"], None), ([1.0], None), ([True], None), ([-1], None),
    ([1], [float("nan")]), ([1], ["-1"]), ([1], [-(10**400)]),
)  # fmt: skip
"""Ids and log-probabilities that no model has given."""
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}


async def test_messages_are_stepped_with_and_tools_answer(tmp_path: Path) -> None:
    async with open_env(spec_in(tmp_path)) as env:
        row = env.rows()[0]
        async with await env.session(row) as session:
            turn = await session.start()
            assert turn is not None
            assert turn.messages == env.prompt(row)
            assert [tool["function"]["name"] for tool in turn.tools] == ["add"]
            assert (turn.prompt_ids, turn.max_tokens, session.done, session.rollout) == (None, 200, False, None)
            turn = await session.step({"tool_calls": [CALL]})
            assert turn is not None
            assert turn.messages[-1] == {"role": "tool", "tool_call_id": "c1", "content": "3"}
            assert await session.step("The sum is 3.") is None
            assert session.done
            rollout = session.rollout
            assert rollout is not None
            assert (rollout.score, rollout.stop_reason, rollout.turns, rollout.sequences) == (
                1.0,
                StopReason.FINISHED,
                2,
                None,
            )
            with pytest.raises(UserError, match="no turn waits"):
                await session.step("more")


async def test_ids_become_the_turn_exactly(tmp_path: Path) -> None:
    sampler = Sampler()
    async with open_env(spec_in(tmp_path)) as env:
        session = await env.session(env.rows()[0], tokenizer=SMALL)
        turn = await session.start()
        while turn is not None:
            assert turn.prompt_ids is not None
            assert turn.stop_ids == (TOKENIZER.encode(END)[0],)
            answer = await sampler(turn.prompt_ids, None)  # type: ignore[arg-type]
            turn = await session.step(answer.ids, logprobs=answer.logprobs, version=5)
        rollout = session.rollout
    assert rollout is not None
    assert rollout.score == 1.0
    assert trained([rollout]) == sampled(sampler.answers)
    assert attach_provenance(Group("g", rollout.key.row, [rollout])).exact
    assert rollout.examples(one=True)[0].weights == (5, 5)
    assert [ids for ids, _ in sampler.asked][1][: len(sampler.asked[0][0])] == sampler.asked[0][0]


async def test_ids_without_log_probabilities_have_none(tmp_path: Path) -> None:
    async with open_env(spec_in(tmp_path)) as env:
        session = await env.session(env.rows()[0], tokenizer=SMALL)
        turn = await session.start()
        while turn is not None:
            assert turn.prompt_ids is not None
            turn = await session.step(TOKENIZER.encode(write(TOKENIZER.decode(turn.prompt_ids)) + END))
    assert session.rollout is not None
    [example] = session.rollout.examples(one=True)
    assert example.logprobs is None
    assert sum(example.mask) > 0


async def test_ids_that_end_at_the_limit_were_cut(tmp_path: Path) -> None:
    async with open_env(spec_in(tmp_path)) as env:
        session = await env.session(env.rows()[0], tokenizer=SMALL, sampling={"max_tokens": 3})
        turn = await session.start()
        assert turn is not None
        assert turn.max_tokens == 3
        assert await session.step(TOKENIZER.encode("The sum is 3.")[:3]) is None
    assert session.rollout is not None
    assert session.rollout.stop_reason is StopReason.LENGTH


async def test_session_refuses_invalid_token_ids_and_keeps_the_turn_open(tmp_path: Path) -> None:
    sampler = Sampler()
    async with open_env(spec_in(tmp_path)) as env:
        session = await env.session(env.rows()[0], tokenizer=SMALL)
        turn = await session.start()
        while turn is not None:
            assert turn.prompt_ids is not None
            for ids, problem in (
                ([10_000_000, 5], "the token 10000000, and the vocabulary ends with"),
                ([5] * 2600, "2600 tokens; at most 200 were requested"),
            ):
                with pytest.raises(UserError, match=problem):
                    await session.step(ids, logprobs=[-0.5] * len(ids))
            answer = await sampler(turn.prompt_ids, None)  # type: ignore[arg-type]
            turn = await session.step(answer.ids, logprobs=[1e-7 for _ in answer.ids])
    assert session.rollout is not None
    assert session.rollout.score == 1.0
    assert trained([session.rollout]) == [(token, 0.0) for token, _ in sampled(sampler.answers)]


async def test_a_message_is_taken_where_ids_could_be_and_is_not_called_exact(tmp_path: Path) -> None:
    text = TEXT + "servers: {policy: {type: scripted}}\nsolution: {turns: [{say: hi}]}\n"
    async with open_env(spec_in(tmp_path, text)) as env:
        session = await env.session(env.rows()[0])
        turn = await session.start()
        assert turn is not None
        assert turn.prompt_ids is not None, "the scripted policy's tokenizer is at hand"
        turn = await session.step(TOKENIZER.encode(write(TOKENIZER.decode(turn.prompt_ids)) + END))
        assert await session.step("The sum is 3.") is None
    rollout = session.rollout
    assert rollout is not None
    assert (rollout.score, rollout.turns) == (1.0, 2)
    assert not attach_provenance(Group("g", rollout.key.row, [rollout])).exact


async def test_budgets_and_comparing_rewards_hold(tmp_path: Path) -> None:
    async with open_env(spec_in(tmp_path, COMPARED)) as env:
        session = await env.session(env.rows()[0], sampling={"max_turns": 2})
        await session.start()
        assert await session.step({"tool_calls": [CALL]}) is not None
        assert await session.step({"tool_calls": [CALL]}) is None
    assert session.rollout is not None
    assert session.rollout.stop_reason is StopReason.MAX_TURNS
    assert session.rollout.rewards["longest"].value == 1.0
    assert session.rollout.score is not None


async def test_the_simulated_user_answers_turns_without_calls(tmp_path: Path) -> None:
    chat = ScriptedChat([says("Please add 1 and 2."), says("Thanks, goodbye.")])
    end = await chat.start()
    text = TEXT + (
        "user: {server: user, speaks_first: true, stop: [goodbye], system: You want a sum.}\n"
        f'servers: {{user: {{type: openai, base_url: "{chat.url}", model: u}}}}\n'
    )
    try:
        async with open_env(spec_in(tmp_path, text)) as env:
            session = await env.session(env.rows()[0])
            turn = await session.start()
            assert turn is not None
            assert turn.messages[-1] == {"role": "user", "content": "Please add 1 and 2."}
            assert await session.step("The sum is 3.") is None
    finally:
        await end()
    assert session.rollout is not None
    assert session.rollout.stop_reason is StopReason.USER_STOP
    assert session.rollout.score == 1.0


@pytest.mark.parametrize("by", ["close", "environment"])
async def test_a_session_that_is_closed_releases_its_sandbox(
    tmp_path: Path, runtimes: list[ToolRuntime], by: str
) -> None:
    text = """
dataset: {items: [{word: hello}]}
prompt: {user: "Say {{ word }}."}
toolsets: [terminal]
rewards: {right: {fn: exact_match, args: {target: "{{ word }}"}}}
"""
    call = {"id": "c", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "echo here"}'}}
    env = await open_env(spec_in(tmp_path, text)).open()
    session = await env.session(env.rows()[0])
    await session.start()
    turn = await session.step({"tool_calls": [call]})
    assert turn is not None
    assert "here" in turn.messages[-1]["content"]
    (runtime,) = runtimes
    sandbox = await runtime.sandbox()
    assert sandbox.alive
    if by == "close":
        await session.close()
        await session.close()
    else:
        await env.close()
    assert not sandbox.alive
    assert find_runtime(runtime.task_id) is None
    assert session.rollout is None
    with pytest.raises(UserError, match=r"no turn waits|is started once"):
        await session.step("hello")
    await env.close()


async def test_mistakes_of_the_one_who_steps_are_said(tmp_path: Path) -> None:
    async with open_env(spec_in(tmp_path)) as env:
        row = env.rows()[0]
        session = await env.session(row)
        with pytest.raises(UserError, match="has not been started"):
            await session.step("hello")
        await session.start()
        with pytest.raises(UserError, match="started once"):
            await session.start()
        wrong: list[Any] = [{"role": "user", "content": "x"}, {}, {"text": "x"}]
        for message in wrong:
            with pytest.raises(UserError, match="an answer is a text, or an assistant message"):
                await session.step(message)
        with pytest.raises(UserError, match="a value that JSON cannot represent: Object of type set"):
            await session.step({"content": "x", "other": {1}})
        with pytest.raises(UserError, match="has no tokenizer"):
            await session.step([1, 2])
        with pytest.raises(UserError, match="belong to token ids"):
            await session.step("hello", logprobs=[0.0])
        assert await session.step("The sum is 3.") is None, "the turn still waited"
        tokens = await env.session(row, tokenizer=SMALL)
        await tokens.start()
        for ids, logprobs in (([], None), ([1, 2], [-0.5]), (["a"], None), ([1], [0.5]), (7, None), *UNUSABLE):
            with pytest.raises(UserError, match="step takes a message, a text, or token ids"):
                await tokens.step(ids, logprobs=logprobs)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="no setting 'turns'"):
            await env.session(row, sampling={"turns": 3})


async def test_many_sessions_of_one_row_at_once(tmp_path: Path) -> None:
    async def stepped(env: Any) -> Any:
        session = await env.session(env.rows()[0])
        await session.start()
        await session.step({"tool_calls": [CALL]})
        await session.step("The sum is 3.")
        return session.rollout

    async with open_env(spec_in(tmp_path)) as env:
        rollouts = await asyncio.gather(*(stepped(env) for _ in range(8)))
    assert [rollout.score for rollout in rollouts] == [1.0] * 8
    assert len({rollout.id for rollout in rollouts}) == 8


# ------------------------------------------------------------------------------------------------ several agents

SEATS = """
name: seats
dataset: {items: [{a: 1, b: 2}]}
prompt: {system: You play., user: Say a number.}
agents: {white: {}, black: {prompt: {system: You answer.}, message_template: "{{ seat }}: {{ text }}"}}
schedule: {order: alternate, rounds: 2}
rewards: {texts: {fn: "code.py:texts", range: [0, 9]}}
servers: {policy: {type: scripted}}
"""
AT_A_TIME = SEATS.replace("alternate", "simultaneous").replace("You answer.}", "You answer., user: Say one.}")
TEXTS = "def texts(result):\n    return float(result.final_response)\n"


def seats_in(folder: Path, text: str = SEATS) -> Any:
    (folder / "code.py").write_text(TEXTS)
    return parse_spec(text, folder=folder)


async def test_each_turn_says_whose_it_is_and_has_that_seats_conversation(tmp_path: Path) -> None:
    given: dict[str, list[tuple[int, float]]] = {"white": [], "black": []}
    heard = []
    async with open_env(seats_in(tmp_path)) as env:
        session = await env.session(env.rows()[0], tokenizer=SMALL)
        turn = await session.start()
        while turn is not None:
            heard.append((turn.seat, turn.messages[-1]["content"]))
            ids = TOKENIZER.encode(f"{len(heard)}{END}")
            given[turn.seat] += [(token, -0.5) for token in ids]
            turn = await session.step(ids, logprobs=[-0.5] * len(ids))
        rollout = session.rollout
    assert heard == [("white", "Say a number."), ("black", "white: 1"), ("white", "2"), ("black", "white: 3")]
    assert rollout is not None
    assert [(seat.seat.name, seat.score) for seat in rollout.seats] == [("white", 3.0), ("black", 4.0)]
    for seat in rollout.seats:
        assert trained([seat]) == sorted(given[seat.seat.name])
    assert attach_provenance(Group("g", rollout.key.row, list(rollout.seats))).exact


async def test_seats_that_speak_at_a_time_are_asked_one_after_the_other(tmp_path: Path) -> None:
    text = AT_A_TIME
    said: dict[str, list[str]] = {"white": [], "black": []}
    async with open_env(seats_in(tmp_path, text)) as env:
        session = await env.session(env.rows()[0], tokenizer=SMALL)
        turn = await session.start()
        for number in range(4):
            assert turn is not None
            said[turn.seat].append(str(number))
            turn = await session.step(str(number))
    assert turn is None and session.rollout is not None
    assert all(len(texts) == 2 for texts in said.values())
    assert {seat.seat.name: seat.result.texts for seat in session.rollout.seats if seat.result is not None} == said


async def test_seats_with_their_servers_are_answered_by_these_servers(tmp_path: Path) -> None:
    text = SEATS.replace("black: {", "black: {server: other, ").replace("{policy:", "{other: {type: scripted}, policy:")
    text += "solution: {turns: [{seat: black, say: '7'}, {seat: black, say: '8'}]}\n"
    async with open_env(seats_in(tmp_path, text)) as env:
        session = await env.session(env.rows()[0], tokenizer=SMALL)
        assert [(turn.seat, turn.messages[-1]["content"]) for turn in (await session.start(), await session.step("1"))
                if turn is not None] == [("white", "Say a number."), ("white", "7")]  # fmt: skip
        assert await session.step("2") is None
    assert session.rollout is not None and [seat.score for seat in session.rollout.seats] == [2.0, 8.0]


async def test_failing_seat_server_ends_the_session_while_another_seat_waits(tmp_path: Path) -> None:
    text = AT_A_TIME.replace("black: {", "black: {server: other, ")
    chat = ScriptedChat([refused(401, "no key")] * 9)
    stop = await chat.start()
    try:
        other = f"{{other: {{type: openai, model: m, base_url: '{chat.url}'}}, policy:"
        async with open_env(seats_in(tmp_path, text.replace("{policy:", other))) as env:
            session = await env.session(env.rows()[0], tokenizer=SMALL)
            turn = await session.start()
            assert turn is None or turn.seat == "white"
            while turn is not None:
                await asyncio.sleep(0.5)
                turn = await session.step("1")
            assert session.rollout is not None
            assert (session.rollout.stop_reason, session.rollout.score) == (StopReason.SERVER_FAILURE, None)
            with pytest.raises(UserError, match="no turn waits"):
                await session.step("more")
    finally:
        await stop()


async def test_session_reply_to_a_cancelled_turn_is_not_used_for_the_next_turn(tmp_path: Path) -> None:
    async with open_env(seats_in(tmp_path)) as env:
        key = RolloutKey(env.rows()[0], "g", 0, 1)
    stepped = ExternalPolicy(None, None, seats=True)
    heard: list[str] = []

    async def play() -> Rollout:
        def asked(seat: str) -> asyncio.Task[ChatReply]:
            messages = [{"role": "user", "content": seat}]
            return asyncio.create_task(stepped.attempt(ChatRequest(messages, rollout_id=f"g-0@{seat}")))

        white, black = asked("white"), asked("black")
        await asyncio.sleep(0.1)
        white.cancel()
        heard.append(str((await black).message["content"]))
        return Rollout(key, 0)

    session = Session(stepped, play)
    turn = await session.start()
    assert turn is not None and turn.seat == "white"
    await asyncio.sleep(0.3)
    turn = await session.step("of white")
    assert turn is not None and (turn.seat, turn.messages[0]["content"]) == ("black", "black")
    assert await session.step("of black") is None
    assert heard == ["of black"]
