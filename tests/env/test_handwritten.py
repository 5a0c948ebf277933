"""An environment written by hand plays, scores, evaluates and logs as its author expects."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ServerBaseline

from hermes_rl import HermesAgentEnvConfig, HermesAgentLoop, ToolContext
from hermes_rl.errors import UserError
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from hermes_rl.tools.base import ToolRuntime
from tests.env.greetings import Greetings
from tests.env.tracker import dropped, logged, tracked
from tests.env.writer_model import WriterModel, writer_model
from tests.waiting import until

model = pytest.fixture(writer_model)


def make(model: WriterModel, cls: type[Greetings] = Greetings, **fields: Any) -> Greetings:
    config = HermesAgentEnvConfig(group_size=2, tokenizer_name=str(small_tokenizer_path()), **fields)
    return cls(config, [APIServerConfig(base_url=model.url, model_name="writer", api_key="key-1")])


async def test_it_is_an_atropos_environment(model: WriterModel) -> None:
    assert isinstance(make(model), BaseEnv)


async def test_group_runs_in_sandboxes_and_is_scored_by_compute_reward(model: WriterModel) -> None:
    env = make(model)
    await env.setup()
    group, backlog = await env.collect_trajectories(await env.get_next_item())
    assert group is not None
    assert group["scores"] == [1.0, 1.0]
    assert backlog == []
    assert [len(tokens) for tokens in group["tokens"]] == [len(mask) for mask in group["masks"]]
    assert all("content" in message for conversation in group["messages"] for message in conversation)
    await env.shut_down()


async def test_blocking_reward_does_not_block_the_event_loop(model: WriterModel) -> None:
    rewarding, turned = threading.Event(), threading.Event()

    class Slow(Greetings):
        def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:  # type: ignore[override]
            rewarding.set()
            ctx.terminal("true")
            return float(turned.wait(60))

    async def turn() -> None:
        await until(rewarding.is_set)
        for _ in range(25):
            await asyncio.sleep(0.01)
        turned.set()

    env = make(model, Slow)
    await env.setup()
    turning = asyncio.create_task(turn())
    group, _ = await env.collect_trajectories({"who": "Ann"})
    await turning
    assert group is not None
    assert group["scores"] == [1.0, 1.0]
    await env.shut_down()


async def test_a_reward_that_raises_scores_nothing_and_drops_the_group(model: WriterModel) -> None:
    class Broken(Greetings):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            raise RuntimeError("the checker is broken")

    env = make(model, Broken)
    await env.setup()
    group, _ = await env.collect_trajectories({"who": "Ann"})
    assert group is None
    tracker = tracked(env)
    await env.wandb_log()
    assert "train/mean_reward" not in tracker.steps[-1]
    assert tracker.dropped == {"reward_failure": 1}
    await env.shut_down()


async def test_credit_for_other_turns_than_there_were_is_a_failure_of_the_reward(
    model: WriterModel, caplog: pytest.LogCaptureFixture
) -> None:
    class Credits(Greetings):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> list[float]:  # type: ignore[override]
            return [1.0] * (result.turns_used + 1)

    env = make(model, Credits)
    await env.setup()
    assert await env.collect_trajectories({"who": "Ann"}) == (None, [])
    assert await dropped(env) == {"reward_failure": 1}
    assert "reward 'reward' returned 3 values for 2 turns" in caplog.text
    await env.shut_down()


async def test_its_own_evaluate_uses_the_loop_and_a_tool_context(model: WriterModel, tmp_path: Path) -> None:
    env = make(model, data_dir_to_save_evals=str(tmp_path))
    await env._run_evaluate()
    assert env.scores == [1.0, 1.0]
    assert json.loads((tmp_path / "metrics.json").read_text())["results"]["all"] == {"eval/mean_reward": 1.0}
    assert "train/mean_reward" not in await logged(env), "an evaluation does not count as training"


class Looks(Greetings):
    """Evaluates by hand; `said` is what the model's command printed, with a task of its own and without."""

    said: list[str]

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        schemas, names = self._resolve_tools_for_group()
        self.said = []
        for task_id in ("evaluation", None):
            loop = HermesAgentLoop(self.server, schemas, names, task_id=task_id)
            result = await loop.run([{"role": "user", "content": "Look"}])
            self.said.append(str(result.messages[-2]["content"]))
        await asyncio.to_thread(ToolContext("evaluation").cleanup)


