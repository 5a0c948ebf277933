"""From a spec's servers to roles: types that are refused, keys from the environment."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hermes_rl.errors import UserError
from hermes_rl.servers.base import Secret, ServerConfig
from hermes_rl.servers.factory import config_from_spec, create_client
from hermes_rl.spec.sections.servers import Server


@pytest.mark.parametrize("kind", ["vllm", "sglang", "atropos"])
def test_token_level_servers_are_made_without_asking_them_anything(kind: str) -> None:
    role = create_client("policy", [ServerConfig(kind, "http://localhost:1/v1", model="m")])
    assert [config.type for config in role.configs] == [kind]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ServerConfig("trl", "http://localhost:1"), "use `type: vllm`"),
        (ServerConfig("opneai", "http://localhost:1"), "did you mean `openai`"),
        (ServerConfig("openai"), "needs a base_url"),
        (ServerConfig("openai", "localhost:9001/v1"), "must start with http"),
        (ServerConfig("openai", "http://None:None/v1"), "expected an address"),
        (ServerConfig("openai", "http://a\nb/v1"), "and a host"),
        (ServerConfig("openai", "http://[::1/v1"), "expected an address"),
    ],
)
def test_what_cannot_work_is_refused(config: ServerConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_client("policy", [config])


def test_a_role_needs_a_server() -> None:
    with pytest.raises(UserError, match="no server"):
        create_client("judge", [])


def test_a_server_of_a_spec() -> None:
    server = Server.model_validate(
        {
            "type": "openai",
            "base_url": "http://h/v1",
            "model": "m",
            "api_key_env": "K",
            "headers_env": {"X-A": "A"},
            "timeout": 5,
        }
    )
    config = config_from_spec(server, {"K": " key-1 \n", "A": "v"}, seed=7)
    assert (config.type, config.base_url, config.model, config.timeout) == ("openai", "http://h/v1", "m", 5)
    assert (config.api_key, config.headers, config.seed) == (Secret("key-1"), {"X-A": Secret("v")}, 7)


def test_no_variable_named_means_no_key() -> None:
    config = config_from_spec(SimpleNamespace(type="scripted", error_rate=0.4, seed=3), {"OPENAI_API_KEY": "k"}, seed=7)
    assert (config.api_key, config.error_rate, config.seed) == (None, 0.4, 3)


def test_a_key_of_the_command_line_wins() -> None:
    server = SimpleNamespace(type="openai", api_key_env="MISSING")
    assert config_from_spec(server, {}, api_key="given").api_key == Secret("given")


@pytest.mark.parametrize(("value", "message"), [("", "K, named by api_key_env.*not set"), ("a\nb", "line break")])
def test_a_key_that_cannot_be_used_is_named_and_not_shown(value: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        config_from_spec(SimpleNamespace(type="openai", api_key_env="K"), {"K": value})
    assert not value or value not in str(caught.value)
