"""Policies of servers: what is told of their weights, and what is loaded before they are asked."""

from __future__ import annotations

import gc
import pickle
import random
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from hermes_rl import Policy, open_env
from hermes_rl.errors import UserError
from hermes_rl.servers.base import ChatRequest
from hermes_rl.spec.load import parse_spec
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.api.summing import spec_in
from tests.integrations.chat_model import ChatModel
from tests.servers.token_policy import TokenPolicy

DATA = "rewards: {}\ndataset: {items: [{a: 1}]}\nprompt: {user: hi}\n"
SPEC = DATA + "servers: {policy: {type: vllm, base_url: '%s', model: m, tokenizer: '%s', api_key_env: KEY}}\n"


def said(text: str, chance: random.Random) -> str:
    return "yes<|im_end|>"


async def test_policy_of_a_spec_uses_the_model_and_version_of_the_trainer(tmp_path: Path) -> None:
    server = TokenPolicy(load_tokenizer(), said)
    told: dict[str, str | None] = {"model": None}
    async with server.running() as url:
        spec = parse_spec(SPEC % (url, small_tokenizer_path()), folder=tmp_path)
        policy = Policy.of_spec(spec, environ={"KEY": "secret"}, model=lambda: told["model"], version=3)
        assert policy.exact
        async with policy.role as client:
            for name in (None, "m-4"):
                told["model"] = name
                reply = await client.chat(ChatRequest([{"role": "user", "content": "?"}]))
                assert reply.sampled is not None
                assert (reply.sampled.weights.before, reply.sampled.weights.after) == (3, 3)
            assert await policy.weights() == 3
    assert [one["model"] for one in server.asked] == ["m", "m-4"]
    with pytest.raises(UserError, match="KEY"):
        Policy.of_spec(spec, environ={})
    with pytest.raises(UserError, match=r"servers\.policy is missing"):
        Policy.of_spec(parse_spec(DATA, folder=tmp_path))


async def test_weight_version_is_read_from_the_configured_path() -> None:
    server = TokenPolicy(load_tokenizer(), said)
    server.version = 7
    async with server.running() as url:
        named = {"tokenizer": str(small_tokenizer_path()), "weights_path": "/get_weight_version"}
        policy = Policy.server("vllm", url, "m", **named)
        async with policy.role as client:
            await client.chat(ChatRequest([{"role": "user", "content": "?"}]))
            assert await policy.weights() == 7


async def test_preparing_loads_the_tokenizer_and_asks_the_server_nothing(tmp_path: Path) -> None:
    await Policy.server("vllm", "http://127.0.0.1:9/v1", "m", tokenizer=str(small_tokenizer_path())).prepare()
    with pytest.raises(UserError):
        await Policy.server("vllm", "http://127.0.0.1:9/v1", "m", tokenizer=str(tmp_path)).prepare()


@pytest.mark.parametrize(
    ("kind", "base_url", "model", "lacking"), [("vllm", None, "m", "base_url"), ("openai", "http://x", "", "model")]
)
def test_what_a_type_needs_is_asked_for_at_once(kind: str, base_url: str | None, model: str, lacking: str) -> None:
    with pytest.raises(UserError, match=f"needs `{lacking}`"):
        Policy.server(kind, base_url, model)


@pytest.mark.parametrize(
    "base_url", ["http://[::1/v1", "http://[x]/v1", "http://a:99999/v1", "http://a:b", "http://\u2100"]
)
def test_policy_refuses_a_malformed_base_url(base_url: str) -> None:
    with pytest.raises(UserError, match="base_url: expected an address"):
        Policy.server("openai", base_url, "m")


async def test_the_endpoint_of_a_rollout_is_not_kept_when_it_has_ended(tmp_path: Path) -> None:
    model = ChatModel()
    async with model.running() as url, open_env(spec_in(tmp_path)) as env:
        policy = Policy.endpoint(url, "m", api_key="secret")
        rollout = await env.run(env.rows()[0], policy)
        assert rollout.score == 1.0
        assert rollout.examples() == []
        await policy.close()
        left = weakref.ref(policy)
        del policy
        gc.collect()
        assert left() is None


# ---------------------------------------------------------------------- the way to another process


def test_a_description_makes_the_same_policy_and_shows_no_key() -> None:
    model = ["m-1"]
    policy = Policy.server(
        "vllm",
        "http://a:1/v1",
        lambda: model[0],
        api_key="a secret",
        tokenizer="t",
        renderer="template",
        weights_path="/version",
        version=3,
    )
    described = policy.describe()
    assert "a secret" not in repr(described)
    other = Policy.of_description(pickle.loads(pickle.dumps(described)))
    (mine,), (theirs,) = policy.role.configs, other.role.configs
    assert replace(mine, naming=None, version=None) == replace(theirs, naming=None, version=None)
    assert (other.version, theirs.current().model) == (None, "m-1"), "nothing was told of its weights yet"
    first = policy.get_weight_update()
    assert policy.get_weight_update() is first, "nothing has changed"
    model[0], policy.version = "m-2", 4
    other.take(policy.get_weight_update())
    other.take(first)
    assert (other.version, theirs.current().model) == (4, "m-2"), "a word that comes late says nothing"
    assert other.describe().servers == described.servers


def test_serialized_policy_keeps_all_servers_and_their_headers(tmp_path: Path) -> None:
    server = "{type: vllm, base_url: 'http://%s/v1', model: %s, headers_env: {X-Key: KEY}, session_header: false}"
    policies = ", ".join(server % (host, host) for host in ("a", "b"))
    spec = parse_spec(f"{DATA}servers: {{policy: [{policies}]}}\n", folder=tmp_path)
    policy = Policy.of_spec(spec, environ={"KEY": "a secret"}, model=lambda: None)
    other = Policy.of_description(pickle.loads(pickle.dumps(policy.describe())))
    other.take(policy.get_weight_update())
    assert [one.current().model for one in other.role.configs] == ["a", "b"]
    assert [one.headers["X-Key"].reveal() for one in other.role.configs] == ["a secret"] * 2
    assert not any(one.session_header for one in other.role.configs)


def test_function_policy_cannot_be_serialized_but_an_endpoint_can() -> None:
    async def chat(messages: object, tools: object) -> str:
        return ""

    with pytest.raises(UserError, match="which other processes cannot call"):
        Policy.chat(chat).describe()
    endpoint = Policy.of_description(Policy.endpoint("http://a:1/v1", "m").describe())
    assert endpoint.captured