async def test_custom_evaluate_uses_the_configured_backend(model: WriterModel, tmp_path: Path) -> None:
    (tmp_path / "only-on-this-machine").touch()
    model.command = f"ls {tmp_path}"
    for backend, seen in (("none", True), ("local", False)):
        env = make(model, Looks, terminal_backend=backend)
        await env._run_evaluate()
        assert ["only-on-this-machine" in said for said in env.said] == [seen, seen]


async def test_its_own_evaluate_has_the_configured_timeout(model: WriterModel) -> None:
    model.command = "sleep 30"
    env = make(model, Looks, terminal_timeout=0.5)
    await env._run_evaluate()
    assert ["timed out after 0.5 seconds" in said for said in env.said] == [True, True]


async def test_custom_wandb_log_adds_to_the_default_metrics(model: WriterModel) -> None:
    env = make(model)
    await env.setup()
    await env.collect_trajectories({"who": "Ann"})
    metrics = await logged(env, {"mine": 1})
    assert (metrics["train/mean_reward"], metrics["mine"]) == (1.0, 1)
    assert env.logged[-1]["mine"] == 1
    await env.shut_down()


async def test_process_writes_the_requested_groups_and_resumes(model: WriterModel, tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    for total in (2, 3):
        env = make(model, total_steps=total, data_path_to_save_groups=str(path))
        await env.process_manager()
        assert len(path.read_text().splitlines()) == total
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line["scores"] == [1.0, 1.0] for line in lines)


