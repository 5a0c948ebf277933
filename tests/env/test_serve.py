"""Serve: a real trajectory API, a trainer over HTTP, full groups, evaluations on the way, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cli.test_run import listen_to_ctrl_c
from tests.commands import LIBRARIES, hermes
from tests.env.canned import killed_at_the_end
from tests.env.trainer import train, trajectory_api
from tests.ports import free_port

SPEC = """
extends: {parent}
name: served
serve: {{group_size: 4, total_steps: {steps}, eval_every: 8, api_url: {url}}}
evaluate: {{rollouts: 2}}
atropos: {{max_batches_offpolicy: 1}}
"""
STEPS = 20
ALL_OF_IT = 250
"""Seconds that any part may take on a busy machine."""
pytestmark = pytest.mark.timeout(600)
KEY = "sk-never-shown-4711"


def write_spec(folder: Path, url: str, steps: int = STEPS) -> Path:
    parent = Path(__file__).parents[2] / "specs" / "terminal-files.yaml"
    spec = folder / "served.yaml"
    spec.write_text(SPEC.format(parent=parent, url=url, steps=steps))
    return spec


@asynccontextmanager
async def serve(
    spec: Path, out: Path, *more: str, program: Sequence[str] = ("-m", "hermes_rl.cli.main")
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The program as a user starts it; killed at the end where it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *program, "run", str(spec), "serve", "--out", str(out), *more,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "SOME_API_KEY": KEY},
        preexec_fn=listen_to_ctrl_c,
    )  # fmt: skip
    async with killed_at_the_end(process):
        yield process


def sandboxes_of(pid: int) -> list[int]:
    """Process ids of bwrap started by this process."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text() if entry.name.isdigit() else ""
        except OSError:
            continue
        name, _, rest = stat.partition("(")[2].rpartition(")")
        if name.startswith("bwrap") and rest.split()[1] == str(pid):
            found.append(int(entry.name))
    return found


@pytest.mark.slow
async def test_twenty_steps_of_full_groups_with_two_evaluations(tmp_path: Path) -> None:
    async with (
        trajectory_api() as url,
        serve(write_spec(tmp_path, url), tmp_path / "run", "--openai.api_key", KEY) as process,
    ):
        batches = await asyncio.wait_for(train(url, steps=STEPS, batch_size=8), ALL_OF_IT)
        output, _ = await asyncio.wait_for(process.communicate(), ALL_OF_IT)
    assert process.returncode == 0, output.decode()
    groups = [group for batch in batches for group in batch]
    assert len(batches) == STEPS
    for group in groups:
        assert len(group["tokens"]) == len(group["masks"]) == len(group["scores"]) == len(group["messages"]) == 4
        assert len(set(group["scores"])) > 1, "a uniform group teaches nothing"
        assert all(len(t) == len(m) for t, m in zip(group["tokens"], group["masks"], strict=True))
        assert [len(line) for line in group["inference_logprobs"]] == [len(tokens) for tokens in group["tokens"]]
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert len(described["dataset"]["fingerprint"]) == 64
    assert described["tool_servers"] == {}
    evaluations = sorted((tmp_path / "run" / "eval").glob("step-*/metrics.json"))
    assert len(evaluations) >= 2
    for metrics in evaluations:
        assert "eval/mean_reward" in json.loads(metrics.read_text())["results"]["all"]
    assert sandboxes_of(process.pid) == []
    assert (tmp_path / "run" / "report.html").is_file()
    written = [path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert all(KEY not in text for text in [output.decode(), *written])


@pytest.mark.slow
async def test_ctrl_c_ends_serving_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    async with (
        trajectory_api() as url,
        serve(write_spec(tmp_path, url, steps=1000), tmp_path / "run") as process,
    ):
        await asyncio.wait_for(train(url, steps=1, batch_size=8), ALL_OF_IT)
        process.send_signal(2)
        output, _ = await asyncio.wait_for(process.communicate(), ALL_OF_IT)
    assert process.returncode == 130, output.decode()
    assert sandboxes_of(process.pid) == []
    assert (tmp_path / "run" / "report.html").is_file(), "an interrupted run has its report too"


def test_serve_without_a_trajectory_api_explains_how_to_start_one(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, f"http://127.0.0.1:{free_port()}")
    done = hermes("run", str(spec), "serve", "--out", "run", cwd=tmp_path, loaded=LIBRARIES)
    assert done.returncode == 2
    assert "run-api" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_chat_server_is_refused_unless_inexact_is_allowed(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "http://127.0.0.1:1")
    chat = ("--openai.base_url", "http://127.0.0.1:1/v1", "--openai.model_name", "m")
    done = hermes("run", str(spec), "serve", "--out", "run", *chat, cwd=tmp_path, loaded=LIBRARIES)
    assert done.returncode == 2
    assert "allow_inexact" in done.stderr
