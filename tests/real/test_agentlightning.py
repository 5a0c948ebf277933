"""The real agent-lightning's runner runs a spec's agent with a model endpoint on loopback."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.api.summing import CODE, COMPARED, TEXT
from tests.integrations.chat_model import ChatModel
from tests.real.doors_played import message_of, require_scores_as_everywhere, write_doors
from tests.real.environments import HERE, ROOT, agentlightning_python

COMPONENT = "agent-lightning"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(300)]


async def stepped(folder: Path, model: ChatModel, text: str = TEXT) -> list[dict[str, Any]]:
    """Return the outcome of a rollout of each row."""
    (folder / "code.py").write_text(CODE)
    (folder / "sums.yaml").write_text(text)
    return await stepped_of("sums.yaml", folder, model)


async def stepped_of(spec: str, folder: Path, model: ChatModel) -> list[dict[str, Any]]:
    own = {**os.environ, "PYTHONPATH": str(ROOT), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    pipe = asyncio.subprocess.PIPE
    python = await asyncio.to_thread(agentlightning_python)
    async with model.running() as url:
        words = [str(python), str(HERE / "agl_steps.py"), url, spec]
        done = await asyncio.create_subprocess_exec(*words, cwd=folder, env=own, stdout=pipe, stderr=pipe)
        out, err = await asyncio.wait_for(done.communicate(), 200)
    assert done.returncode == 0, err.decode()[-3000:]
    found: list[dict[str, Any]] = json.loads(out.decode().splitlines()[-1])
    return found


async def test_the_reward_of_a_rollout_is_its_score(tmp_path: Path) -> None:
    model = ChatModel(wrong=2)
    found = await stepped(tmp_path, model)
    assert [one["reward"] for one in found] == [1.0, 0.0, 1.0, 0.0]
    assert {one["status"] for one in found} == {"succeeded"}
    assert model.keys == {"Bearer secret"}
    assert {body["temperature"] for body in model.asked} == {0.5}


async def test_a_failed_rollout_has_no_reward(tmp_path: Path) -> None:
    found = await stepped(tmp_path, ChatModel(down=True))
    assert [one["reward"] for one in found] == [None] * 4
    assert {one["status"] for one in found} == {"failed"}
    assert all(one["error"].startswith("server_failure: ") for one in found)


async def test_what_agent_lightning_cannot_carry_is_refused_by_name(tmp_path: Path) -> None:
    (refused,) = await stepped(tmp_path, ChatModel(), COMPARED)
    assert "rewards.longest compares the members of a group, and agent-lightning" in refused["refused"]
    masking = TEXT.replace("max_turns: 4", "max_turns: 1") + "on_stop: {max_turns: mask}\n"
    found = await stepped(tmp_path, ChatModel(), masking)
    assert [one["reward"] for one in found] == [None] * 4
    assert all("the spec masks max_turns" in one["error"] for one in found)


class Scripted(ChatModel):
    """The scripted policy of the integration tests."""

    def _answer(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return message_of(messages)


async def test_common_spec_gives_the_same_scores_and_calls_each_turn_once(tmp_path: Path) -> None:
    write_doors(tmp_path)
    model = Scripted()
    found = await stepped_of("alone.yaml", tmp_path, model)
    require_scores_as_everywhere(((one["key"], one["reward"]) for one in found), members=1)
    assert len(model.asked) == 3 * len(found)  # agent-lightning trains on every answer that its proxy has captured
    (refused,) = await stepped_of("doors.yaml", tmp_path, model)
    assert "rewards.judged.args.fallback, rewards.longest compares the members of a group" in refused["refused"]
