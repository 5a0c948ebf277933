"""It learns: a small policy behind a server of its own, through hermes-rl serve and run-api, with a GRPO trainer."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

MEASURED = 4
"""Batches before the first that is trained on: 256 rollouts tell its reward of about 0.37 to within 0.03."""
STEPS = MEASURED + 22
PAUSE = 10.0


@pytest.mark.slow
@pytest.mark.by_turns(2, 0)
@pytest.mark.timeout(900)
async def test_reward_rises_on_exactly_what_was_sampled(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="pip install '.[train]'")
    from examples.learning.run import learn

    curve = await learn(tmp_path, steps=STEPS, pause=PAUSE, measured=MEASURED)
    assert curve.parameters < 1_000_000
    assert fmean(curve.reward[:MEASURED]) < 0.5
    assert fmean(curve.reward[-5:]) > 0.8
    assert max(curve.difference) < 1e-4
    assert curve.version[0] == 0
    assert curve.version[-1] > STEPS // 2, "the weights that sample are not those of the beginning"
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert {rollout["error"] for rollout in rollouts} == {None}, "the pause was no failure"
    assert any(rollout["timings"]["queue"] > PAUSE / 2 for rollout in rollouts), "somebody waited for it"
    generation = sorted(rollout["timings"]["generation"] for rollout in rollouts)
    assert generation[-1] < PAUSE, "and it was no working time"