async def test_process_resumes_with_items_that_have_no_group(
    model: WriterModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Numbered(Greetings):
        async def setup(self) -> None:
            await super().setup()
            self.items = [{"who": f"N{number}"} for number in range(6)]
            self.handed_out = -1

    path = tmp_path / "groups.jsonl"
    for total in (2, 4, 4):
        env = make(model, Numbered, total_steps=total, data_path_to_save_groups=str(path))
        await env.process_manager()
        assert f"{total} of {total} groups are in {path}" in capsys.readouterr().err
    played = [json.loads(line)["messages"][0][0]["content"].split()[2] for line in path.read_text().splitlines()]
    assert sorted(played) == ["N0", "N1", "N2", "N3"]


async def test_process_counts_groups_however_many_layers_each_has(model: WriterModel, tmp_path: Path) -> None:
    class Layered(Greetings):
        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            one = {"tokens": [[1], [2]], "masks": [[1], [2]], "scores": [0.0, 1.0]}
            return [{**one, "layer": number} for number in range(3)], []

    path = tmp_path / "groups.jsonl"
    for total in (6, 8):
        env = make(model, Layered, total_steps=total, data_path_to_save_groups=str(path))
        await env.process_manager()
        assert [json.loads(line)["layer"] for line in path.read_text().splitlines()] == [0, 1, 2] * total


async def test_groups_come_without_a_trajectory_api(model: WriterModel) -> None:
    env = make(model)
    await env.setup()
    found = [group async for group in env.groups([{"who": "Ann"}, {"who": "Bo"}])]
    assert [group.scores for group in found] == [[1.0, 1.0]] * 2
    assert all(rollout.sequence is not None for group in found for rollout in group.rollouts)
    await env.shut_down()


async def test_an_overridden_collect_trajectory_is_called_and_retried(model: WriterModel) -> None:
    class ByHand(Greetings):
        calls = 0

        async def collect_trajectory(self, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
            type(self).calls += 1
            if self.calls == 1:
                raise RuntimeError("flaky")
            scored = {"tokens": [1, 2], "masks": [-100, 2], "scores": 0.5, "inference_logprobs": [1.0, -0.1]}
            return scored, [f"later-{self.calls}"]

    env = make(model, ByHand)
    await env.setup()
    group, backlog = await env.collect_trajectories({"who": "Ann"})
    assert group is not None
    assert group["scores"] == [0.5, 0.5]
    assert group["inference_logprobs"] == [[1.0, -0.1]] * 2
    assert len(backlog) == 2
    assert ByHand.calls == 3
    await env.shut_down()


async def test_delegating_collect_trajectory_gives_the_same_group(model: WriterModel) -> None:
    class Credited(Greetings):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> list[float]:
            return [1.0 + random.random(), *(0.0 for _ in result.texts[1:])]

    class ByHand(Credited):
        async def collect_trajectory(self, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
            return await super().collect_trajectory(item)

    shapes = []
    for cls in (Credited, ByHand):
        env = make(model, cls)
        await env.setup()
        group, _ = await env.collect_trajectories({"who": "Ann"})
        assert group is not None
        assert group["advantages"] is not None
        shapes.append({name: _shape(value) for name, value in group.items() if value})
        await env.shut_down()
    for name in ("tokens", "masks", "scores", "inference_logprobs", "advantages", "messages"):
        assert shapes[0].get(name) == shapes[1].get(name), name


def _shape(value: Any) -> Any:
    return [_shape(one) for one in value] if isinstance(value, list) else type(value).__name__


async def test_a_call_of_chat_completion_works_as_people_call_it(model: WriterModel) -> None:
    env = make(model)
    messages = [{"role": "user", "content": "Write hello Ann"}]
    completion = await env.server.chat_completion(messages=messages, n=2, max_tokens=5, temperature=0.5)
    assert len(completion.choices) == 2
    assert completion.choices[0].message.tool_calls[0].function.name == "terminal"
    assert model.bodies[0]["temperature"] == 0.5
    await env.shut_down()


async def test_no_health_check_is_billed_and_the_key_is_sent(model: WriterModel) -> None:
    env = make(model)
    await env.setup()
    await env.collect_trajectories({"who": "Ann"})
    assert set(model.paths) == {"/v1/chat/completions"}
    assert len(model.paths) == 4
    assert model.keys == {"Bearer key-1"}
    await env.shut_down()


async def test_two_environments_with_other_settings_run_in_one_process(model: WriterModel) -> None:
    before = dict(os.environ)
    one = make(model, agent_temperature=0.1, enabled_toolsets=["terminal"])
    two = make(model, agent_temperature=0.9, enabled_toolsets=["terminal", "file"])
    await asyncio.gather(one.setup(), two.setup())
    await asyncio.gather(one.collect_trajectories({"who": "Ann"}), two.collect_trajectories({"who": "Bo"}))
    by_temperature = {body["temperature"]: {t["function"]["name"] for t in body["tools"]} for body in model.bodies}
    assert "write_file" not in by_temperature[0.1]
    assert "write_file" in by_temperature[0.9]
    assert dict(os.environ) == before
    await asyncio.gather(one.shut_down(), two.shut_down())


async def test_groups_in_flight_keep_their_own_tools(model: WriterModel) -> None:
    model.delay = 0.05
    env = make(model, distribution={"terminal": 1.0, "file": 0.5})
    await env.setup()
    await asyncio.gather(*(env.collect_trajectories({"who": f"N{n}"}) for n in range(8)))
    by_conversation: dict[str, set[frozenset[str]]] = {}
    for body in model.bodies:
        names = frozenset(tool["function"]["name"] for tool in body["tools"])
        by_conversation.setdefault(body["messages"][0]["content"], set()).add(names)
    assert all(len(kinds) == 1 for kinds in by_conversation.values())
    assert len({names for kinds in by_conversation.values() for names in kinds}) == 2
    await env.shut_down()


async def test_a_cancelled_group_leaves_no_sandbox(model: WriterModel, runtimes: list[ToolRuntime]) -> None:
    model.delay = 5.0
    env = make(model)
    await env.setup()
    task = asyncio.create_task(env.collect_trajectories({"who": "Ann"}))
    await until(lambda: len(runtimes) >= 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for runtime in runtimes:
        with pytest.raises(UserError, match="was released already"):
            await runtime.sandbox()
    await env.shut_down()


def test_a_bare_server_baseline_stands_for_the_ports_that_atropos_means() -> None:
    config = HermesAgentEnvConfig(tokenizer_name=str(small_tokenizer_path()))
    env = Greetings(config, ServerBaseline(model_name="m"))
    urls = [server.config.base_url for server in env.server.servers]
    assert urls == [f"http://localhost:{port}/v1" for port in range(9004, 9008)]
    assert [config.api_key for config in env.server.role.configs] == [None] * 4


def test_testing_mode_is_refused_with_a_hint() -> None:
    config = HermesAgentEnvConfig(tokenizer_name=str(small_tokenizer_path()))
    with pytest.raises(UserError, match="scripted policy"):
        Greetings(config, [APIServerConfig()], testing=True)
