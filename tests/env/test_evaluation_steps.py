"""Evaluations during training: none is missed, however the trainer's step jumps."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.env.canned import Canned, make
from tests.env.test_serve import serve, write_spec
from tests.env.trainer import train, trajectory_api


class Evaluated(Canned):
    """Notes at which step it was evaluated; an evaluation takes as long as `gate` is closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[int] = []
        self.saved: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(self.curr_step)
        await self.gate.wait()

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        self.saved.append(step)


async def step_to(env: Evaluated, *steps: int) -> None:
    for step in steps:
        env.status_dict = {"current_step": step}
        await env.env_step_checks()
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("every", "steps", "evaluated"),
    [
        (1, range(10), [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (3, range(10), [3, 6, 9]),
        (3, [0, 3, 6, 9], [3, 6, 9]),
        (3, [0, 2, 4, 8, 9], [4, 8, 9]),
        (3, [0, 8, 8, 9], [8, 9]),
        (0, range(10), []),
        (-1, range(10), []),
    ],
)
async def test_a_multiple_that_is_reached_or_passed_is_evaluated_once(
    every: int, steps: list[int], evaluated: list[int]
) -> None:
    env: Any = make(Evaluated, steps_per_eval=every, min_items_sent_before_logging=99)
    await step_to(env, *steps)
    assert env.seen == evaluated
    assert env.config.steps_per_eval == every
    await env.shut_down()


async def test_an_evaluation_that_is_due_while_another_one_runs_follows_it() -> None:
    env: Any = make(Evaluated, steps_per_eval=2, min_items_sent_before_logging=99)
    env.gate.clear()
    await step_to(env, 2, 4, 5)
    assert env.seen == [2]
    env.gate.set()
    await asyncio.sleep(0)
    await step_to(env, 5, 5)
    assert env.seen == [2, 5]
    await env.shut_down()


async def test_a_checkpoint_is_saved_for_each_interval_that_was_passed() -> None:
    env: Any = make(Evaluated, steps_per_eval=-1, min_items_sent_before_logging=99)
    env.checkpoint_interval = 2
    await step_to(env, 1, 3, 5, 7)
    assert env.saved == [2, 4, 6]
    assert env.checkpoint_interval == 2
    await env.shut_down()


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
async def test_nine_steps_of_a_real_trainer_are_evaluated_to_the_last(tmp_path: Path, every: int) -> None:
    async with trajectory_api() as url:
        spec = write_spec(tmp_path, url, steps=9)
        async with serve(spec, tmp_path / "run", "--set", f"serve.eval_every={every}") as process:
            await asyncio.wait_for(train(url, steps=9, batch_size=8, pause=0.3), 90)
            output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, output.decode()
    found = {int(folder.name.removeprefix("step-")): folder for folder in (tmp_path / "run" / "eval").iterdir()}
    assert max(found) == 9
    assert all(any(multiple <= step < multiple + 3 for step in found) for multiple in range(every, 10, every))
    for folder in found.values():
        assert json.loads((folder / "metrics.json").read_text())["results"]["all"]["eval/mean_reward"] > 0
