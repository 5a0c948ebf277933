"""verifiers' door without verifiers: a stand-in has its base classes, and a rollout is told to a trace."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hermes_rl.errors import UserError
from tests.api.summing import MASKED
from tests.integrations.chat_model import ChatModel
from tests.integrations.test_common import spec_file


class HarnessError(Exception):
    pass


class Base:
    """Any of the trainer's classes: it takes what it is given."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.__dict__ |= named
        if given:
            self.data = self.config = given[0]

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    async def score(self, *_: Any) -> None:
        """What the harness measures itself: nothing."""


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    package, module = ModuleType("verifiers"), ModuleType("verifiers.v1")
    for name in ("TasksetConfig", "TaskData", "Task", "Taskset", "HarnessConfig", "Harness", "ProgramResult"):
        setattr(module, name, type(name, (Base,), {}))
    for name in ("SystemMessage", "UserMessage", "AssistantMessage"):
        setattr(module, name, SimpleNamespace(model_validate=lambda message: message))
    module.HarnessError = HarnessError  # type: ignore[attr-defined]
    package.v1 = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", module)
    names = ("hermes_rl_verifiers", "hermes_rl.integrations.verifiers")
    for name in names:
        sys.modules.pop(name, None)
    yield importlib.import_module("hermes_rl_verifiers")
    for name in names:
        sys.modules.pop(name, None)


class Trace:
    """What of a trace is written to."""

    def __init__(self) -> None:
        self.rewards: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.info: dict[str, Any] = {}
        self.agent = SimpleNamespace(trainable=True)
        self.stop_condition: str | None = None

    def record_reward(self, name: str, value: float) -> None:
        self.rewards[name] = value

    def record_metrics(self, values: dict[str, float]) -> None:
        self.metrics |= values


def tasks(door: ModuleType, spec: str, **given: Any) -> list[Any]:
    config = SimpleNamespace(spec=spec, split="train", rows=None, task=None, **given)
    taskset = door.HermesTaskset(config)
    taskset.system_prompt = None
    return list(taskset.load())


async def launched(door: ModuleType, spec: str, url: str) -> tuple[Any, Trace]:
    trace, harness = Trace(), door.HermesHarness(SimpleNamespace(sampling=None))
    (task, *_), ctx = tasks(door, spec), SimpleNamespace(model="m")
    task.data.split = "train"
    await harness.launch(ctx, trace, None, url, "secret", {}, task.data)
    return harness, trace


async def test_rows_are_tasks_and_the_score_is_the_reward(door: ModuleType, tmp_path: Path) -> None:
    assert door.__all__ == ["HermesHarness", "HermesTaskset"]
    spec, model = spec_file(tmp_path), ChatModel()
    found = tasks(door, spec)
    assert len({task.key for task in found}) == 4
    assert found[0].data.prompt[-1] == {"role": "user", "content": "What is 1 plus 2?"}
    async with model.running() as url:
        harness, trace = await launched(door, spec, url)
    assert (trace.rewards, trace.metrics) == ({"score": 1.0}, {"right": 1.0})
    assert trace.info == {"hermes_rl": {"stop_reason": "finished", "masked": False}}
    assert trace.agent.trainable
    assert model.keys == {"Bearer secret"}
    await harness.score(trace, None)


async def test_a_rollout_without_a_score_is_an_error_and_no_reward(door: ModuleType, tmp_path: Path) -> None:
    async with ChatModel(down=True).running() as url:
        with pytest.raises(HarnessError, match=r"server_failure: .*the engine is down"):
            await launched(door, spec_file(tmp_path), url)


async def test_what_verifiers_ended_itself_is_an_error_too(door: ModuleType) -> None:
    trace = Trace()
    trace.stop_condition = "max_turns"
    with pytest.raises(HarnessError, match=r"ended the rollout \(max_turns\) before it was scored"):
        await door.HermesHarness(None).score(trace, None)


async def test_what_the_spec_masks_is_not_trainable(door: ModuleType, tmp_path: Path) -> None:
    async with ChatModel().running() as url:
        _, trace = await launched(door, spec_file(tmp_path, MASKED), url)
    assert trace.rewards == {"score": 0.0}
    assert not trace.agent.trainable


async def test_what_is_not_of_a_spec_is_refused(door: ModuleType) -> None:
    with pytest.raises(UserError, match="name the spec"):
        tasks(door, "")
    with pytest.raises(HarnessError, match="runs the tasks of HermesTaskset, not SimpleNamespace"):
        await door.HermesHarness(None).launch(None, Trace(), None, "", "", {}, SimpleNamespace())
