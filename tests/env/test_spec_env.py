"""`compile_spec`: a spec as a true Atropos environment."""

from __future__ import annotations

import asyncio

from atroposlib.envs.base import BaseEnv

from hermes_rl import HermesAgentBaseEnv, HermesAgentEnvConfig, SpecEnv, compile_spec, load_spec
from hermes_rl.env.spec_env import env_config
from hermes_rl.spec.overrides import parse_extra_args
from tests.env.tracker import logged


def make(*sets: str) -> SpecEnv:
    spec = load_spec("terminal-files", overrides=parse_extra_args([], sets), mode="serve")
    cls = compile_spec(spec)
    return cls(*cls.config_init())


def test_it_is_a_subclass_of_both_base_classes() -> None:
    cls = compile_spec(load_spec("terminal-files"))
    assert issubclass(cls, HermesAgentBaseEnv)
    assert issubclass(cls, BaseEnv)
    assert cls.name == "terminal-files"


async def test_groups_contain_sequences_stop_reasons_and_reward_parts() -> None:
    env = make()
    env.max_num_workers = 1  # groups at a time
    await env.setup()
    async for group in env.groups():
        assert len(group.rollouts) == 4
        assert not group.uniform
        for rollout in group.rollouts:
            assert rollout.stop_reason == "finished"
            assert set(rollout.rewards) == {"file_matches", "concise"}
            assert rollout.sequence is not None
            assert rollout.sequence.trained
        break
    await env.shut_down()


async def test_selected_rows_each_run_once() -> None:
    env = make()
    await env.setup()
    row = await env.get_next_item()
    found = [group async for group in env.groups([row, row])]
    assert [group.row.key for group in found] == [row.key] * 2
    assert len({group.id for group in found}) == 2
    await env.shut_down()


def test_atropos_timeouts_are_disabled_in_favour_of_the_spec() -> None:
    config = env_config(load_spec("terminal-files"))
    assert config.worker_timeout == -1
    assert config.eval_handling.value == "LIMIT_TRAIN"
    assert config.use_wandb is False
    assert config.wandb_name == "terminal-files"


def test_atropos_fields_without_a_spec_key_are_set_by_env_flags() -> None:
    spec = load_spec("terminal-files", overrides=parse_extra_args(["--env.inference_weight", "2.0"], ()), mode="serve")
    assert env_config(spec).inference_weight == 2.0


async def test_two_specs_in_one_process_do_not_meet() -> None:
    one, two = make("serve.group_size=2", "seed=1"), make("serve.group_size=3", "seed=2")
    await asyncio.gather(one.setup(), two.setup())
    items = await asyncio.gather(one.get_next_item(), two.get_next_item())
    groups = await asyncio.gather(one.collect_trajectories(items[0]), two.collect_trajectories(items[1]))
    assert [len(group["scores"]) for group, _ in groups] == [2, 3]
    await asyncio.gather(one.shut_down(), two.shut_down())


def test_the_config_of_a_spec_is_of_the_reference_class() -> None:
    assert isinstance(env_config(load_spec("terminal-files")), HermesAgentEnvConfig)


async def test_evaluation_keeps_its_numbers_to_itself() -> None:
    env = make()
    await env.setup()
    await env.evaluate()
    metrics = await logged(env)
    assert "train/mean_reward" not in metrics
    assert metrics["eval/mean_reward"] > 0
    await env.shut_down()
