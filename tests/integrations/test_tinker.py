"""tinker-cookbook's door without it: a stand-in has its base classes, and a rollout is stepped in token ids."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hermes_rl.errors import UserError
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from hermes_rl.tools.base import ToolRuntime, find_runtime
from tests.api.summing import CODE, COMPARED, END, MASKED, TEXT, TOKENIZER, write
from tests.integrations.test_common import spec_file


class StopReason(StrEnum):
    """Those names that the door maps endings to."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_OVERFLOW = "context_overflow"
    ROLLOUT_TIMEOUT = "rollout_timeout"


class StepResult:
    def __init__(self, reward: float, done: bool, ob: Any, stop: Any, metrics: Any = None, logs: Any = None) -> None:
        self.reward, self.episode_done, self.next_observation, self.next_stop_condition = reward, done, ob, stop
        self.metrics, self.logs = metrics or {}, logs or {}


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    modules = {name: ModuleType(name) for name in ("chz", "tinker", "tinker_cookbook", "tinker_cookbook.rl")}
    types = modules["tinker_cookbook.rl.types"] = ModuleType("types")
    types.__dict__.update({"StepResult": StepResult, "StopReason": StopReason, "PARSE_ERROR_MASKED_METRIC_KEY": "mask"})
    for name in ("Env", "EnvGroupBuilder", "InitialObservationOverflow", "RLDataset", "RLDatasetBuilder"):
        setattr(types, name, type(name, (), {}))
    modules["chz"].chz = lambda made: made  # type: ignore[attr-defined]
    modules["tinker"].ModelInput = SimpleNamespace(from_ints=list)  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop("hermes_rl.integrations.tinker", None)
    yield importlib.import_module("hermes_rl.integrations.tinker")
    sys.modules.pop("hermes_rl.integrations.tinker", None)


async def made(door: ModuleType, spec: str, size: int = 1) -> tuple[Any, Any]:
    """A group of the spec's first row, after a way through pickle, and its members."""
    builder = door.HermesDatasetBuilder()
    given = {"spec": spec, "tokenizer": str(small_tokenizer_path()), "per_batch": 2, "group_size": size}
    builder.__dict__.update({**given, "rows": None, "renderer": None})
    dataset, test = await builder()
    assert (len(dataset), len(dataset.get_batch(1)), test) == (2, 2, None)
    group = pickle.loads(pickle.dumps(dataset.get_batch(0)[0]))
    return group, await group.make_envs()


async def played(env: Any, right: bool = True) -> list[Any]:
    """Each step of a rollout."""
    (ids, stop), found = await env.initial_observation(), []
    while True:
        action = TOKENIZER.encode(write(TOKENIZER.decode(ids), right) + END)
        assert stop == [action[-1]]
        found.append(await env.step(action, extra={"stop_reason": "stop"}))
        if found[-1].episode_done:
            return found
        assert found[-1].next_observation[: len(ids) + len(action)] == ids + action
        ids = found[-1].next_observation


async def test_the_sampled_ids_are_the_turns(door: ModuleType, tmp_path: Path) -> None:
    group, members = await made(door, spec_file(tmp_path), 2)
    for env, right in zip(members, (True, False), strict=True):
        first, last = await played(env, right)
        assert (first.reward, last.reward) == (0.0, float(right))
        assert last.metrics == {"right": float(right), "turns": 2, "stop/completed": 1.0}
    trajectories = [SimpleNamespace(stop_reason="completed", transitions=[])] * 2
    assert await group.compute_group_rewards(trajectories, members) == [(0.0, {})] * 2
    await group.cleanup()


async def test_a_rollout_without_a_score_raises(door: ModuleType, tmp_path: Path) -> None:
    text = TEXT.replace("rewards: {", 'rewards: {bad: {fn: "code.py:bad"}, ')
    spec = spec_file(tmp_path, text)
    (tmp_path / "code.py").write_text(f"{CODE}\n\ndef bad(item, result):\n    raise OSError('the disk is gone')\n")
    _, (env,) = await made(door, spec)
    with pytest.raises(door.RolloutFailed, match=r"reward_failure: .*the disk is gone"):
        await played(env)


async def test_abandoned_rollout_fails_its_group_and_is_released(door: ModuleType, tmp_path: Path) -> None:
    group, (env,) = await made(door, spec_file(tmp_path))
    await env.initial_observation()
    with pytest.raises(door.RolloutFailed, match=r"ended a rollout \(max_sampled_tokens\) before it was scored"):
        await group.compute_group_rewards([SimpleNamespace(stop_reason="max_sampled_tokens")], [env])
    await group.cleanup()
    with pytest.raises(UserError, match="no turn waits"):
        await env.step([1])


async def test_what_the_spec_masks_is_marked_in_all_of_its_turns(door: ModuleType, tmp_path: Path) -> None:
    group, (env,) = await made(door, spec_file(tmp_path, MASKED))
    (last,) = await played(env)
    assert last.metrics["stop/max_turns"] == 1.0
    trajectory = SimpleNamespace(stop_reason="max_turns", transitions=[SimpleNamespace(metrics=last.metrics)])
    await group.compute_group_rewards([trajectory], [env])
    assert last.metrics["mask"] == 1.0


async def test_second_start_releases_the_first_rollout(
    door: ModuleType, tmp_path: Path, runtimes: list[ToolRuntime]
) -> None:
    group, (env,) = await made(door, spec_file(tmp_path))
    with pytest.raises(UserError, match="call initial_observation first"):
        await env.step([1])
    await env.initial_observation()
    await env.initial_observation()
    first, second = runtimes
    with pytest.raises(UserError, match="was released already"):
        await first.sandbox()
    assert find_runtime(second.task_id) is second
    await group.cleanup()


async def test_settings_of_the_cookbook_are_refused_by_name(door: ModuleType, tmp_path: Path) -> None:
    spec = spec_file(tmp_path)
    with pytest.raises(UserError, match=r"temperature is tinker-cookbook's"):
        door.HermesGroup(spec, "key", "tokenizer", 1, sampling={"temperature": 2.0})
    builder = door.HermesDatasetBuilder()
    builder.__dict__.update({"spec": spec, "tokenizer": "", "per_batch": 0, "group_size": 1, "rows": None})
    with pytest.raises(UserError, match="per_batch is 0, and not at least 1"):
        await builder()


async def test_rewards_that_compare_are_refused_by_name(door: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rewards.longest compares .* tinker-cookbook"):
        await made(door, spec_file(tmp_path, COMPARED))
