"""Faults of atroposlib 0.4.0, each kept away from those who use an environment of ours.

Shown elsewhere:

- an existing output is renamed →
  tests/env/test_handwritten.py::test_process_writes_the_requested_groups_and_resumes
- a rollout that raises once kills its group →
  tests/env/test_handwritten.py::test_an_overridden_collect_trajectory_is_called_and_retried
- a bare server configuration means localhost and the key "x" →
  tests/env/test_handwritten.py::test_a_bare_server_baseline_stands_for_the_ports_that_atropos_means
- keys are printed and written →
  tests/env/test_program.py::test_an_environment_by_hand_processes_and_prints_no_key
  tests/env/test_program.py::test_evaluate_by_hand_writes_no_key_either
  tests/env/test_serve.py::test_twenty_steps_of_full_groups_with_two_evaluations
- `--x -1` is True, lists cannot be given →
  tests/env/test_program.py::test_minus_one_lists_and_mappings_are_values
- typos are ignored, an empty file crashes →
  tests/env/test_program.py::test_wrong_flags_end_with_2_and_no_traceback
  tests/env/test_program.py::test_a_config_file_gives_way_to_flags_and_knows_its_keys
- `testing=True` is unusable →
  tests/env/test_handwritten.py::test_testing_mode_is_refused_with_a_hint
- health checks are billed →
  tests/env/test_handwritten.py::test_no_health_check_is_billed_and_the_key_is_sent
- a group that is cancelled leaks →
  tests/env/test_handwritten.py::test_a_cancelled_group_leaves_no_sandbox
- a group of the wrong size, without tokens, not finite, too long or with a message without content is sent →
  tests/trainers/test_checks.py
- a group that the API refuses is lost without a word, groups of one are not counted →
  tests/trainers/test_atropos.py
- the cause of a failing call is hidden →
  tests/servers/test_retry.py::test_failure_lists_the_cause_of_every_attempt
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from atroposlib.envs.base import EvalHandlingEnum
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from hermes_rl import HermesAgentEnvConfig, SpecEnv, compile_spec, load_spec
from hermes_rl.env.custom_collection import row_of
from hermes_rl.env.serve import EnvHooks, serve_environment
from hermes_rl.env.spec_env import env_config
from hermes_rl.errors import RunError, ServerFailure
from hermes_rl.rollouts.rollout import Group, Rollout, RolloutKey
from hermes_rl.spec.overrides import parse_extra_args
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from hermes_rl.trainers.base import Registered
from tests.env.canned import NOBODY, Api, Canned, group, item, listening, make
from tests.env.tracker import dropped, logged, tracked
from tests.runs.offline_wandb import history
from tests.trainers.collects import Collects

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with listening() as started:
        yield started


def spec_env(*sets: str) -> SpecEnv:
    spec = load_spec("terminal-files", overrides=parse_extra_args([], sets), mode="serve")
    cls = compile_spec(spec)
    return cls(*cls.config_init())


# ---------------------------------------------------------------------- process


async def test_process_runs_several_groups_concurrently(tmp_path: Path) -> None:
    """process_manager awaits one group after another."""

    class Slow(Canned):
        running = most = 0

        async def collect_trajectory(self, number: Any) -> tuple[dict[str, Any] | None, list[Any]]:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.2)
            self.running -= 1
            return item(), []

    env = make(Slow, total_steps=6, data_path_to_save_groups=str(tmp_path / "groups.jsonl"), max_num_workers=3)
    await env.process_manager()
    assert env.most == 3 * 2


async def test_a_group_that_fails_ends_no_other(tmp_path: Path) -> None:
    """process_manager dies on the first exception."""

    class Sometimes(Canned):
        async def collect_trajectories(self, number: Any) -> tuple[dict[str, Any] | None, list[Any]]:
            if number % 2:
                raise RuntimeError("broken")
            return group(0.0, 1.0), []

    path = tmp_path / "groups.jsonl"
    env = make(Sometimes, total_steps=4, data_path_to_save_groups=str(path))
    await env.process_manager()
    assert len(path.read_text().splitlines()) == 4


async def test_where_every_group_fails_process_ends_with_a_message(tmp_path: Path) -> None:
    """process_manager tries for ever where groups are None."""
    env = make(play=lambda number: None, total_steps=1, data_path_to_save_groups=str(tmp_path / "groups.jsonl"))
    with pytest.raises(RunError, match="groups failed"):
        await env.process_manager()


async def test_process_writes_no_html_report_of_model_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """process_manager writes an .html beside the groups in which a model's <script> runs."""
    monkeypatch.chdir(tmp_path)
    said = [{"role": "assistant", "content": "<script>alert(1)</script>"}]
    env = make(play=lambda number: item(messages=said), total_steps=1, data_path_to_save_groups="groups.jsonl")
    await env.process_manager()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["groups.jsonl"]


