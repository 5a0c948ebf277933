"""Commands with standard streams that are closed or full, and without a loopback interface."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import hermes

RUN = ["run", "terminal-files", "process", "--set", "process.groups=1", "--set", "process.group_size=2", "--out", "run"]
START = """
import os, sys
{prepare}
from hermes_rl.cli.main import main
main({arguments!r})
"""
CLOSE = "for number in {numbers}: os.close(number); setattr(sys, ('stdin', 'stdout', 'stderr')[number], None)"
FULL = "full = os.open('/dev/full', os.O_WRONLY)\nfor number in {numbers}: os.dup2(full, number)"
REWARD = """
def known(result):
    if len(result.final_response) > 4: raise ValueError(result.final_response)
    return 0.0
"""
LOST = "stdout cannot be written to (No space left on device)"


@pytest.mark.parametrize(
    ("prepare", "numbers"),
    [(CLOSE, [1]), (CLOSE, [2]), (CLOSE, [0, 1, 2]), (FULL, [1]), (FULL, [2]), (FULL, [1, 2])],
)
def test_run_completes_when_its_output_streams_fail(prepare: str, numbers: list[int], tmp_path: Path) -> None:
    code = START.format(prepare=prepare.format(numbers=numbers), arguments=RUN)
    done = hermes(cwd=tmp_path, code=code)
    assert done.returncode == 0, done.stderr
    assert ("1 of 1 groups of 2" in done.stdout, "1/1 groups" in done.stderr) == (1 not in numbers, 2 not in numbers)
    assert (LOST in done.stderr) == (prepare == FULL and numbers == [1])
    (group,) = (tmp_path / "run" / "groups.jsonl").read_text().splitlines()
    assert json.loads(group)["scores"]
    assert "1 of 1" not in (tmp_path / "run" / "rollouts.jsonl").read_text(), "no file has the number of a stream"


@pytest.mark.parametrize("arguments", [["list", "rewards"], ["--version"], ["--help"], ["validate", "terminal-files"]])
def test_command_whose_output_is_lost_fails_without_traceback(arguments: list[str], tmp_path: Path) -> None:
    code = START.format(prepare=FULL.format(numbers=[1]), arguments=arguments)
    done = hermes(cwd=tmp_path, code=code)
    assert (done.returncode, done.stdout) == (1, "")
    assert LOST in done.stderr and "Traceback" not in done.stderr


def test_log_record_without_a_handler_shows_control_characters(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "spec.yaml").write_text(r"""
dataset: {items: [{n: 1}]}
prompt: {user: "Go."}
servers: {policy: {type: scripted}}
solution: {turns: [{say: "\e]0;title\a"}]}
rewards: {known: {fn: "reward.py:known"}}
""")
    done = hermes("play", "spec.yaml", cwd=tmp_path)
    assert r"\u001b]0;title\u0007" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_missing_loopback_is_said_at_once(tmp_path: Path) -> None:
    user, network = 0x10000000, 0x40000000
    prepare = (
        "import ctypes\nunshare = ctypes.CDLL(None, use_errno=True).unshare\n"
        f"if unshare({network}) and unshare({user | network}): sys.exit(77)"
    )
    done = hermes(cwd=tmp_path, code=START.format(prepare=prepare, arguments=RUN))
    if done.returncode == 77:
        pytest.skip("no network namespace can be made here")
    assert done.returncode == 2
    assert "the loopback interface (127.0.0.1) cannot be used here" in done.stderr
