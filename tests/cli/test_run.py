"""`hermes-rl run` as a user types it: status, streams, files, and going on after an interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_rl.cli.main import status
from tests.commands import ROOT, hermes, started
from tests.waiting import until_blocking


def listen_to_ctrl_c() -> None:
    """A shell that runs the tests in the background lets its children ignore Ctrl-C; a terminal does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("first")
    return folder, hermes("run", "terminal-files", "process", cwd=folder)


Run = tuple[Path, "subprocess.CompletedProcess[str]"]


def test_first_command_runs_twelve_mixed_groups_of_four(first_run: Run) -> None:
    folder, done = first_run
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "outputs" / "terminal-files").iterdir()
    assert str(run.relative_to(folder)) in done.stdout
    groups = lines(run / "groups.jsonl")
    assert [len(group["scores"]) for group in groups] == [4] * 12  # type: ignore[arg-type]
    assert all(len(set(group["scores"])) > 1 for group in groups)  # type: ignore[arg-type]
    assert all(len(group["tokens"]) == len(group["masks"]) == 4 for group in groups)  # type: ignore[arg-type]
    rollouts = lines(run / "rollouts.jsonl")
    assert len(rollouts) == 48
    assert {rollout["policy"]["type"] for rollout in rollouts} == {"scripted"}  # type: ignore[index]
    assert [policy["type"] for policy in json.loads((run / "run.json").read_text())["policy"]] == ["scripted"]
    assert (run / "spec.yaml").exists()


def test_progress_goes_to_stderr_and_results_to_stdout(first_run: Run) -> None:
    _, done = first_run
    first = done.stdout.splitlines()[0]
    assert first.startswith("12 of 12 groups of 4") and "token-exact: 12 groups of 12; trained on: " in first
    assert "12/12" in done.stderr


