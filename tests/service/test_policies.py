"""The policies that requests name: which key may go where, and what a trainer tells of their weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.service.bodies import PolicyRequest, PolicyUpdate
from hermes_rl.service.policies import MAX_POLICIES, Policies
from hermes_rl.service.refusals import Refused
from hermes_rl.spec.load import parse_spec
from tests.api.summing import TEXT, spec_in

ENVIRON = {"JUDGE_KEY": "for the judge", "FREE_KEY": "for all", "OTHER": "secret", "EMPTY": " ", "SPLIT": "a\r\nX: b"}
JUDGED = TEXT + (
    "servers: {policy: {type: scripted}, judge: {type: openai, base_url: 'https://judge.example/v1', model: j, "
    "api_key_env: JUDGE_KEY}}\n"
)


def policies(folder: Path, text: str = JUDGED) -> Policies:
    spec_in(folder, TEXT)
    spec = parse_spec(text, folder=folder)
    return Policies(spec, ENVIRON, frozenset({"FREE_KEY", "EMPTY", "SPLIT"}))


def asked(base_url: str, key: str | None = None, **more: object) -> PolicyRequest:
    given = {"type": "vllm", "model": "m", "base_url": base_url, "api_key_env": key, **more}
    return PolicyRequest.model_validate(given)


@pytest.mark.parametrize(
    ("base_url", "key"),
    [
        ("https://judge.example/v1", "JUDGE_KEY"),
        ("https://judge.example:443/other", "JUDGE_KEY"),
        ("http://anywhere:1/v1", "FREE_KEY"),
    ],
)
def test_a_key_goes_where_the_spec_or_the_command_lets_it(tmp_path: Path, base_url: str, key: str) -> None:
    (config,) = policies(tmp_path).resolve_policy(asked(base_url, key)).role.configs
    assert config.api_key is not None
    assert config.api_key.reveal() == ENVIRON[key]


@pytest.mark.parametrize(
    ("base_url", "key", "error"),
    [
        ("https://evil.example/v1", "JUDGE_KEY", "key_not_allowed"),
        ("http://judge.example/v1", "JUDGE_KEY", "key_not_allowed"),
        ("https://judge.example:8443/v1", "JUDGE_KEY", "key_not_allowed"),
        ("https://judge.example@evil.example/v1", "JUDGE_KEY", "key_not_allowed"),
        ("https://judge.example/v1", "OTHER", "key_not_allowed"),
        ("https://judge.example/v1", "NOT_SET", "key_not_allowed"),
        ("http://anywhere:1/v1", "EMPTY", "key_not_set"),
        ("http://anywhere:1/v1", "SPLIT", "key_not_set"),
    ],
)
def test_no_request_reads_another_variable(tmp_path: Path, base_url: str, key: str, error: str) -> None:
    with pytest.raises(Refused) as refused:
        policies(tmp_path).resolve_policy(asked(base_url, key))
    assert (refused.value.status, refused.value.body["error"]) == (422, error)
    assert not any(value.strip() and value in str(refused.value.body) for value in ENVIRON.values())


def test_a_server_is_one_policy_while_its_weights_move(tmp_path: Path) -> None:
    found = policies(tmp_path)
    first = found.resolve_policy(asked("http://a:1/v1", tokenizer="t", version=1))
    assert first is found.resolve_policy(asked("http://a:1/v1", tokenizer="t", model="m-2", version=2))
    assert (first.version, first.role.configs[0].current().model) == (2, "m-2")
    found.tell(PolicyUpdate(version=5, model="m-5"))
    assert (first.version, first.role.configs[0].current().model) == (5, "m-5")
    found.resolve_policy(asked("http://a:1/v1", tokenizer="t", version=3))
    assert (first.version, first.role.configs[0].current().model) == (5, "m-5"), "a late word is no news"
    with pytest.raises(Refused, match="versions only rise"):
        found.tell(PolicyUpdate(version=4))
    other = found.resolve_policy(asked("http://b:1/v1", tokenizer="t"))
    assert other is not first
    assert other.version == 5
    own = found.resolve_policy(None)
    assert own.version == 5
    assert found.resolve_policy(asked("http://c:1/v1", weights_path="/v")).version is None, "its server tells it"


def test_policy_limit_evicts_the_least_recently_named_idle_policy(tmp_path: Path) -> None:
    found = policies(tmp_path)
    made = [found.resolve_policy(asked("http://a:1/v1", model=f"m-{number}")) for number in range(MAX_POLICIES)]
    assert found.resolve_policy(asked("http://a:1/v1", model="m-0")) is made[0]
    newest = found.resolve_policy(asked("http://a:1/v1", model="m"), playing={made[1]})
    assert found.forgotten == [made[2]]
    for policy, model in ((newest, "m"), (made[0], "m-0"), (made[1], "m-1")):
        assert found.resolve_policy(asked("http://a:1/v1", model=model)) is policy
    with pytest.raises(Refused, match="needs `tokenizer`"):
        found.resolve_policy(asked("http://a:1/v1", model="more"), playing={*made, newest})
