"""Worlds that are killed while they play, and go on: a state, one in a process of its own, fixed words, and steps."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import yaml

from tests.commands import Command, environment, hermes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORLD = '''
"""A world that takes its time."""
import time


class World:
    def __init__(self, item):
        self.number, self.guesses = item["number"], 0

    def answer(self, words):
        time.sleep(0.05)
        if words is None:
            return "Which number?"
        self.guesses += 1
        return {"say": "Yes.", "done": True, "reward": 1} if words == str(self.number) else "No."

    def guess(self, number: int) -> str:
        """Guess the number."""
        time.sleep(0.05)
        self.guesses += number
        return str(number == self.number)


def guesses(state):
    return 1 / (1 + state.guesses)


def said(result, item):
    """How much of its number the agent has said in words."""
    time.sleep(0.05)
    return result.texts.count(str(item["number"])) / 3
'''
GUESS = [{"say": "0"}, {"say": "{{ number }}"}]
CALL = [{"tools": [{"name": "guess", "args": {"number": 0}}]}, {"tools": [{"name": "guess", "args": {"number": 3}}]}]
SPEAKS = {"state": "answer", "speaks_first": True, "max_turns": 4}
RUNS = [{"tools": [{"name": "terminal", "args": {"command": f"printf {{{{ number }}}} > {n}"}}]} for n in "ab"]
KINDS: dict[str, dict[str, Any]] = {
    "state": {
        "state": "world.py:World",
        "tools": [{"state": "guess"}],
        "rewards": {"guesses": {"fn": "world.py:guesses"}},
        "solution": {"turns": [*CALL, {"say": "Done."}]},
    },
    "process": {
        "state": {"python": "world.py:World", "isolate": "process"},
        "user": SPEAKS,
        "rewards": {"guesses": {"fn": "world.py:guesses"}, "environment_rewards": {}},
        "solution": {"turns": GUESS},
    },
    "fixed words": {
        "user": {"turns": ["And now?", "And then?"]},
        "rewards": {"said": {"fn": "world.py:said"}},
        "solution": {"turns": [*GUESS, {"say": "{{ number }}"}]},
    },
    "steps": {
        "user": {"turns": [{"say": "Now b.", "setup": ["test -e a"], "min_reward": 1}]},
        "toolsets": ["terminal"],
        "rewards": {
            "file_matches": {
                "per_step": "mean",
                "args": {"path": "{{ 'ab'[step] }}", "content": "{{ number | string }}"},
            }
        },
        "solution": {"turns": [RUNS[0], {"say": "Done."}, RUNS[1], {"say": "Done."}]},
    },
}
ROLLOUTS = 24


def spec_of(kind: str) -> dict[str, Any]:
    return {
        "name": "worlds",
        "dataset": {"items": [{"number": number} for number in range(1, 13)]},
        "prompt": {"user": "Begin."},
        "servers": {"policy": {"type": "scripted", "error_rate": 0.5}},
        "process": {"group_size": 2, "groups": 12, "concurrency": 4},
        **KINDS[kind],
    }


def lines(run: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's rollouts."""
    file = run / "rollouts.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.parametrize("kind", KINDS)
def test_killed_stateful_run_resumes_to_the_same_scores(kind: str, tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec_of(kind)))
    arguments = ("run", "spec.yaml", "process", "--quiet", "--out")
    assert hermes(*arguments, "whole", cwd=tmp_path).returncode == 0
    whole = {line["id"]: line["score"] for line in lines(tmp_path / "whole")}
    assert len(whole) == ROLLOUTS
    assert len(set(whole.values())) > 1, "some go wrong"
    for least in (2, 8, 15):
        with TemporaryFile("w+") as typed, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            command = Command(*arguments, "run", cwd=tmp_path, env=environment(), streams=(typed, out, err))
            deadline = time.monotonic() + 90
            while len(lines(tmp_path / "run")) < least and command.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            if command.poll() is None:
                os.kill(command.pid, signal.SIGKILL)
                assert command.wait(30) == -signal.SIGKILL
    assert len(lines(tmp_path / "run")) < ROLLOUTS, "it was killed before it had ended"
    assert hermes(*arguments, "run", cwd=tmp_path).returncode == 0
    played = lines(tmp_path / "run")
    assert len(played) == ROLLOUTS
    assert {line["id"]: line["score"] for line in played} == whole
    groups = (tmp_path / "run" / "groups.jsonl").read_text().splitlines()
    assert len(groups) == 12
