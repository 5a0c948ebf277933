"""The scripted policy over real HTTP: turns, counts, cuts, deviations."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.servers.base import ChatRequest, ServerConfig
from hermes_rl.servers.factory import create_client
from hermes_rl.servers.scripted.play import (
    FINISHED,
    UNSCRIPTED,
    Script,
    ScriptedCall,
    ScriptedTurn,
    deviate_script,
    deviations,
)
from hermes_rl.servers.scripted.server import ScriptedServer
from hermes_rl.tokens.chat import SampledTurn, chat_tokens
from hermes_rl.tokens.load import load_tokenizer

SOLUTION: list[dict[str, Any]] = [
    {"tools": [{"name": "write_file", "args": {"path": "a.txt", "content": "größer ☕\n12"}}]},
    {"say": "Created a.txt."},
]
PROMPT = [{"role": "system", "content": "Be careful."}, {"role": "user", "content": "Create a.txt."}]
TOOLS = [{"type": "function", "function": {"name": "write_file", "parameters": {"type": "object"}}}]


async def _play(prior: int = 0, **fields: Any) -> list[dict[str, Any]]:
    """The history of a whole rollout, as an agent loop would build it."""
    history: list[dict[str, Any]] = list(PROMPT)
    if prior:
        history[1:1] = [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}]
    async with create_client("policy", [ServerConfig("scripted")]) as role:
        role.register("r", Script.from_turns(SOLUTION, prior))
        while True:
            reply = await role.chat(ChatRequest(history, TOOLS, rollout_id="r", **fields))
            history.append(reply.message)
            if reply.finish_reason != "tool_calls":
                return history
            for call in reply.message["tool_calls"]:
                history.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})


async def test_scripted_server_returns_solution_turns() -> None:
    history = await _play()
    call = history[2]["tool_calls"][0]["function"]
    assert call["name"] == "write_file"
    assert json.loads(call["arguments"]) == {"path": "a.txt", "content": "größer ☕\n12"}
    assert history[4] == {"role": "assistant", "content": "Created a.txt."}


async def test_prompt_examples_do_not_count_as_turns() -> None:
    assert (await _play(prior=1))[-1]["content"] == "Created a.txt."


async def test_scripts_are_separate_per_rollout_and_can_be_removed() -> None:
    async with create_client("policy", [ServerConfig("scripted")]) as role:
        assert role.scripted
        for name in "abc":
            role.register(name, Script.from_turns([{"say": f"I am {name}."}]))
        replies = await asyncio.gather(*(role.chat(ChatRequest(PROMPT, rollout_id=name)) for name in "abc"))
        assert [reply.message["content"] for reply in replies] == ["I am a.", "I am b.", "I am c."]
        assert {reply.server_type for reply in replies} == {"scripted"}
        role.forget("a")
        assert (await role.chat(ChatRequest(PROMPT, rollout_id="a"))).message["content"] == UNSCRIPTED
        assert (await role.chat(ChatRequest(PROMPT))).message["content"] == UNSCRIPTED


LONG: list[dict[str, Any]] = [{"say": f"Step {number} is done."} for number in range(5)]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
AS_TEXT = [{"role": "user", "content": "Go on for long."}]
AS_MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Go on for long."}, IMAGE]}]
"""Which is asked in messages, as no ids can be made of a picture."""


@pytest.mark.parametrize("prompt", [AS_TEXT, AS_MESSAGES])
async def test_script_completes_when_the_program_drops_old_turns(prompt: list[dict[str, Any]]) -> None:
    window: list[dict[str, Any]] = []
    said = []
    async with create_client("policy", [ServerConfig("scripted")]) as role:
        role.register("r", Script.from_turns(LONG))
        for _ in range(5):
            asked = ChatRequest([*prompt, *window[-4:]], rollout_id="r")
            said.append((await role.chat(asked)).message["content"])
            assert (await role.chat(asked)).message["content"] == said[-1], "the same request has the same answer"
            window += [
                {"role": "assistant", "content": said[-1]},
                {"role": "user", "content": f"And then {len(said)}?"},
            ]
    assert said == [turn["say"] for turn in LONG]


@pytest.mark.parametrize("prompt", [AS_TEXT, AS_MESSAGES])
async def test_script_continues_after_the_program_restarts_from_a_summary(prompt: list[dict[str, Any]]) -> None:
    said: list[str] = []
    async with create_client("policy", [ServerConfig("scripted")]) as role:
        role.register("r", Script.from_turns(LONG))

        async def ask(history: list[dict[str, Any]]) -> None:
            reply = await role.chat(ChatRequest(history, rollout_id="r"))
            said.append(str(reply.message["content"]))
            history += [reply.message, {"role": "user", "content": "And then?"}]

        first = list(prompt)
        for _ in range(3):
            await ask(first)
        again = [{"role": "user", "content": f"Go on. So far: {said[-1]}"}]
        for _ in range(2):
            await ask(again)
        await ask([{"role": "user", "content": "A title for all of it?"}])
    assert said == [*(turn["say"] for turn in LONG), LONG[0]["say"]]


async def test_script_returns_a_finished_message_after_its_last_turn() -> None:
    spoken = [*PROMPT, {"role": "assistant", "content": "done"}]
    async with create_client("policy", [ServerConfig("scripted")]) as role:
        role.register("r", Script.from_turns([{"say": "done"}]))
        reply = await role.chat(ChatRequest(spoken, rollout_id="r"))
    assert (reply.message["content"], reply.finish_reason) == (FINISHED, "stop")


async def test_a_turn_may_say_and_call() -> None:
    async with create_client("policy", [ServerConfig("scripted")]) as role:
        role.register("r", Script.from_turns([{"say": "Now:", "tools": [{"name": "ls"}, {"name": "pwd"}]}]))
        message = (await role.chat(ChatRequest(PROMPT, rollout_id="r"))).message
    assert message["content"] == "Now:"
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ["{}", "{}"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


async def test_scripted_usage_and_logprobs_match_the_tokenizer() -> None:
    tokenizer = load_tokenizer()
    async with create_client("policy", [ServerConfig("scripted")]) as role:
        role.register("r", Script.from_turns(SOLUTION))
        reply = await role.chat(ChatRequest(PROMPT, TOOLS, rollout_id="r", logprobs=True))
    turn = SampledTurn(reply.finish_reason, reply.logprobs, reply.tokens)
    sequence = chat_tokens(tokenizer, [*PROMPT, reply.message], TOOLS, turns=[turn]).sequence
    assert sequence is not None
    assert reply.usage["completion_tokens"] == len(sequence.trained)
    assert reply.usage["total_tokens"] == len(sequence.tokens)
    assert sequence.logprobs is not None
    assert set(sequence.logprobs) == {0.0, 1.0}
    assert "".join(reply.tokens or []).endswith("<|im_end|>")


@pytest.mark.parametrize("limit", [1, 5, 12])
async def test_max_tokens_cuts(limit: int) -> None:
    async with create_client("policy", [ServerConfig("scripted")]) as role:
        role.register("r", Script.from_turns(SOLUTION))
        reply = await role.chat(ChatRequest(PROMPT, TOOLS, rollout_id="r", max_tokens=limit))
    assert reply.finish_reason == "length"
    assert reply.usage["completion_tokens"] == limit
    assert "tool_calls" not in reply.message
    assert reply.message["content"].startswith("<tool_call>")


async def test_what_cannot_be_counted_is_not_counted() -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    async with create_client("policy", [ServerConfig("scripted")]) as role:
        role.register("r", Script.from_turns([{"say": "A cat."}]))
        reply = await role.chat(ChatRequest(image, rollout_id="r"))
    assert (reply.message["content"], reply.usage) == ("A cat.", {})


async def test_it_is_an_ordinary_server() -> None:
    server = ScriptedServer("toy", load_tokenizer())
    url = await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(url + "/models") as response:
                assert (await response.json())["data"][0]["id"] == "toy"
            async with session.get(url.removesuffix("/v1") + "/health") as response:
                assert response.status == 200
            bodies: list[bytes] = [b"{", b"[]", b'{"messages": 1}', b'{"messages": [], "stream": true}']
            for body in bodies:
                async with session.post(url + "/chat/completions", data=body) as response:
                    assert response.status == 400
            large = {"messages": [{"role": "user", "content": "word " * 250_000}]}
            async with session.post(url + "/chat/completions", json=large) as response:
                assert (await response.json())["choices"][0]["message"]["content"] == UNSCRIPTED
    finally:
        await server.close()
        await server.close()


def test_a_role_can_be_used_in_one_loop_after_another() -> None:
    role = create_client("policy", [ServerConfig("scripted")])
    role.register("r", Script.from_turns([{"say": "hi"}]))

    async def once() -> str:
        reply = await role.chat(ChatRequest(PROMPT, rollout_id="r"))
        await role.close()
        return str(reply.message["content"])

    assert [asyncio.run(once()) for _ in range(2)] == ["hi", "hi"]


@given(n=st.integers(2, 16), share=st.floats(0.001, 1.0), seed=st.integers(0, 9), key=st.text(max_size=5))
def test_as_many_deviate_as_promised(n: int, share: float, seed: int, key: str) -> None:
    chosen = deviations(n, share, seed, key)
    assert len(chosen) == min(max(round(share * n), 1), n - 1)
    assert chosen <= set(range(n))
    assert chosen == deviations(n, share, seed, key)


def test_none_deviate_when_not_asked_or_alone() -> None:
    assert deviations(8, 0.0, 1, "k") == deviations(1, 0.9, 1, "k") == deviations(0, 0.9, 1, "k") == frozenset()


def test_groups_differ_in_who_deviates() -> None:
    assert len({deviations(8, 0.4, 0, str(key)) for key in range(50)}) > 20


def _texts(turns: tuple[ScriptedTurn, ...]) -> list[Any]:
    return [turn.say for turn in turns] + [v for t in turns for c in t.tools for v in c.args.values()]


@given(
    say=st.text(min_size=1),
    content=st.text(),
    number=st.one_of(st.integers(-(10**9), 10**9), st.floats(allow_nan=False, allow_infinity=False)),
    seed=st.integers(),
)
def test_every_text_and_number_changes(say: str, content: str, number: float, seed: int) -> None:
    args = {"content": content, "number": number, "nested": [{"x": content}], "flag": True}
    turns = (ScriptedTurn(tools=(ScriptedCall("t", args),)), ScriptedTurn(say=say))
    wrong = deviate_script(turns, Random(seed))
    assert all(a != b for a, b in zip(_texts(turns), _texts(wrong), strict=True) if a is not None)
    assert [call.name for turn in wrong for call in turn.tools] == ["t"]
    assert wrong == deviate_script(turns, Random(seed))
    json.dumps(wrong[0].tools[0].args)


def test_a_wrong_answer_keeps_its_shape() -> None:
    turns = (ScriptedTurn(say="The answer is \\boxed{32.5}."),)
    (wrong,) = deviate_script(turns, Random(1))
    assert wrong.say is not None
    inside = wrong.say.split("{")[1].split("}")[0]
    assert float(inside) != 32.5
