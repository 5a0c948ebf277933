"""`compile_spec`: a spec as a true Atropos environment."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from atroposlib.envs.base import BaseEnv

from hermes_rl import HermesAgentBaseEnv, HermesAgentEnvConfig, SpecEnv, compile_spec, load_spec
from hermes_rl.env.settings import env_config
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.progress import Progress
from hermes_rl.spec.overrides import parse_extra_args


def make(*sets: str) -> SpecEnv:
    spec = load_spec("terminal-files", overrides=parse_extra_args([], sets), mode="serve")
    cls = compile_spec(spec)
    return cls(*cls.config_init())


def test_it_is_a_subclass_of_both_base_classes() -> None:
    cls = compile_spec(load_spec("terminal-files"))
    assert issubclass(cls, HermesAgentBaseEnv)
    assert issubclass(cls, BaseEnv)
    assert cls.name == "terminal-files"


async def test_groups_have_sequences_endings_and_reward_parts() -> None:
    env = make()
    await env.setup()
    async for group in env.groups():
        assert len(group.rollouts) == 4
        assert not group.uniform
        for rollout in group.rollouts:
            assert rollout.ending == "finished"
            assert set(rollout.rewards) == {"file_matches", "concise"}
            assert rollout.sequence is not None
            assert rollout.sequence.trained
        break
    await env.shut_down()


async def test_chosen_rows_are_played_once() -> None:
    env = make()
    await env.setup()
    row = await env.get_next_item()
    found = [group async for group in env.groups([row, row])]
    assert [group.row.key for group in found] == [row.key] * 2
    assert len({group.id for group in found}) == 2
    await env.shut_down()


async def test_evaluation_keeps_its_numbers_to_itself(tmp_path: Path) -> None:
    env = make()
    await env.setup()
    with RunDirectory(tmp_path) as directory:
        env._record_to(directory, Progress(quiet=True))
        env.curr_step = 7
        await env.evaluate()
    assert env._training_counts.scores == []
    assert env._pending_metrics["eval/mean_reward"] > 0
    metrics = json.loads((tmp_path / "eval" / "step-7" / "metrics.json").read_text())
    assert metrics["results"]["all"] == env._pending_metrics
    await env.shut_down()


async def test_a_worker_that_atropos_cancels_leaves_no_sandbox() -> None:
    from hermes_rl.tools.machine import _live

    env = make("sandbox.setup=['sleep 5']")
    await env.setup()
    item = await env.get_next_item()
    worker = asyncio.create_task(env.handle_env("uuid"))
    env.running_items["uuid"] = {"item": item, "worker": worker, "start_time": 0.0}
    while len(_live) < 4:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)
    assert _live == {}
    await env.shut_down()


def test_atropos_is_kept_from_cutting_off_what_the_spec_allows() -> None:
    config = env_config(load_spec("terminal-files"))
    assert config.worker_timeout == -1
    assert config.eval_handling.value == "LIMIT_TRAIN"
    assert config.use_wandb is False
    assert config.wandb_name == "terminal-files"


def test_fields_without_a_key_of_their_own_come_from_env() -> None:
    spec = load_spec("terminal-files", overrides=parse_extra_args(["--env.inference_weight", "2.0"], ()), mode="serve")
    assert env_config(spec).inference_weight == 2.0


async def test_a_checkpoint_keeps_the_place_in_the_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: dict[str, Any] = {}
    monkeypatch.setattr(BaseEnv, "save_checkpoint", lambda self, step, data=None: saved.update(data or {}))
    env = make()
    await env.setup()
    rows = [(await env.get_next_item()).key for _ in range(2)]
    env.save_checkpoint(10)
    again = make()
    again._position = saved["_position"]
    await again.setup()
    assert (await again.get_next_item()).key not in rows
    await asyncio.gather(env.shut_down(), again.shut_down())


async def test_two_specs_in_one_process_do_not_meet() -> None:
    one, two = make("serve.group_size=2", "seed=1"), make("serve.group_size=3", "seed=2")
    await asyncio.gather(one.setup(), two.setup())
    items = await asyncio.gather(one.get_next_item(), two.get_next_item())
    groups = await asyncio.gather(one.collect_trajectories(items[0]), two.collect_trajectories(items[1]))
    assert [len(group["scores"]) for group, _ in groups] == [2, 3]
    await asyncio.gather(one.shut_down(), two.shut_down())


def test_the_config_of_a_spec_is_of_the_reference_class() -> None:
    assert isinstance(env_config(load_spec("terminal-files")), HermesAgentEnvConfig)