# ---------------------------------------------------------------------- collect_trajectories


async def test_log_probabilities_and_distillation_fields_are_retained() -> None:
    """The default collect_trajectories drops both."""
    more = {"inference_logprobs": [1.0, -0.1, -0.2], "distill_token_ids": [[1]] * 3, "distill_logprobs": [[0.0]] * 3}
    collected, _ = await make(play=lambda number: item(**more)).collect_trajectories(1)
    assert collected is not None
    assert {name: collected[name] for name in more} == {name: [value] * 2 for name, value in more.items()}


async def test_an_optional_list_is_as_long_as_the_group_or_not_there() -> None:
    """The default collect_trajectories makes a shorter list where some rollout has no entry."""
    calls = iter(range(2))
    env = make(play=lambda number: item(ref_logprobs=[0.0] * 3) if next(calls) else item())
    collected, _ = await env.collect_trajectories(1)
    assert collected is not None
    assert (collected["ref_logprobs"], collected["inference_logprobs"]) == (None, [])
    assert collected["tokens"] == [[1, 2, 3]] * 2


@pytest.mark.parametrize("score", [math.nan, math.inf, None, "boom"])
async def test_a_rollout_that_never_works_drops_its_group_and_raises_nothing(score: Any) -> None:
    """One raising or None rollout kills the whole group, and with it the process."""

    def play(number: int) -> Any:
        if score == "boom":
            raise RuntimeError("boom")
        return None if score is None else item(score)

    assert await make(play=play).collect_trajectories(1) == (None, [])


# ---------------------------------------------------------------------- what is sent


async def served(env: Canned, *, steps: int = 1) -> list[tuple[Group, list[dict[str, Any]]]]:
    """What a trainer of so many steps, one group each, gets of an environment."""
    trainer = Collects(steps)
    await env.setup()
    await serve_environment(env, trainer)
    await env.shut_down()
    return trainer.groups


async def test_an_environment_without_a_name_registers_under_its_class() -> None:
    """serve with wandb_name unset gets a 422 and crashes."""

    class Nameless(Canned):
        name = None

    env, trainer = make(Nameless, ensure_scores_are_not_same=False), Collects(1)
    await env.setup()
    await serve_environment(env, trainer)
    assert trainer.registration is not None
    assert trainer.registration.name == "Nameless"
    await env.shut_down()


# ---------------------------------------------------------------------- the constructor


def test_the_constructor_needs_no_network_and_opens_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BaseEnv loads a tokenizer from the hub, opens the output, and renames an existing one."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"the network was asked for: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "groups.jsonl").write_text("kept\n")
    env = make(data_path_to_save_groups="groups.jsonl")
    assert env.tokenizer.decode(env.tokenizer.encode("hello")) == "hello"
    assert env.config.data_path_to_save_groups == "groups.jsonl"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept\n"]


def test_a_configuration_is_not_shared_with_the_environments_made_of_it() -> None:
    """BaseEnv writes a name of its own into the configuration that it was given; so may two environments of one."""
    config = HermesAgentEnvConfig(tokenizer_name=str(small_tokenizer_path()))
    names = []
    for name in ("one", "two"):
        cls = type("Named", (Canned,), {"name": name})
        names.append(cls(config, [APIServerConfig(base_url=NOBODY, model_name="m")]).config.wandb_name)
    assert names == ["one", "two"]


