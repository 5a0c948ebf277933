"""Backends that isolate no rollout from another are for use by hand: no start trains or grades on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hermes_rl
from hermes_rl import clear_task_env_overrides, register_task_env_overrides
from hermes_rl.cli.validate import validate_one
from hermes_rl.data.rows import Row
from hermes_rl.env.spec_env import compile_spec, with_spec
from hermes_rl.errors import UserError
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.sandboxes import sandbox_config
from hermes_rl.runs.setup import RunOptions, require_runnable
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.spec.load import load_spec, parse_spec
from hermes_rl.spec.model import Mode
from hermes_rl.tools.base import runtime_for
from tests.env.greetings import Greetings
from tests.env.test_handwritten import make
from tests.env.writer_model import WriterModel, writer_model

REASON = r"`backend: ssh`, which gives all rollouts one account of one machine"
BY_HAND = """
dataset: {items: [{question: "1 + 1", answer: "2"}], eval: {only: true}}
prompt: {user: "{{ question }}"}
servers: {policy: {type: scripted}}
sandbox: {backend: ssh, network: true, ssh: {known_hosts: hosts}}
rewards: {exact_match: {args: {target: "{{ answer }}"}}}
"""
TRAINING = BY_HAND.replace(", eval: {only: true}", "")
OF_TESTS = "rewards: {tests_pass: {SANDBOXargs: {command: 'true', expected: []}}}\n"
OWN = "def looks(result, ctx):\n    return float(ctx.terminal('true')['exit_code'] == 0)\n"


def written(folder: Path, text: str) -> str:
    (folder / "own.py").write_text(OWN)
    (folder / "hosts").touch()
    (folder / "env.yaml").write_text(text)
    return str(folder / "env.yaml")


LOOKING = {
    "fresh": OF_TESTS.replace("SANDBOX", "sandbox: fresh, "),
    "rollout": OF_TESTS.replace("SANDBOX", ""),
    "own": "rewards: {looks: {fn: 'own.py:looks'}}\n",
}


@pytest.mark.parametrize("rewards", LOOKING.values(), ids=LOOKING)
def test_reward_that_looks_into_a_shared_account_is_refused(tmp_path: Path, rewards: str) -> None:
    path = written(tmp_path, BY_HAND.partition("rewards:")[0] + rewards)
    (problem,) = validate_one(path).problems
    assert problem.line == 6
    assert problem.message.startswith("a reward cannot look into a sandbox of `backend: ssh`")
    assert "use another backend" in problem.message
    with pytest.raises(UserError, match=rf"rewards\.\w+: a reward cannot look into a sandbox of {REASON}"):
        require_runnable(load_spec(path), RunOptions("evaluate"))  # and with it play, regrade and whatever compiles it


@pytest.mark.parametrize("section", ["serve: {group_size: 2}", "process: {groups: 1}"])
def test_validation_refuses_to_train_on_a_shared_account(tmp_path: Path, section: str) -> None:
    path = written(tmp_path, TRAINING)
    assert validate_one(path).problems == []
    assert any("for `evaluate` and `play` only" in warning.message for warning in validate_one(path).warnings)
    (problem,) = validate_one(written(tmp_path, f"{TRAINING}{section}\n")).problems
    assert problem.message.startswith(f"`{section.partition(':')[0]}` cannot use sandboxes of `backend: ssh`")
    assert "`evaluate` and `play` take this one" in problem.message


@pytest.mark.parametrize("mode", ["serve", "process"])
def test_run_that_trains_on_a_shared_account_is_refused(tmp_path: Path, mode: Mode) -> None:
    with pytest.raises(UserError, match=f"^{mode} cannot use sandboxes of {REASON}"):
        require_runnable(load_spec(written(tmp_path, TRAINING)), RunOptions(mode))


async def test_evaluation_by_hand_takes_a_shared_account(tmp_path: Path) -> None:
    spec = load_spec(written(tmp_path, BY_HAND))
    assert require_runnable(spec, RunOptions("evaluate")).spec is spec
    cls = with_spec(compile_spec(spec), spec, "evaluate")
    env: Any = cls(*cls.config_init())
    await env.shut_down()


async def test_python_api_and_atropos_refuse_a_shared_account(tmp_path: Path) -> None:
    spec = load_spec(written(tmp_path, TRAINING))
    with pytest.raises(UserError, match=f"^open_env cannot use sandboxes of {REASON}"):
        await hermes_rl.open_env(spec).open()
    cls = compile_spec(spec)
    with pytest.raises(UserError, match=f"^SpecEnv cannot use sandboxes of {REASON}"):
        cls(*cls.config_init())


class Placed(Greetings):
    def sandbox_for(self, item: Any) -> SandboxConfig:
        return replace(super().sandbox_for(item), backend="ssh", network=True)


model = pytest.fixture(writer_model)


async def test_environment_written_by_hand_refuses_a_shared_account(model: WriterModel) -> None:
    with pytest.raises(UserError, match=f"^Greetings cannot use sandboxes of {REASON}"):
        make(model, terminal_backend="ssh", terminal_network=True)
    env = make(model, Placed)
    await env.setup()
    with pytest.raises(UserError, match=f"^greetings cannot use sandboxes of {REASON}"):
        await env.collect_trajectories(await env.get_next_item())
    await env.shut_down()
    register_task_env_overrides("task-of-ssh", {"env_type": "ssh"})
    try:
        with pytest.raises(UserError, match=f"task 'task-of-ssh' cannot use sandboxes of {REASON}"):
            runtime_for("task-of-ssh")
    finally:
        clear_task_env_overrides("task-of-ssh")


def test_settings_of_ssh_reach_its_sandboxes_and_no_other_backend(tmp_path: Path) -> None:
    compiled = CompiledSpec(load_spec(written(tmp_path, BY_HAND)))

    config = sandbox_config(compiled.spec, Row("0", {"question": "", "answer": ""}, 0, ""))
    assert (config.known_hosts, config.accept_unknown_host) == (str(tmp_path / "hosts"), False)
    assert parse_spec(BY_HAND, folder=tmp_path, demo=True).sandbox.backend == "bubblewrap"
    with pytest.raises(UserError, match="`ssh` is for `backend: ssh`; the backend is `docker`"):
        parse_spec(BY_HAND.replace("backend: ssh", "backend: docker"), folder=tmp_path)
