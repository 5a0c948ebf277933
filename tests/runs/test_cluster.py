"""How environments share a cluster, as far as it needs none."""

from __future__ import annotations

import pytest

from hermes_rl.runs.cluster import Needs, _Actor, dealt
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
def test_places_are_dealt_out_in_turns_to_whoever_wants_more(room: int, wanted: list[int], expected: list[int]) -> None:
    assert dealt(room, wanted) == expected


def test_a_place_fits_a_worker_of_each_spec() -> None:
    specs = [spec(), spec("{limits: {cpu: 4, memory: 1GiB}}"), spec("{limits: {cpu: 2, memory: 3GiB}}")]
    assert Needs.of(specs[:1]).cpus == 1
    assert Needs.of(specs) == Needs(4, 3 << 30)
    node = {"Resources": {"CPU": 16.0, "memory": float(10 << 30)}}
    assert Needs.of(specs).room(node) == 3


def test_ray_shows_nothing_of_what_an_actor_was_told() -> None:
    assert _Actor.__repr__ is object.__repr__, "Ray puts it into the messages of errors"


def spec(sandbox: str = "{}") -> Spec:
    return parse_spec(
        f"dataset: {{items: [{{a: 1}}]}}\nprompt: {{user: x}}\nsandbox: {sandbox}\n"
        "rewards: {right: {fn: exact_match, args: {target: x}}}\n"
    )
