"""agent-lightning's door without agent-lightning: a stand-in has its base class, and the endpoint is a real one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hermes_rl.errors import UserError
from tests.api.summing import COMPARED, MASKED
from tests.integrations.chat_model import ChatModel
from tests.integrations.test_common import spec_file


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    trainer = ModuleType("agentlightning")
    trainer.LitAgent = type("LitAgent", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "agentlightning", trainer)
    sys.modules.pop("hermes_rl.integrations.agentlightning", None)
    yield importlib.import_module("hermes_rl.integrations.agentlightning")
    sys.modules.pop("hermes_rl.integrations.agentlightning", None)


async def played(door: ModuleType, spec: str, url: str, **sampling: Any) -> float:
    agent = door.HermesAgent(spec)
    model = SimpleNamespace(
        get_base_url=lambda rollout, attempt: url.replace("/v1", f"/{rollout}/{attempt}/v1"),
        model="m",
        api_key="secret",
        sampling_parameters=sampling,
    )
    rollout = SimpleNamespace(rollout_id="r1", attempt=SimpleNamespace(attempt_id="a1"))
    score: float = await agent.rollout_async(agent.tasks(1)[0], {"main_llm": model}, rollout)
    return score


async def test_rollout_calls_the_endpoint_of_its_attempt(door: ModuleType, tmp_path: Path) -> None:
    model = ChatModel()
    async with model.running() as url:
        assert await played(door, spec_file(tmp_path), url, temperature=0.5) == 1.0
    assert model.paths == {"/r1/a1/v1/chat/completions"}
    assert model.keys == {"Bearer secret"}
    assert {body["temperature"] for body in model.asked} == {0.5}


async def test_missing_resource_or_row_is_refused_by_name(door: ModuleType, tmp_path: Path) -> None:
    agent = door.HermesAgent(spec_file(tmp_path))
    with pytest.raises(UserError, match=r"there is no resource 'main_llm' .there are other.: name it as `llm`"):
        await agent.rollout_async({"key": "x"}, {"other": None}, None)
    for task in ({}, None, "key"):
        with pytest.raises(UserError, match="a task has no `key` of a row"):
            await agent.rollout_async(task, {"main_llm": None}, None)


async def test_a_rollout_without_a_score_fails_the_attempt(door: ModuleType, tmp_path: Path) -> None:
    async with ChatModel(down=True).running() as url:
        with pytest.raises(door.AttemptWithoutScore, match="server_failure"):
            await played(door, spec_file(tmp_path), url)


async def test_what_it_cannot_carry_is_refused_by_name(door: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rewards.longest compares .* agent-lightning"):
        door.HermesAgent(spec_file(tmp_path, COMPARED)).tasks()
    other = tmp_path / "other"
    other.mkdir()
    async with ChatModel().running() as url:
        with pytest.raises(door.AttemptWithoutScore, match="the spec masks max_turns"):
            await played(door, spec_file(other, MASKED), url)
