"""An environment of the reference design runs in all three modes through `.cli()`, with every hook called."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hermes_rl.tokens.hub import HubTokenizer
from tests.env.canned import ended
from tests.env.test_program import ROOT
from tests.env.test_token_exact import tokenizer_folder
from tests.env.trainer import train, trajectory_api
from tests.servers.token_policy import TokenPolicy
from tests.tokens.families import CODER, write_coder

PLAYED = {
    "setup", "get_next_item", "sandbox_for", "compute_reward", "collect_trajectory", "collect_trajectories",
    "postprocess_histories", "wandb_log", "cleanup",
}  # fmt: skip


def writes(prompt: str, chance: random.Random) -> str:
    """A model that speaks Qwen3-Coder's format: it writes the greeting, then is done."""
    if "<tool_response>" in prompt.rpartition("Write hello ")[2]:
        return "Done.<|im_end|>"
    who = prompt.rpartition("Write hello ")[2].split()[0]
    return write_coder("", None, [("terminal", {"command": f"echo hello {who} > ~/greeting.txt"})]) + "<|im_end|>"


@pytest.fixture
async def flags(tmp_path: Path) -> AsyncIterator[list[str]]:
    folder = tokenizer_folder(tmp_path / "tokenizer", keeps_thinking=True)
    (folder / "chat_template.jinja").write_text(CODER)
    async with TokenPolicy(HubTokenizer(str(folder)), writes).running() as url:
        yield [
            "--openai.base_url", url, "--openai.tokenizer_name", str(folder), "--env.tokenizer_name", str(folder),
            "--env.inference_weight", "2.0", "--env.eval_size", "1",
        ]  # fmt: skip


async def program(folder: Path, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.env.reference_environment", *arguments,
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    return await ended(process, 90)


def hooks(folder: Path) -> list[str]:
    return [json.loads(line) for line in (folder / "hooks.jsonl").read_text().splitlines()]


@pytest.mark.slow
async def test_process_calls_every_hook(tmp_path: Path, flags: list[str]) -> None:
    code, output = await program(tmp_path, "process", *flags, "--env.data_path_to_save_groups", "groups.jsonl")
    assert code == 0, output
    lines = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    assert [line["scores"] for line in lines] == [[1.0, 1.0]] * 2
    assert set(hooks(tmp_path)) >= PLAYED


@pytest.mark.slow
async def test_evaluate_calls_its_own(tmp_path: Path, flags: list[str]) -> None:
    code, output = await program(tmp_path, "evaluate", *flags, "--env.data_dir_to_save_evals", "evals")
    assert code == 0, output
    assert hooks(tmp_path) == ["setup", "evaluate"]
    assert json.loads((tmp_path / "evals" / "metrics.json").read_text())["results"]["all"] == {"eval/mean_reward": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
async def test_serve_calls_every_hook_and_misses_no_evaluation(tmp_path: Path, flags: list[str], every: int) -> None:
    async with trajectory_api() as url:
        arguments = [
            "--env.rollout_server_url", url, "--env.total_steps", "4", "--env.steps_per_eval", str(every),
            "--env.data_dir_to_save_evals", "evals",
        ]  # fmt: skip
        serving = asyncio.create_task(program(tmp_path, "serve", *flags, *arguments))
        batches = await asyncio.wait_for(train(url, steps=4, batch_size=4, pause=0.3), 80)
        code, output = await serving
    assert code == 0, output
    assert all(group["scores"] == [1.0, 1.0] for batch in batches for group in batch)
    called = hooks(tmp_path)
    assert set(called) >= PLAYED | {"evaluate"}
    evaluated = {int(folder.name.removeprefix("step-")) for folder in (tmp_path / "evals").iterdir()}
    assert all(any(multiple <= step for step in evaluated) for multiple in range(every, 5, every))
