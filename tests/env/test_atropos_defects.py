"""Faults of atroposlib 0.4.0, each kept away from those who use an environment of ours.

Shown elsewhere:

- an existing output is renamed →
  tests/env/test_handwritten.py::test_process_writes_the_groups_asked_for_and_goes_on
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
  tests/env/test_handwritten.py::test_testing_and_slurm_are_refused_with_the_way_out
- health checks are billed →
  tests/env/test_handwritten.py::test_no_health_check_is_billed_and_the_key_is_sent
- a group that is cancelled leaks →
  tests/env/test_spec_env.py::test_a_worker_that_atropos_cancels_leaves_no_sandbox
- an item that was cancelled meanwhile is a TypeError →
  tests/env/test_handwritten.py::test_an_item_that_was_cancelled_meanwhile_is_left_alone
- the cause of a failing call is hidden →
  tests/servers/test_retry.py::test_every_cause_is_kept
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from atroposlib.envs.base import EvalHandlingEnum
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from tenacity import RetryError

from hermes_rl import HermesAgentEnvConfig, SpecEnv, compile_spec, load_spec
from hermes_rl.env.settings import env_config
from hermes_rl.errors import NotYetAvailable, RunError, ServerFailure
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.progress import Progress
from hermes_rl.spec.overrides import parse_extra_args
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.env.canned import NOBODY, Api, Canned, group, item, listening, make
from tests.env.trainer import trajectory_api
from tests.runs.offline_wandb import history

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


async def test_process_plays_several_groups_at_a_time(tmp_path: Path) -> None:
    """process_manager awaits one group after another."""

    class Slow(Canned):
        running = most = 0

        async def collect_trajectory(self, number: Any) -> tuple[dict[str, Any] | None, list[Any]]:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.02)
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
    with pytest.raises(RunError, match="could not be played"):
        await env.process_manager()


async def test_no_report_with_what_a_model_wrote_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """process_manager writes an .html beside the groups in which a model's <script> runs."""
    monkeypatch.chdir(tmp_path)
    said = [{"role": "assistant", "content": "<script>alert(1)</script>"}]
    env = make(play=lambda number: item(messages=said), total_steps=1, data_path_to_save_groups="groups.jsonl")
    await env.process_manager()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["groups.jsonl"]


# ---------------------------------------------------------------------- collect_trajectories


async def test_log_probabilities_and_distillation_are_kept() -> None:
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


async def send(env: Canned, api: Api, scored: Any) -> None:
    env.config.rollout_server_url = api.url
    await env.handle_send_to_api(scored)


async def test_log_probabilities_are_a_list_also_where_there_are_none(api: Api) -> None:
    """Trainers take the length of inference_logprobs, and BaseEnv sends None."""
    await send(make(), api, group(0.0, 1.0))
    await send(make(), api, group(0.0, 1.0, inference_logprobs=None))
    assert [sent["inference_logprobs"] for sent in api.groups] == [[], []]


