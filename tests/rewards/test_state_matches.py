"""A replay of gold on a fresh state, compared with what the agent has made of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_rl import Rollout, open_env
from hermes_rl.errors import UserError
from hermes_rl.spec.load import parse_spec

WORLD = '''
"""A shop with a desk for those who work there, and a shelf for its customers."""


class Desk:
    """What the agent can do."""

    def __init__(self, shop):
        self.shop = shop

    async def cancel(self, number: str) -> str:
        """Cancel an order."""
        if number not in self.shop.orders:
            raise KeyError(number)
        self.shop.orders[number] = "cancelled"
        return "done"

    def look(self, number: str) -> str:
        """Look at an order."""
        self.shop.looks += 1
        return self.shop.orders[number]


class Shop:
    """One world per rollout."""

    documents = [{"name": name, "description": name, "parameters": {"type": "object"}} for name in ("put", "take")]

    def __init__(self, item):
        self.orders, self.shelf, self.looks = {name: "open" for name in item["orders"]}, [], 0
        self.__dict__["_desk"] = Desk(self)
        self.closed = item.get("closed")

    @property
    def desk(self):
        return self._desk

    def stock(self):
        return sorted(self.shelf)

    def act(self, name, arguments):
        getattr(self.shelf, {"put": "append", "take": "remove"}[name])(arguments["what"])
        return name

    def shut(self):
        if self.closed is not None:
            with open(self.closed, "a") as file:
                file.write("shut\\n")
'''
GOLD = [
    {"user_tools": [{"name": "put", "args": {"what": "a book"}}], "user": "It is on the shelf."},
    {"tools": [{"name": "look", "args": {"number": "{{ orders[0] }}"}}]},
    {"tools": [{"name": "cancel", "args": {"number": "{{ orders[0] }}"}}]},
    {"tools": [{"name": "cancel", "args": {"number": "none"}}]},
    {"say": "Done."},
]
APART = pytest.mark.parametrize("apart", [False, True])


async def played(folder: Path, turns: Any, args: dict[str, Any], apart: bool = False, **row: Any) -> Rollout:
    """Play these turns where gold is `args.gold`, or what is played itself."""
    (folder / "shop.py").write_text(WORLD)
    spec = {
        "dataset": {"items": [{"orders": ["a", "b"], **row}]},
        "state": {"python": "shop.py:Shop", "isolate": "process" if apart else "none", "close": "shut"},
        "prompt": {"user": "Cancel {{ orders[0] }}."},
        "tools": [{"state": "desk"}],
        "user": {"tools": [{"state": "act", "schemas": "documents", "arguments": "strict"}], "stop": ["END"]},
        "rewards": {"state_matches": {"args": args}},
        "solution": {"turns": turns},
        "servers": {"policy": {"type": "scripted"}, "user": {"type": "scripted"}},
    }
    async with open_env(parse_spec(yaml.safe_dump(spec), folder=folder)) as env:
        return await env.run(env.rows()[0])


def without(number: int) -> list[dict[str, Any]]:
    return [turn for place, turn in enumerate(GOLD) if place != number]


BY_STATE = {"compare": ["orders", "stock"], "gold": GOLD}


@APART
@pytest.mark.parametrize(
    ("turns", "args", "value", "equal"),
    [
        (GOLD, {}, 1, {"orders": 1, "shelf": 1, "looks": 1}),
        (GOLD, BY_STATE, 1, {"orders": 1, "stock": 1}),
        (without(0), BY_STATE, 0, {"orders": 1, "stock": 0}),
        (without(1), BY_STATE, 1, {"orders": 1, "stock": 1}),
        (without(1), {"gold": GOLD}, 0, {"orders": 1, "shelf": 1, "looks": 0}),
        (without(2), BY_STATE, 0, {"orders": 0, "stock": 1}),
        (without(3), BY_STATE, 1, {"orders": 1, "stock": 1}),
        ([*GOLD[:3], *GOLD[2:]], BY_STATE, 1, {"orders": 1, "stock": 1}),
        (GOLD, {"gold": []}, 0, {"orders": 0, "shelf": 0, "looks": 0}),
    ],
)
async def test_final_state_is_compared_with_the_state_after_the_gold_calls(
    turns: Any, args: dict[str, Any], value: float, equal: dict[str, float], apart: bool, tmp_path: Path
) -> None:
    rollout = await played(tmp_path, turns, args, apart)
    assert rollout.error is None
    reward = rollout.rewards["state_matches"]
    failed = reward.metrics["failed"]
    assert (rollout.score, {name: reward.metrics[name] for name in equal}) == (value, equal), reward
    assert failed == (0 if args.get("gold") == [] else 1), "the cancellation of no order"
    assert reward.reason == (
        None if value else f"gold leaves another {', '.join(n for n, e in equal.items() if not e)}"
    )


@APART
async def test_what_the_fresh_state_holds_is_given_back(tmp_path: Path, apart: bool) -> None:
    closed = tmp_path / "closed"
    rollout = await played(tmp_path, GOLD, BY_STATE, apart, closed=str(closed))
    assert (rollout.score, closed.read_text()) == (1, "shut\nshut\n")


async def test_a_name_that_is_not_there_is_the_spec_s_mistake(tmp_path: Path) -> None:
    rollout = await played(tmp_path, GOLD, {"compare": ["stok"]})
    assert rollout.score is None
    assert "stok" in str(rollout.error)
    with pytest.raises(UserError, match="takes no argument 'compared'"):
        await played(tmp_path, GOLD, {"compared": ["orders"]})


async def test_the_example_of_the_docs_tells_right_from_wrong(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    spec, code = re.search(
        r"## Compare with the state of the solution\n\n```yaml\n(.*?)```\n\n```python\n(.*?)```", page, re.DOTALL
    ).groups()  # type: ignore[union-attr]
    (tmp_path / "shop.py").write_text(code)
    for error_rate, scores in ((0, {1.0}), (1, {0.0, 1.0})):
        text = spec.replace("{type: scripted}", f"{{type: scripted, error_rate: {error_rate}}}")
        async with open_env(parse_spec(text, folder=tmp_path)) as env:
            group = await env.run_group(env.rows()[0], 4)
        assert {rollout.score for rollout in group.rollouts} == scores