def test_evaluations_limit_training_and_cancel_nothing() -> None:
    """eval_handling is STOP_TRAIN and worker_timeout 600 s: both cancel groups in flight."""
    for config in (HermesAgentEnvConfig(), env_config(load_spec("terminal-files"))):
        assert config.eval_handling is EvalHandlingEnum.LIMIT_TRAIN
        assert config.worker_timeout == -1


# ---------------------------------------------------------------------- servers


async def test_one_completion_is_one_request_and_its_failure_keeps_the_cause() -> None:
    """n=1 sends two requests where n_kwarg_is_ignored; a failing call is tried 9 times and becomes a RetryError."""
    from tests.servers.loopback_server import Loopback, error

    server = await Loopback().start()
    servers = [APIServerConfig(base_url=server.url, model_name="m", n_kwarg_is_ignored=True)]
    env = Canned(HermesAgentEnvConfig(tokenizer_name=str(small_tokenizer_path())), servers)
    messages = [{"role": "user", "content": "hi"}]
    assert len((await env.server.chat_completion(messages=messages, n=1)).choices) == 1
    assert len(server.seen) == 1
    server.answers = [error(400, "the model is not loaded")]
    with pytest.raises(ServerFailure, match=r"400.*the model is not loaded"):
        await env.server.chat_completion(messages=messages, n=1)
    assert len(server.seen) == 2
    await env.shut_down()
    await server.stop()


def test_invented_tokens_are_never_switched_on() -> None:
    """With ATROPOS_ALLOW_DUMMY_MANAGED_SERVER atroposlib trains on 128 tokens that nobody sampled."""
    assert "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER" not in os.environ
    for path in (ROOT / "hermes_rl").rglob("*.py"):
        assert "DUMMY_MANAGED" not in path.read_text(encoding="utf-8"), path


async def test_dummy_managed_server_is_unavailable_when_enabled_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, where the variable is in the environment already."""
    monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "1")
    env = make()
    with pytest.raises(NotImplementedError, match="does not report which tokens it sampled"):
        async with env.server.managed_server(tokenizer=env.tokenizer):
            pass


# ---------------------------------------------------------------------- evaluations and checkpoints


async def test_evaluations_of_an_environment_by_hand_have_a_folder_per_step(tmp_path: Path) -> None:
    """evaluate_log overwrites metrics.json and samples.jsonl each time."""
    env = make(data_dir_to_save_evals=str(tmp_path))
    env.env_id = 0  # a trainer is served
    for env.curr_step in (10, 20):
        await env.evaluate()
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {f"step-{step}/{name}" for step in (10, 20) for name in ("metrics.json", "samples.jsonl")}
    assert env.config.data_dir_to_save_evals == str(tmp_path)


# ---------------------------------------------------------------------- wandb


def test_wandb_is_off_unless_asked_for() -> None:
    """use_wandb is on by default."""
    assert HermesAgentEnvConfig().use_wandb is False
    assert env_config(load_spec("terminal-files")).use_wandb is False


async def test_evaluate_and_process_do_not_switch_wandb_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both force it, and evaluate never begins a run, so that wandb_log raises."""
    monkeypatch.chdir(tmp_path)
    env = make(data_dir_to_save_evals="evals", data_path_to_save_groups="groups.jsonl", total_steps=1)
    await env._run_evaluate()
    await env.process_manager()
    await env.wandb_log({"mine": 1})
    assert env.config.use_wandb is False
    assert not (tmp_path / "wandb").exists()


class Offline(Canned):
    _wandb_mode = "offline"

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        await self.wandb_log({"eval/mean_reward": 0.5})


