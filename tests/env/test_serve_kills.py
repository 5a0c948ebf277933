"""Kills of the environment and of run-api while a trainer pulls: it misses no group, and gets none twice."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_run import lines
from tests.env.test_serve import serve
from tests.env.trainer import train, trajectory_api
from tests.ports import free_port
from tests.waiting import until

SPEC = """
name: numbers
dataset: {generator: "rows.py:rows"}
prompt: {user: "Say {{ n }}"}
rewards: {right: {fn: "rows.py:right"}}
solution: {turns: [{say: "{{ n }}"}]}
servers: {policy: {type: scripted, error_rate: 0.5}}
serve: {group_size: 4, total_steps: STEPS, eval_every: 0, api_url: URL}
atropos: {max_batches_offpolicy: 1}
"""
CODE = """
def rows(*, seed, split):
    yield from ({"n": n} for n in range(1000))

def right(item, result):
    return float(result.final_response == str(item["n"]))
"""
ALL_OF_IT = 250
"""Seconds that any part may take on a busy machine."""
pytestmark = pytest.mark.timeout(600)
BATCH, GROUPS = 8, 2
"""Sequences of a batch, and groups of four that it holds."""


def write_spec(folder: Path, url: str, steps: int) -> Path:
    (folder / "rows.py").write_text(CODE)
    (folder / "numbers.yaml").write_text(SPEC.replace("URL", url).replace("STEPS", str(steps)))
    return folder / "numbers.yaml"


def numbers(batches: list[list[dict[str, Any]]]) -> list[int]:
    """Which rows the trainer has, in the order in which it got them."""
    return [int(group["messages"][0][-2]["content"].removeprefix("Say ")) for batch in batches for group in batch]


def check(batches: list[list[dict[str, Any]]], folder: Path) -> None:
    found = numbers(batches)
    assert len(set(found)) == len(found), "no group twice"
    # Groups end in another order than they begin; the last ones may still be in the queue.
    complete = len(found) - 4 * GROUPS
    assert set(range(complete)) <= set(found), f"groups are missing in {sorted(found)}"
    ids = [line["id"] for line in lines(folder / "run" / "rollouts.jsonl")]
    assert len(set(ids)) == len(ids), "nothing was played twice"


async def received(batches: list[Any], count: int) -> None:
    await until(lambda: len(batches) >= count, seconds=ALL_OF_IT)


@pytest.mark.slow
async def test_kills_of_the_environment_lose_and_repeat_nothing(tmp_path: Path) -> None:
    steps, batches = 16, []  # type: ignore[var-annotated]
    async with trajectory_api() as url:
        spec = write_spec(tmp_path, url, steps)
        trainer = asyncio.create_task(train(url, steps=steps, batch_size=BATCH, pause=0.1, batches=batches))
        for count in (3, 8):
            async with serve(spec, tmp_path / "run"):  # killed at its end
                await asyncio.wait_for(received(batches, count), ALL_OF_IT)
        async with serve(spec, tmp_path / "run") as process:
            await asyncio.wait_for(trainer, ALL_OF_IT)
            output, _ = await asyncio.wait_for(process.communicate(), ALL_OF_IT)
    assert process.returncode == 0, output.decode()
    assert "resuming at step" in output.decode()
    check(batches, tmp_path)


@pytest.mark.slow
async def test_a_kill_of_the_api_sends_again_what_the_trainer_had_not_received(tmp_path: Path) -> None:
    port, batches = free_port(), []  # type: ignore[var-annotated]
    spec = write_spec(tmp_path, f"http://127.0.0.1:{port}", 12)
    async with AsyncExitStack() as whole:
        async with trajectory_api(port) as url:  # killed at its end, with what is in its queue
            process = await whole.enter_async_context(serve(spec, tmp_path / "run"))
            await asyncio.wait_for(train(url, steps=5, batch_size=BATCH, pause=0.2, batches=batches), ALL_OF_IT)
            await asyncio.sleep(0.5)  # the queue fills up behind the trainer's back
            queued = len(lines(tmp_path / "run" / "groups.jsonl")) - 5 * GROUPS
        output, _ = await asyncio.wait_for(process.communicate(), ALL_OF_IT)
    assert process.returncode == 1, output.decode()
    assert "Run the same command again when it is back" in output.decode()
    assert queued > 0
    async with trajectory_api(port) as url, serve(spec, tmp_path / "run") as process:
        await asyncio.wait_for(train(url, steps=12, batch_size=BATCH, starting_step=5, batches=batches), ALL_OF_IT)
        output, _ = await asyncio.wait_for(process.communicate(), ALL_OF_IT)
    assert re.search(r"resending [1-9]\d* groups that it had not received", output.decode()), output.decode()
    check(batches, tmp_path)
