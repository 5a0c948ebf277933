"""A subclass of a compiled spec: what it overrides is called in every mode of `.cli()`, or refused by name."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import compile_spec, load_spec
from hermes_rl.errors import UserError
from tests.commands import ROOT, program
from tests.env.trainer import train, trajectory_api

CODE = """
from hermes_rl import compile_spec, load_spec


class Mine(compile_spec(load_spec("terminal-files"))):
    async def get_next_item(self):
        item = await super().get_next_item()
        print("item", item.key, flush=True)
        return item

    async def postprocess_histories(self, group):
        return {**group, "scores": [score + 10 for score in group["scores"]]}

    async def evaluate(self, *args, **kwargs):
        print("evaluate", flush=True)
        await super().evaluate(*args, **kwargs)


Mine.cli()
"""


def only(folder: Path, name: str) -> Path:
    (found,) = folder.rglob(name)
    return found


def test_process_applies_subclass_overrides_and_resumes(tmp_path: Path) -> None:
    arguments = ["process", "--env.group_size", "3", "--env.total_steps"]
    for total in ("1", "2"):
        done = program(CODE, *arguments, total, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in only(tmp_path, "groups.jsonl").read_text().splitlines()]
        assert len(lines) == int(total)
        assert all(len(line["scores"]) == 3 and min(line["scores"]) >= 10 for line in lines)
    assert done.stdout.count("item ") >= 2
    assert len({line["row_key"] for line in lines}) == 2, "the first row is not played again"
    rollouts = only(tmp_path, "rollouts.jsonl").read_text().splitlines()
    assert len(rollouts) == len({json.loads(line)["id"] for line in rollouts}) >= 6


def test_evaluate_calls_the_subclass_and_writes_into_the_run_directory(tmp_path: Path) -> None:
    done = program(CODE, "evaluate", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("evaluate") == 1
    folder = only(tmp_path, "run.json").parent
    assert json.loads((folder / "metrics.json").read_text())["results"]["all"]["eval/mean_reward"] > 0
    assert (folder / "samples.jsonl").exists()


@pytest.mark.slow
async def test_serve_sends_what_the_subclass_made_of_the_groups(tmp_path: Path) -> None:
    async with trajectory_api() as url:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CODE, "serve", "--env.rollout_server_url", url, "--env.total_steps", "2",
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            batches = await asyncio.wait_for(train(url, steps=2, batch_size=8), 60)
            output, _ = await asyncio.wait_for(process.communicate(), 60)
        finally:
            if process.returncode is None:
                process.kill()
    assert process.returncode == 0, output.decode()
    assert all(min(group["scores"]) >= 10 for batch in batches for group in batch)


@pytest.mark.parametrize(
    ("name", "section"),
    [("compute_reward", "rewards"), ("format_prompt", "prompt"), ("format_messages", "prompt")],
)
def test_a_hook_that_the_spec_answers_is_refused_by_name(name: str, section: str) -> None:
    parent: Any = compile_spec(load_spec("terminal-files"))
    mine = type("Mine", (parent,), {name: lambda self, *args: None})
    with pytest.raises(UserError, match=rf"Mine\.{name} is never called: the spec's `{section}` says that"):
        mine(*mine.config_init())