@pytest.mark.slow
async def test_process_and_evaluate_log_where_wandb_was_asked_for(tmp_path: Path) -> None:
    """process hands wandb no project; evaluate calls wandb.log without wandb.init."""
    folders = [tmp_path / mode for mode in ("process", "evaluate")]
    for folder in folders:
        folder.mkdir()
        env = make(Offline, use_wandb=True, total_steps=2, data_path_to_save_groups=str(folder / "groups.jsonl"))
        env.play = lambda number: item(float(number), messages=[{"role": "user", "content": "hi"}])
        env._wandb_folder = folder
        await (env.process_manager() if folder.name == "process" else env._run_evaluate())
    steps = history(folders[0])
    assert len(steps) == 2
    assert all("train/rollouts" in step for step in steps)
    assert [step["eval/mean_reward"] for step in history(folders[1])] == [0.5]


@pytest.mark.slow
async def test_serve_logs_offline_to_the_trainer_project_per_environment(tmp_path: Path) -> None:
    """BaseEnv logs into whichever run the process began first."""
    envs = [make(Offline, use_wandb=True, min_items_sent_before_logging=0) for _ in range(2)]
    answers = [Registered(project="the-trainers", run_group="together", run_name=f"canned_{n}") for n in range(2)]
    for number, env in enumerate(envs):
        env._wandb_folder = tmp_path / str(number)
        env._wandb_folder.mkdir()
        await EnvHooks(env).registered(answers[number], 3)
        assert (env.wandb_project, env.wandb_group) == ("the-trainers", "together")
    messages = [[{"role": "user", "content": "hi"}]] * 2
    for number, env in enumerate(envs):
        sent = Group("one", row_of(number), [], parts=[group(0.0, 1.0, messages=messages)])
        await EnvHooks(env).sending(sent, sent.parts or [])
        await env.wandb_log({"train/mine": number})
    for env in envs:
        await env.shut_down()
    for number in range(2):
        (step,) = history(tmp_path / str(number))
        assert step[f"canned_{number}_train/mine"] == number
        assert f"canned_{number}_train/rollouts" in step
        assert f"canned_{number}_train/completion_lengths" in step


async def test_an_evaluation_after_the_last_step_is_logged(tmp_path: Path) -> None:
    """What an evaluation found waits for a step that never comes."""
    env = make(Offline, use_wandb=True)
    env._wandb_folder = tmp_path
    env._begin_tracking()
    env._pending_metrics = {"eval/mean_reward": 0.25}
    await env.shut_down()
    assert history(tmp_path) == [{"eval/mean_reward": 0.25}]


async def test_constant_rewards_give_finite_metrics() -> None:
    """Statistics of constant rewards become complex or NaN."""

    env = make(ensure_scores_are_not_same=False)
    for number in range(3):
        keys = [RolloutKey(row_of(number), str(number), index, 2) for index in range(2)]
        rollouts = [Rollout(key, 0, StopReason.FINISHED, score=1.0) for key in keys]
        sent = Group(str(number), row_of(number), rollouts, parts=[group(1.0, 1.0)])
        await EnvHooks(env).sending(sent, sent.parts or [])
        env.task_duration.append(0.1)
    numbers = {name: value for name, value in (await logged(env)).items() if name != "train/rollouts"}
    assert numbers["train/mean_reward"] == 1.0
    assert numbers["train/completion_lengths_std"] == 0.0
    assert all(math.isfinite(value) for value in numbers.values())


@pytest.mark.parametrize(("excluded", "sent"), [(True, [0.0, 1.0]), (False, [1.0, 1.0])])
async def test_uniform_groups_are_excluded_only_when_configured(excluded: bool, sent: list[float]) -> None:
    """A group of equal scores is dropped with a line in a debug log."""
    scores = iter([1.0, 1.0, 0.0, 1.0, *[0.5, 0.25] * 100])
    env = make(play=lambda number: item(next(scores)), ensure_scores_are_not_same=excluded, max_num_workers=1)
    tracker = tracked(env)
    ((_, lines), *_) = await served(env)
    assert lines[0]["scores"] == sent
    assert tracker.dropped + await dropped(env) == ({"uniform": 1} if excluded else {})
