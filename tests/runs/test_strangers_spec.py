"""A spec outside of the repository, with data, a tool and a sync reward beside it, against a chat server not ours."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SPEC = """
name: shouting
dataset:
  path: json
  data_files: words.jsonl
  key: id
  columns: {target: "{{ word | upper }}"}
  eval: {fraction: 0.2}
prompt: {user: "Shout the word {{ word }}"}
tools: [{python: tools.py:shout}]
agent: {max_turns: 5, temperature: 1.0}
rewards:
  loud: {fn: "checks.py:is_loud", args: {target: "{{ target }}"}}
servers: {policy: {type: openai, base_url: "${POLICY_URL}", model: latency, tokenizer: SMALL}}
process: {group_size: 4, groups: 200, concurrency: 800}
evaluate: {rollouts: 2}
"""
TOOLS = '''
def shout(text: str, times: int) -> str:
    """Say a text loudly.

    Args:
        text: what to say
        times: how often
    """
    return " ".join([text.upper()] * times)
'''
CHECKS = """
import time


def is_loud(item, result, *, target: str) -> float:
    time.sleep(0.001)
    assert item["target"] == target
    return 1.0 if result.final_response == target else 0.25
"""


class Server:
    """The latency model as a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("latency_model.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def stop(self) -> dict[str, Any]:
        counted, _ = self.process.communicate(timeout=20)
        return dict(json.loads(counted))


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from hermes_rl.tokens.tokenizer import small_tokenizer_path

    (tmp_path / "words.jsonl").write_text("".join(f'{{"id": "w{n}", "word": "word{n}"}}\n' for n in range(60)))
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "checks.py").write_text(CHECKS)
    (tmp_path / "spec.yaml").write_text(SPEC.replace("SMALL", str(small_tokenizer_path())))
    return tmp_path


def run(folder: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "hermes_rl.cli.main", "run", str(folder / "spec.yaml"), *arguments],
        cwd=folder,
        env={**os.environ, "POLICY_URL": url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_process_keeps_all_allowed_rollouts_in_flight(folder: Path, server: Server) -> None:
    done = run(folder, server.url, "process", "--out", "run")
    assert done.returncode == 0, done.stderr
    counted = server.stop()
    groups = [json.loads(line) for line in (folder / "run" / "groups.jsonl").read_text().splitlines()]
    assert [len(group["scores"]) for group in groups] == [4] * 200
    assert counted["requests"] == 800 * 3, "each turn is asked for once"
    assert counted["most"] >= 720
    assert {score for group in groups for score in group["scores"]} == {1.0, 0.25}
    assert all(len(group["tokens"]) == 4 for group in groups)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_evaluate_uses_rows_that_process_excludes(folder: Path, server: Server) -> None:
    done = run(folder, server.url, "evaluate", "--out", "run")
    assert done.returncode == 0, done.stderr
    metrics = json.loads((folder / "run" / "metrics.json").read_text())["results"]["all"]
    assert (metrics["eval/rows"], metrics["eval/rollouts"], metrics["eval/ungraded"]) == (12, 24, 0)
    assert 0.25 <= metrics["eval/mean_reward"] <= 1.0
    evaluated = {json.loads(line)["row_key"] for line in (folder / "run" / "samples.jsonl").read_text().splitlines()}
    trained = run(folder, server.url, "process", "--out", "run2", "--set", "process.groups=48")
    assert trained.returncode == 0, trained.stderr
    rows = {json.loads(line)["row_key"] for line in (folder / "run2" / "groups.jsonl").read_text().splitlines()}
    assert len(rows) == 48
    assert not rows & evaluated