@pytest.mark.parametrize("scores", [(1.0,), (0.0, 1.0, 0.5), ()])
async def test_a_group_of_the_wrong_size_never_leaves(
    scores: tuple[float, ...], api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    """The API keeps it in its queue for ever."""
    env = make()
    await send(env, api, group(*scores))
    assert api.posted == []
    assert env._dropped_groups == {"wrong_size": 1}
    assert "instead of 2 members" in caplog.text


async def test_a_part_of_a_list_that_cannot_be_used_does_not_hold_up_the_rest(api: Api) -> None:
    """As above, for environments that give a list of groups."""
    await send(make(), api, [group(1.0), group(0.0, 1.0), None, group(0.5, 1.0)])
    ((path, body),) = api.posted
    assert path == "/scored_data_list"
    assert [sent["scores"] for sent in body] == [[0.0, 1.0], [0.5, 1.0]]


async def test_groups_that_are_sent_are_kept_in_the_file_that_is_there(tmp_path: Path, api: Api) -> None:
    """BaseEnv renames an existing file in the configuration."""
    path = tmp_path / "groups.jsonl"
    for score in (0.25, 0.5):
        env = make(data_path_to_save_groups=str(path))
        env._keep_groups()
        await send(env, api, group(score, 1.0))
        await env.shut_down()
    assert [json.loads(line)["scores"] for line in path.read_text().splitlines()] == [[0.25, 1.0], [0.5, 1.0]]


@pytest.mark.parametrize("score", [math.nan, math.inf])
async def test_a_score_that_is_not_finite_never_leaves(score: float, api: Api) -> None:
    """/batch answers 500, loses the whole batch and counts the step."""
    env = make()
    await send(env, api, group(0.0, score))
    assert api.posted == []
    assert env._dropped_groups == {"not_finite": 1}


async def test_every_message_that_is_sent_has_content(api: Api) -> None:
    """The API answers 422 to a message without the key, and BaseEnv drops the group without a word."""
    call = {"role": "assistant", "tool_calls": []}
    await send(make(include_messages=True), api, group(0.0, 1.0, messages=[[call]] * 2))
    assert [message["content"] for sent in api.groups for line in sent["messages"] for message in line] == [None] * 2


async def test_a_group_that_is_too_long_for_the_trainer_is_counted_and_said(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    """BaseEnv leaves it out with a line that does not say how long it was."""
    env = make()
    env.max_token_len = 3
    await send(env, api, group(0.0, 1.0))
    assert api.posted == []
    assert env._training_metrics()["train/groups_dropped/too_long"] == 1
    assert "a sequence has 3 tokens, and the trainer takes up to 2" in caplog.text
    env.max_token_len = 4
    await send(env, api, group(0.0, 1.0))
    assert len(api.posted) == 1


async def test_a_bound_of_the_spec_holds_beside_the_trainers() -> None:
    """BaseEnv looks at the trainer's alone."""
    env = spec_env("serve.max_token_length=100")
    env.max_token_len = 4096
    await env.handle_send_to_api(group(0.0, 1.0, 1.0, 1.0) | {"tokens": [[1] * 101] * 4})
    assert env._dropped_groups == {"too_long": 1}


async def test_a_group_without_tokens_is_counted_and_said(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    """BaseEnv takes the length of None."""
    env = make()
    await send(env, api, {**group(0.0, 1.0), "tokens": None, "masks": None})
    assert env._dropped_groups == {"no_tokens": 1}
    assert "tokens of its rollouts cannot be known" in caplog.text


async def test_a_refusal_of_the_api_is_said_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    """BaseEnv names the status alone, in a log line, and goes on."""
    env = make(include_messages=True)
    async with trajectory_api() as url:
        env.config.rollout_server_url = url
        await env.handle_send_to_api(group(0.0, 1.0, messages=[[{"content": "a role is missing"}]] * 2))
    assert "422" in caplog.text
    assert "Message must have 'role' and 'content' fields" in caplog.text


# ---------------------------------------------------------------------- groups of one, and the API


async def register(url: str, env: Canned) -> None:
    """A trainer begins, then the environment registers."""
    trainer = {
        "wandb_group": "g", "wandb_project": "p", "batch_size": 8, "max_token_len": 64, "checkpoint_dir": "",
        "save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 5,
    }  # fmt: skip
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        async with session.post(f"{url}/register", json=trainer):
            pass
        async with session.get(f"{url}/batch"):
            pass
    env.config.rollout_server_url = url
    await env.register_env()
    await env.get_server_info()


@pytest.mark.slow
async def test_groups_of_one_are_sent_and_those_of_others_counted() -> None:
    """A group of one is "uniform"; and /status-env leaves out the groups of others where all have one member."""
    one, other = make(group_size=1), make(group_size=1)
    async with trajectory_api() as url:
        await register(url, one)
        other.config.rollout_server_url = url
        await other.register_env()
        for env, count in ((one, 1), (other, 3)):
            for _ in range(count):
                await env.handle_send_to_api(group(1.0))
        await one.get_status()
    assert one.status_dict["queue_size"] == 4
    assert one.status_dict["self_queue_size"] == 1


@pytest.mark.slow
async def test_the_weight_of_an_environment_is_its_share_of_the_groups_in_flight() -> None:
    """BaseEnv tells its own servers' semaphores, which no call here goes through."""

    class Waiting(Canned):
        async def collect_trajectories(self, item: Any) -> tuple[None, list[Any]]:
            await asyncio.sleep(60)
            return None, []

    async with trajectory_api() as url:
        fields: dict[str, Any] = {"max_num_workers": 8, "max_batches_offpolicy": 50}
        envs = [make(Waiting, inference_weight=weight, **fields) for weight in (1.0, 3.0, -1.0)]
        await register(url, envs[0])
        for env in envs[1:]:
            env.config.rollout_server_url = url
            await env.register_env()
            await env.get_server_info()
        for env in envs:
            await env.setup()
            await env.get_status()
            await env.add_train_workers()
        assert [len(env.running_items) for env in envs] == [2, 6, 8], "-1 is outside of what is shared"
        await asyncio.gather(*(env.shut_down() for env in envs))


@pytest.mark.slow
async def test_an_environment_without_a_name_registers_under_its_class() -> None:
    """serve with wandb_name unset gets a 422 and crashes."""

    class Nameless(Canned):
        name = None

    env = make(Nameless)
    async with trajectory_api() as url:
        await register(url, env)
    assert env.wandb_prepend == "Nameless_0"


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


async def test_invented_tokens_are_not_to_be_had_where_a_user_switched_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, where the variable is in the environment already."""
    monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "1")
    env = make()
    async with env.server.managed_server(tokenizer=env.tokenizer) as managed:
        with pytest.raises(RetryError) as raised:
            await managed.chat_completion(messages=[{"role": "user", "content": "hi"}], max_tokens=5)
    assert isinstance(raised.value.last_attempt.exception(), NotYetAvailable)


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


async def test_evaluations_of_a_spec_have_a_folder_per_step(tmp_path: Path) -> None:
    """As above."""
    env = spec_env("evaluate.rollouts=1")
    await env.setup()
    with RunDirectory(tmp_path) as directory:
        env._record_to(directory, Progress(quiet=True))
        for env.curr_step in (10, 20):
            await env.evaluate()
    await env.shut_down()
    steps = {path.parent.name: json.loads(path.read_text()) for path in (tmp_path / "eval").glob("*/metrics.json")}
    assert set(steps) == {"step-10", "step-20"}


async def test_a_trainers_checkpoint_brings_back_the_place_in_the_dataset(tmp_path: Path) -> None:
    """save_checkpoint saves nothing by default; and it is loaded only after setup."""
    env, again = spec_env(), spec_env()
    for one in (env, again):
        one.checkpoint_dir, one.wandb_prepend = str(tmp_path), "terminal-files_0"
        await one.setup()
    expected = [(await env.get_next_item()).key for _ in range(5)]
    env._position = 2
    env.save_checkpoint(10)
    again.curr_step = 10
    again.load_checkpoint()
    assert [(await again.get_next_item()).key for _ in range(3)] == expected[2:]
    assert again._position == 5


async def test_rollouts_of_a_restarted_environment_are_not_played_again(tmp_path: Path) -> None:
    """What was played and not sent is offered again, from the run directory."""
    for _ in range(2):
        env = spec_env("serve.group_size=2")
        await env.setup()
        with RunDirectory(tmp_path) as directory:
            env._record_to(directory, Progress(quiet=True))
            await env.collect_trajectories(await env.get_next_item())
            await env.shut_down()
    ids = [json.loads(line)["id"] for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert len(ids) == len(set(ids)) == 2


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


async def test_serve_logs_offline_in_the_trainers_project_under_the_environments_name(tmp_path: Path, api: Api) -> None:
    """BaseEnv logs into whichever run the process began first."""
    envs = [make(Offline, use_wandb=True, rollout_server_url=api.url) for _ in range(2)]
    for number, env in enumerate(envs):
        env._wandb_folder, env.wandb_prepend, env.curr_step = tmp_path / str(number), f"canned_{number}", 3
        env._wandb_folder.mkdir()
        await env.setup_wandb()
        assert (env.wandb_project, env.wandb_group) == ("the-trainers", "trained-together")
    for number, env in enumerate(envs):
        await env.handle_send_to_api(group(0.0, 1.0, messages=[[{"role": "user", "content": "hi"}]] * 2))
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


async def test_constant_rewards_give_finite_metrics(api: Api) -> None:
    """Statistics of constant rewards become complex or NaN."""

    class Logged:
        metrics: dict[str, Any] = {}

        def log(self, metrics: dict[str, Any], step: int) -> None:
            self.metrics = metrics

        def table(self, rows: Any) -> str:
            return "table"

    env = make(ensure_scores_are_not_same=False)
    env._wandb_run = logged = Logged()  # type: ignore[assignment]
    for _ in range(3):
        await send(env, api, group(1.0, 1.0))
        env._training_counts.scores.extend([1.0, 1.0])
        env.task_duration.append(0.1)
    await env.wandb_log()
    numbers = {name: value for name, value in logged.metrics.items() if name != "train/rollouts"}
    assert numbers["train/mean_reward"] == 1.0
    assert numbers["train/completion_lengths_std"] == 0.0
    assert all(math.isfinite(value) for value in numbers.values())


async def test_uniform_groups_are_left_out_where_asked_for_and_sent_where_not(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    """process forces the filter off; ours is what the configuration says."""
    with caplog.at_level(logging.WARNING):
        await send(make(), api, group(1.0, 1.0))
    assert api.posted == []
    assert "same" in caplog.text
    await send(make(ensure_scores_are_not_same=False), api, group(1.0, 1.0))
    assert len(api.posted) == 1