def test_the_same_command_again_has_nothing_left_to_do(first_run: Run) -> None:
    folder, _ = first_run
    again = hermes("run", "terminal-files", "process", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert "12 were there already" in again.stdout
    (run,) = (folder / "outputs" / "terminal-files").iterdir()
    assert len(lines(run / "groups.jsonl")) == 12


@pytest.mark.slow
def test_more_groups_resume_the_run_and_fresh_starts_another(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    arguments = ["run", "terminal-files", "process", "--out", out, "--quiet"]
    assert hermes(*arguments, "--set", "process.groups=2", cwd=tmp_path).returncode == 0
    done = hermes(*arguments, "--env.total_steps", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(lines(tmp_path / "run" / "groups.jsonl")) == 3
    assert len({line["id"] for line in lines(tmp_path / "run" / "rollouts.jsonl")}) == 12
    done = hermes(*arguments, "--set", "process.groups=1", "--fresh", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(lines(tmp_path / "run-2" / "groups.jsonl")) == 1


def test_evaluate_writes_what_atropos_writes(tmp_path: Path) -> None:
    done = hermes("run", "terminal-files", "evaluate", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mean reward ")
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert set(found) == {"config_general", "results"}
    assert set(found["results"]) == {"atropos|terminal-files_eval|0", "all"}
    metrics = found["results"]["all"]
    assert metrics["eval/rollouts"] == 2
    assert 0 < metrics["eval/mean_reward"] < 1
    assert metrics["eval/pass@1"] == 0.5
    assert metrics["eval/ungraded"] == 0
    assert len(lines(tmp_path / "run" / "samples.jsonl")) == 2


HALVES = """
def mine(result, item):
    if item["n"] == 1:
        raise ValueError("half \\ud83d of a character")
    return 1.0
"""


def test_unpaired_surrogate_in_a_reward_error_does_not_stop_evaluation(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(HALVES)
    (tmp_path / "half.yaml").write_text(
        "name: half\ndataset: {items: [{n: 1}, {n: 2}, {n: 3}], eval: only}\nprompt: {user: hi}\n"
        "servers: {policy: {type: scripted}}\nrewards: {mine: {fn: halves.py:mine}}\n"
    )
    done = hermes("run", "half.yaml", "evaluate", "--out", "run", cwd=tmp_path)
    assert "Traceback" not in done.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())["results"]["all"]
    assert (metrics["eval/mean_reward"], metrics["eval/ungraded"]) == (1.0, 1)
    assert "half \\ud83d of a character" in (tmp_path / "run" / "run.json").read_text()


def test_evaluation_fails_if_the_program_never_calls_the_model(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("""
name: silent
dataset: {items: [{q: one}, {q: two}], eval: only}
prompt: {user: "{{ q }}"}
agent: {program: {command: "echo I ask nobody; exit 4"}}
rewards: {right: {fn: exact_match, args: {target: done}}}
servers: {policy: {type: scripted}}
""")
    done = hermes("run", "spec.yaml", "evaluate", "--out", "run", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert (
        "2 of 2 rollouts: the policy was never asked, so nothing was sampled: its program made 0 requests"
        in done.stderr
    )
    assert "ended with status 4: I ask nobody" in done.stderr
    assert "no agent program has called the model, so the scores do not measure it" in done.stderr


@pytest.mark.slow
def test_ctrl_c_saves_complete_groups_and_the_same_command_resumes(tmp_path: Path) -> None:
    arguments = ["run", "terminal-files", "process", "--out", "run", "--set", "process.groups=400", "--quiet"]
    process = started(*arguments, cwd=tmp_path)
    groups = tmp_path / "run" / "groups.jsonl"
    until_blocking(lambda: groups.exists() and groups.read_text().count("\n") >= 2, seconds=60)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    _, said = process.said()
    assert "the same command resumes" in said
    assert "Traceback" not in said
    written = len(lines(groups))
    assert 2 <= written < 400
    total = str(written + 2)
    more = ["run", "terminal-files", "process", "--out", "run", "--set", f"process.groups={total}"]
    done = hermes(*more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(lines(groups)) == written + 2
    ids = [line["id"] for line in lines(tmp_path / "run" / "rollouts.jsonl")]
    assert len(ids) == len(set(ids)) >= 4 * (written + 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "terminal-fils", "process"], "did you mean"),
        (["run", "terminal-files", "proces"], "proces"),
        (["run", "terminal-files", "process", "--set", "agent.max_turn=3"], "max_turns"),
        (["run", "terminal-files", "process", "--env.group_sizes", "3"], "group_size"),
        (["run", "terminal-files", "process", "--slurm", "true"], "--slurm"),
        (["run", "terminal-files", "process", "--env-file", "missing.env"], "missing.env"),
        (["regrade", "outputs"], "outputs cannot be regraded: there is no run"),
    ],
)
def test_invalid_input_exits_with_status_2_and_a_hint(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = hermes(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outputs").exists()


def no_policy(folder: Path) -> Path:
    spec = folder / "spec.yaml"
    spec.write_text(
        "dataset: {items: [{q: hi}]}\nprompt: {user: '{{ q }}'}\nrewards: {exact_match: {args: {target: hi}}}\n"
    )
    return spec


def test_without_a_policy_nothing_is_guessed(tmp_path: Path) -> None:
    done = hermes("run", str(no_policy(tmp_path)), "process", cwd=tmp_path)
    assert done.returncode == 2
    assert all(flag in done.stderr for flag in ("--openai.base_url", "--openai.model_name", "--demo"))


def test_the_environment_may_name_the_policy(tmp_path: Path) -> None:
    env = {"OPENAI_BASE_URL": "http://127.0.0.1:1/v1", "OPENAI_MODEL": "m", "OPENAI_API_KEY": "sk-secret-1"}
    spec = no_policy(tmp_path)
    done = hermes("run", str(spec), "process", "--out", "run", cwd=tmp_path, env=env)
    assert done.returncode == 1, done.stderr
    assert "127.0.0.1:1" in done.stderr
    assert "can be reached" in done.stderr
    assert "Traceback" not in done.stderr
    assert "sk-secret-1" not in done.stdout + done.stderr


def test_demo_runs_without_a_model_and_is_reported(tmp_path: Path) -> None:
    done = hermes("run", str(no_policy(tmp_path)), "process", "--demo", "--set", "process.groups=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stderr


BOARD = """
class Board:
    turns = 0

    def __init__(self, item):
        pass

    def turn(self, said):
        self.turns += 1
        if self.turns > 1:
            raise RuntimeError("the board fell")
        return {"white": "go on"}
"""
ENDED = {
    "state: board.py:Board\nagents: {white: {}, black: {}}\nschedule: {state: turn}\n": (
        "2 of 2 rollouts ended with environment_error: the spec's code",
        "(RuntimeError: the board fell); correct that code",
    ),
    "toolsets: [todo]\nagent: {max_turns: 1}\n": ("2 of 2 rollouts ended with max_turns:", "; raise agent.max_turns"),
    "": (),
}


@pytest.mark.parametrize("more", ENDED)
def test_last_lines_name_what_most_rollouts_ended_with(
    more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "board.py").write_text(BOARD)
    call = "{tools: [{name: todo, args: {}}]}, " if "max_turns" in more else ""
    (tmp_path / "s.yaml").write_text(
        "dataset: {items: [{a: yes indeed}]}\nprompt: {user: go}\nprocess: {groups: 1, group_size: 2}\n"
        "rewards: {exact_match: {args: {target: '{{ a }}'}}}\nservers: {policy: {type: scripted}}\n"
        f"solution: {{turns: [{call}{{say: yes indeed}}]}}\n{more}"
    )
    assert status(["run", "s.yaml", "process", "--out", "run", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in ENDED[more])
    assert ("ended with" in out) == bool(more)


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom hermes_rl.cli.main import status\nstatus(['run', '--help'])\n"
        "heavy = {'atroposlib', 'transformers', 'datasets', 'wandb', 'openai', 'aiohttp', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
