"""OpenEnv's door without OpenEnv: a stand-in has its base classes, and a session is reset, stepped and closed."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from hermes_rl import open_env, sync
from hermes_rl.errors import UserError
from tests.api.summing import COMPARED, MASKED, spec_in


class Loose(BaseModel):
    """A message of OpenEnv's, with any fields."""

    model_config = ConfigDict(extra="allow")
    done: bool = False
    reward: float | None = None
    step_count: int = 0


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    names = ["openenv", "openenv.core", "openenv.core.env_server"]
    modules = {name: ModuleType(name) for name in names}
    for name, held in {
        "types": {"Action": Loose, "Observation": Loose, "State": Loose},
        "interfaces": {"Environment": type("Environment", (), {})},
        "http_server": {"create_fastapi_app": lambda factory, *_, **given: (factory, given)},
    }.items():
        module = modules[f"{names[-1]}.{name}"] = ModuleType(name)
        module.__dict__.update(held)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop("hermes_rl.integrations.openenv", None)
    yield importlib.import_module("hermes_rl.integrations.openenv")
    sys.modules.pop("hermes_rl.integrations.openenv", None)


def said(door: ModuleType, content: str = "", **arguments: Any) -> Any:
    function = {"name": "add", "arguments": json.dumps(arguments)}
    calls = [{"id": "call", "type": "function", "function": function}] if arguments else []
    return door.ReplyAction(content=content, tool_calls=calls)


def test_a_client_hears_what_is_new_and_at_the_end_the_score(door: ModuleType, tmp_path: Path) -> None:
    env = open_env(spec_in(tmp_path))
    with sync(env) as opened:
        one = door.HermesEnvironment(env, opened, count().__next__)
        first = one.reset(index=1, episode_id="mine")
        assert [message["role"] for message in first.messages] == ["system", "user"]
        assert (first.tools[0]["function"]["name"], first.max_tokens, first.done) == ("add", 200, False)
        second = one.step(said(door, a=3, b=4))
        assert [message["content"] for message in second.messages] == ["7"]
        last = one.step(said(door, "The sum is 7."))
        assert (last.done, last.reward, last.stop_reason, last.error) == (True, 1.0, "finished", None)
        assert (last.rewards, last.trainable) == ({"right": 1.0}, True)
        assert (one.state.episode_id, one.state.step_count) == ("mine", 2)
        with pytest.raises(UserError, match="no turn waits for an answer"):
            one.step(said(door, "more"))


@pytest.mark.parametrize("asked", [{"index": "1"}, {"index": 1.5}, {"seed": "x"}, {"key": 5}])
def test_reset_with_values_of_other_types_is_refused(door: ModuleType, tmp_path: Path, asked: dict[str, Any]) -> None:
    env = open_env(spec_in(tmp_path))
    with sync(env) as opened, pytest.raises(UserError, match=f"{next(iter(asked))}.*{next(iter(asked.values()))}"):
        door.HermesEnvironment(env, opened, count().__next__).reset(**asked)


def test_a_reset_ends_the_rollout_before_it(door: ModuleType, tmp_path: Path) -> None:
    env = open_env(spec_in(tmp_path))
    with sync(env) as opened:
        one = door.HermesEnvironment(env, opened, count().__next__)
        with pytest.raises(UserError, match="call reset first"):
            one.step(said(door, "early"))
        for text in ("What is 1 plus 2?", "What is 3 plus 4?"):
            assert one.reset().messages[-1]["content"] == text
        one.close()
        with pytest.raises(UserError, match="call reset first"):
            one.step(said(door, "late"))


def test_what_the_spec_masks_is_scored_and_not_trained_on(door: ModuleType, tmp_path: Path) -> None:
    env = open_env(spec_in(tmp_path, MASKED))
    with sync(env) as opened:
        one = door.HermesEnvironment(env, opened, count().__next__)
        one.reset()
        last = one.step(said(door, a=1, b=2))
    assert (last.stop_reason, last.reward, last.trainable) == ("max_turns", 0.0, False)


async def test_rewards_that_compare_are_refused_by_name(door: ModuleType, tmp_path: Path) -> None:
    async with open_env(spec_in(tmp_path, COMPARED)) as env:
        with pytest.raises(UserError, match=r"rewards.longest compares the members of a group, and OpenEnv"):
            door.make_app(env, 4)


async def test_sessions_are_bounded_and_tasks_are_listed(door: ModuleType, tmp_path: Path) -> None:
    async with open_env(spec_in(tmp_path)) as env:
        factory, given = door.make_app(env, 4)
        assert (given["max_concurrent_envs"], given["env_name"]) == (4, "sums")
        one = factory()
        assert (one.list_splits(), one.num_tasks("train")) == (["train"], 4)
        assert [task["index"] for task in one.get_task_range("train", 1, 9)] == [1, 2, 3]
        assert env.row(one.list_tasks("train")[2]["id"]) == env.rows()[2]
        with pytest.raises(IndexError):
            one.get_task("train", 4)
