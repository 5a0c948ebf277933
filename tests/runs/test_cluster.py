"""How environments share a cluster, as far as it needs none."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from hermes_rl.errors import UserError
from hermes_rl.runs.cluster import LEAST, LOCAL, Needs, _Actor, _require_reachable, _token_required, share_evenly
from hermes_rl.runs.packaging import pack, unpack
from hermes_rl.runs.rollout_worker import WorkerSetup
from hermes_rl.spec.load import parse_spec
from hermes_rl.spec.model import Spec


@pytest.mark.parametrize(
    ("room", "wanted", "expected"),
    [
        (8, [256], [8]),
        (8, [256, 256], [4, 4]),
        (7, [256, 256], [4, 3]),
        (8, [1, 256], [1, 7]),
        (8, [256, 1, 256], [4, 1, 3]),
        (8, [2, 3], [2, 3]),
        (1, [256, 256], [1, 0]),
        (0, [256, 256], [0, 0]),
        (8, [], []),
    ],
)
def test_workers_are_shared_evenly_by_demand(room: int, wanted: list[int], expected: list[int]) -> None:
    assert share_evenly(room, wanted) == expected


def test_a_place_fits_a_worker_of_each_spec() -> None:
    specs = [spec(), spec("{limits: {cpu: 4, memory: 1GiB}}"), spec("{limits: {cpu: 2, memory: 3GiB}}")]
    assert Needs.from_specs(specs[:1]).cpus == 1
    assert Needs.from_specs(specs) == Needs(4, 3 << 30)
    node = {"Resources": {"CPU": 16.0, "memory": float(10 << 30)}}
    assert Needs.from_specs(specs).room(node) == 3


def test_ray_actor_repr_hides_its_arguments() -> None:
    assert _Actor.__repr__ is object.__repr__, "Ray puts it into the messages of errors"


NAMES_VARIABLES = """
servers:
  policy: {type: openai, base_url: "http://localhost:1/v1", model: m, api_key_env: POLICY_KEY}
  judge: {type: openai, base_url: "http://localhost:1/v1", model: m, headers_env: {X-Key: JUDGE_HEADER}}
tools: [{mcp: {name: search, url: "http://localhost:1/mcp", headers_env: {X-Key: MCP_HEADER}}}]
toolsets: [web]
user_code: {env: [GAME_DIR, NOT_SET]}
"""
NAMED = {
    "POLICY_KEY": "of-the-policy", "JUDGE_HEADER": "of-the-judge", "MCP_HEADER": "of-a-server",
    "GAME_DIR": "/games", "EXA_API_KEY": "of-a-toolset", "MODAL_TOKEN_ID": "of-the-backend",
}  # fmt: skip


def test_workers_get_only_the_variables_that_the_spec_names() -> None:
    environ = {**NAMED, "HF_TOKEN": "hf_planted", "AWS_SECRET_ACCESS_KEY": "planted-too", "DAYTONA_API_KEY": "planted"}
    one = spec("{backend: modal, network: true}", NAMES_VARIABLES)
    opening = WorkerSetup(one, "process", environ)
    assert opening.variables == NAMED
    travels = pack(opening, ())
    assert b"of-the-policy" in travels and b"planted" not in travels
    arrived = unpack(travels, Path("/"))
    assert arrived.variables == NAMED and "of-the-policy" not in repr(arrived)
    assert WorkerSetup(spec(), None, environ).variables == {}


@pytest.mark.parametrize("address", [LOCAL, "10.0.0.1:6379"])
def test_ray_without_tokens_is_refused(address: str) -> None:
    old = SimpleNamespace(__version__="2.51.2", _raylet=SimpleNamespace())
    with (
        pytest.raises(UserError, match=r"needs Ray 2\.52 or later, and 2\.51\.2 is installed"),
        _token_required(old, address),  # type: ignore[arg-type]
    ):
        raise AssertionError("it was used")


@pytest.mark.parametrize("address", ["a..b:6379", "127.0.0.1:²", "127.0.0.1:1"])
def test_address_where_nothing_can_answer_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=f"--ray {address}: nothing answers there"):
        _require_reachable(address)


def test_least_ray_is_the_one_that_the_package_requires() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert extras["optional-dependencies"]["ray"] == [f"ray>={LEAST}"]


def spec(sandbox: str = "{}", more: str = "") -> Spec:
    return parse_spec(
        f"dataset: {{items: [{{a: 1}}]}}\nprompt: {{user: x}}\nsandbox: {sandbox}\n"
        f"rewards: {{right: {{fn: exact_match, args: {{target: x}}}}}}\n{more}"
    )
