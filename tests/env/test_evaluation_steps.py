"""Evaluations during training: none is missed, however the trainer's step jumps."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.env.test_serve import serve, write_spec
from tests.env.trainer import train, trajectory_api


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
