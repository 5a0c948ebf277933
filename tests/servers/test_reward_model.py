"""Reward models: what vLLM's paths are asked, how their numbers are read, and whose doing it is that there are none."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_rl import Rollout, open_env
from hermes_rl.errors import ServerFailure, UserError
from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.factory import create_client
from hermes_rl.servers.transport import RetryPolicy
from hermes_rl.spec.load import parse_spec
from tests.servers.loopback_server import Answer, Loopback, error

Start = Callable[[], Awaitable[Loopback]]
TALK = [{"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "In Paris."}]
TYPES = ("score", "classify", "pooling")


def answer(kind: str, numbers: Any) -> Answer:
    """An answer in the form that vLLM gives it on the path."""
    entry = {
        "score": {"index": 0, "object": "score", "score": numbers[0]},
        "classify": {"index": 0, "label": "LABEL_0", "probs": numbers, "num_classes": len(numbers)},
        "pooling": {"index": 0, "object": "pooling", "data": numbers},
    }[kind]
    usage = {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0}
    told = {"id": "x-1", "object": "list", "created": 1, "model": "served", "data": [entry], "usage": usage}
    return Answer(body=json.dumps(told).encode())


def client(server: Loopback, kind: str, policy: RetryPolicy | None = None) -> ModelClient:
    return create_client("rater", [ServerConfig(type=f"vllm-{kind}", base_url=server.url, model="rm")], policy)


@pytest.mark.parametrize(
    ("kind", "given", "numbers", "sent"),
    [
        ("score", [0.25], [0.25], {"text_1": "Where is it?", "text_2": "In Paris."}),
        ("classify", [0.1, 0.9], [0.1, 0.9], {"messages": TALK}),
        ("pooling", [-3.5], [-3.5], {"messages": TALK}),
        ("pooling", [[0.9, 0.1], [0.2, 0.8]], [0.2, 0.8], {"messages": TALK}),
    ],
)
async def test_each_path_is_asked_in_its_form_and_its_numbers_are_read(
    loopback: Start, kind: str, given: Any, numbers: list[float], sent: dict[str, Any]
) -> None:
    server = await loopback()
    server.otherwise = answer(kind, given)
    async with client(server, kind) as model:
        assert list(await model.rated(TALK)) == numbers
    (seen,) = server.seen
    assert (seen.path, seen.body) == (f"/{kind}", {"model": "rm", **sent})


@pytest.mark.parametrize("kind", TYPES)
async def test_non_numeric_reward_model_score_is_retried_and_then_fails(
    loopback: Start, kind: str, policy: RetryPolicy
) -> None:
    server = await loopback()
    server.answers = [error(503), answer(kind, [None]), Answer(body=b"{}"), answer(kind, [1])]
    async with client(server, kind, policy) as model:
        assert list(await model.rated(TALK)) == [1]
        server.otherwise = Answer(body=b'{"data": [{"score": NaN, "probs": [NaN], "data": [NaN]}]}')
        with pytest.raises(ServerFailure, match="cannot be read"):
            await model.rated(TALK)


async def test_a_server_that_talks_gives_no_numbers(loopback: Start) -> None:
    server = await loopback()
    async with create_client("judge", [ServerConfig(type="openai", base_url=server.url, model="m")]) as model:
        with pytest.raises(UserError, match=r"servers\.judge: a server of type openai is not a reward model"):
            await model.rated(TALK)


CODE = """
async def own(result, reward_model):
    return sum(await reward_model.rate(result.messages))
"""


async def played(
    server: Loopback, folder: Path, said: list[str], kind: str = "pooling", **reward: Any
) -> list[Rollout]:
    (folder / "own.py").write_text(CODE)
    spec = {
        "dataset": {"items": [{"q": words} for words in said]},
        "prompt": {"user": "Where is it?"},
        "rewards": {"reward_model": reward},
        "solution": {"turns": [{"say": "{{ q }}"}]},
        "servers": {
            "policy": {"type": "scripted"},
            "reward_model": {"type": f"vllm-{kind}", "base_url": server.url, "model": "rm"},
        },
    }
    async with open_env(parse_spec(yaml.safe_dump(spec), folder=folder)) as env:
        return [await env.run(row, retries=0) for row in env.rows()]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("reward", [{}, {"fn": "own.py:own", "range": [-2, 2]}, {"args": {"where": "conversation"}}])
async def test_a_reward_takes_its_number(loopback: Start, tmp_path: Path, kind: str, reward: dict[str, Any]) -> None:
    server = await loopback()
    server.otherwise = answer(kind, [-1.5])
    (rollout,) = await played(server, tmp_path, ["In Paris."], kind, **reward)
    assert (rollout.score, rollout.error) == (-1.5, None)
    messages = server.seen[0].body.get("messages") or list(server.seen[0].body.values())[1:]
    assert [text["content"] if isinstance(text, dict) else text for text in messages] == ["Where is it?", "In Paris."]


async def test_one_of_several_numbers_counts_and_all_are_shown(loopback: Start, tmp_path: Path) -> None:
    server = await loopback()
    server.otherwise = answer("classify", [0.2, 0.8])
    (rollout,) = await played(server, tmp_path, ["In Paris."], "classify", args={"index": 1})
    assert (rollout.score, rollout.rewards["reward_model"].metrics) == (0.8, {"number_0": 0.2, "number_1": 0.8})
    with pytest.raises(UserError, match=r"gives 2 numbers; say with `index` which counts"):
        await played(server, tmp_path, ["In Paris."], "classify")
    with pytest.raises(UserError, match=r"gives 2 numbers, and `index` is 2"):
        await played(server, tmp_path, ["In Paris."], "classify", args={"index": 2})


LONG = "This model's maximum context length is 16 tokens. However, your request has 99 input tokens."


class Choosy(Loopback):
    """Refuses what has certain words in it."""

    def __init__(self, refusal: Answer) -> None:
        super().__init__()
        self.refusal = refusal

    async def _answer(self, reader: Any, writer: Any) -> bool:
        if "no end" in json.dumps(self.seen[-1].body):
            self.answers.insert(0, self.refusal)
        return await super()._answer(reader, writer)


@pytest.mark.parametrize("refusal", [error(400, LONG), error(400, "Conversation roles must alternate")])
@pytest.mark.parametrize("fn", ["reward_model", "own.py:own"], ids=["shipped", "own"])
async def test_what_is_refused_for_this_answer_alone_is_worth_the_low_end(
    refusal: Answer, fn: str, tmp_path: Path
) -> None:
    server = await Choosy(refusal).start()
    try:
        server.answers, server.otherwise = [answer("pooling", [-4])], answer("pooling", [2])
        said = ["bad", "good", "and so on, no end"]
        bad, good, refused = await played(server, tmp_path, said, fn=fn, range=[-10, 10])
    finally:
        await server.stop()
    assert (bad.score, good.score, refused.score) == (-4, 2, -10)
    assert "works without what the agent has said" in str(refused.rewards["reward_model"].reason)


async def test_failing_reward_model_gives_no_score(loopback: Start, tmp_path: Path) -> None:
    server = await loopback()
    server.otherwise = error(401, "who are you?")
    (rollout,) = await played(server, tmp_path, ["In Paris."])
    assert rollout.score is None
    assert "401" in str(rollout.error)
    server.otherwise = error(400, LONG)
    (rollout,) = await played(server, tmp_path, ["In Paris."])
    assert rollout.score is None, "it refuses everybody"
