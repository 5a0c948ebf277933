"""When a rollout, its calls, its rewards and its sandbox started, and how long each took."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.commands import hermes


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("times")
    done = hermes("run", "terminal-files", "process", "--out", "run", "--set", "process.groups=1", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]


def end(span: dict[str, Any]) -> float:
    return float(span["started_at"]) + float(span["seconds"])


def test_each_call_starts_within_its_rollout_after_the_previous_one(played: Path) -> None:
    described = json.loads((played / "run.json").read_text())
    first, last = (datetime.fromisoformat(described[name]).timestamp() for name in ("started", "ended"))
    slack = 0.1  # of two clocks, and of rounding
    for line in lines(played):
        begin = line["started_at"]
        assert first - slack <= begin <= begin + line["timings"]["total"] <= last + slack
        calls, tools, rewards = line["model_calls"], line["tool_calls"], line["rewards"].values()
        assert [call["turn"] for call in calls] == list(range(1, line["turns"] + 1))
        assert all(call["prompt_tokens"] > 0 and call["completion_tokens"] > 0 for call in calls)
        spans = [line["sandbox_start"], *calls, *tools, *rewards]
        assert all(begin - slack <= each["started_at"] <= end(each) for each in spans)
        assert all(end(each) <= begin + line["timings"]["total"] + slack for each in spans)
        for tool in tools:
            assert tool["started_at"] >= end(calls[tool["turn"] - 1]) - slack
            assert tool["started_at"] >= end(line["sandbox_start"]) - slack
        assert all(each["started_at"] >= end(calls[-1]) - slack for each in rewards)


def test_regrading_keeps_the_times_of_rewards_not_called_again(played: Path) -> None:
    before = {line["id"]: line for line in lines(played)}
    spec = played / "spec.yaml"
    changed = spec.read_text().replace("best: 2", "best: 1")
    assert changed != spec.read_text()
    spec.write_text(changed)
    done = hermes("regrade", str(played), "--trust", cwd=played.parent)
    assert done.returncode == 0, done.stderr
    for line in lines(played):
        old = before[line["id"]]
        assert (line["started_at"], line["model_calls"]) == (old["started_at"], old["model_calls"])
        assert line["rewards"]["file_matches"] == old["rewards"]["file_matches"]
        assert line["rewards"]["concise"]["started_at"] > old["rewards"]["concise"]["started_at"]
