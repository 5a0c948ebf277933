"""Programs for tinker-cookbook: ``tinker_programs.py PROGRAM SPEC TOKENIZER``; the last line is the result as JSON.

Tinker's service samples nothing here: a completer in its place says what the small policy of the tests would.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import re
import sys
from pathlib import Path
from typing import Any

from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.rl.data_processing import compute_advantages, trajectory_to_data
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout

from hermes_rl.errors import UserError
from hermes_rl.integrations.tinker import HermesDatasetBuilder
from tests.api.summing import END, TOKENIZER, write
from tests.real.doors_played import MEMBERS, ScriptedEngine

ROOT = Path(__file__).parents[2]
SPEC, FOLDER = sys.argv[2:]


class Fake(TokenCompleter):
    """Completer that makes occasional mistakes, and stores every reply with its context."""

    def __init__(self) -> None:
        self.random = random.Random(7)
        self.log: list[tuple[list[int], list[int], list[float]]] = []

    async def __call__(self, model_input: Any, stop: Any, *, max_tokens: int | None = None) -> TokensWithLogprobs:
        prompt = model_input.to_ints()
        ids = TOKENIZER.encode(write(TOKENIZER.decode(prompt), self.random.random() < 0.6) + END)
        assert stop == [ids[-1]], stop
        self.log.append((prompt, ids, [-self.random.random() for _ in ids]))
        return TokensWithLogprobs(*self.log[-1][1:], "stop")


class Scripted(TokenCompleter):
    """The scripted policy of the integration tests."""

    async def __call__(self, model_input: Any, stop: Any, *, max_tokens: int | None = None) -> TokensWithLogprobs:
        return TokensWithLogprobs(*await ScriptedEngine().sample(model_input.to_ints(), 10_000, stop), "stop")


async def groups(size: int = 6, per_batch: int = 2, batches: int = 2) -> Any:
    dataset, _ = await HermesDatasetBuilder(spec=SPEC, tokenizer=FOLDER, per_batch=per_batch, group_size=size)()
    assert len(dataset) == batches
    return [pickle.loads(pickle.dumps(group)) for index in range(len(dataset)) for group in dataset.get_batch(index)]


async def trained() -> Any:
    """Return the trained tokens of groups as datums, with their contexts."""
    policy = Fake()
    played = [await do_group_rollout(group, policy) for group in await groups()]
    found, rewards = [], []
    for group, advantages in zip(played, compute_advantages(played), strict=True):
        rewards.append(group.get_total_rewards())
        for trajectory, advantage in zip(group.trajectories_G, advantages, strict=True):
            for datum in trajectory_to_data(trajectory, float(advantage)):
                inputs = {name: value.to_torch().tolist() for name, value in datum.loss_fn_inputs.items()}
                ids = [datum.model_input.to_ints()[0], *inputs["target_tokens"]]
                found.append({"ids": ids, "mask": inputs["mask"], "logprobs": inputs["logprobs"]})
    stops = sorted({trajectory.stop_reason for group in played for trajectory in group.trajectories_G})
    return {"rewards": rewards, "datums": found, "log": policy.log, "stops": stops}


async def failing() -> Any:
    """Run a spec whose reward fails: once with the cookbook's default, once with retries."""
    said = []
    for strategy in (None, RetryOnFailure(max_retries=2)):
        (group, *_) = await groups(2)
        try:
            await do_group_rollout(group, Fake(), strategy)
        except (RuntimeError, TinkerCookbookError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


async def limited() -> Any:
    """Run rollouts that the cookbook itself stops."""
    (group, *_) = await groups(1)
    (env,) = await group.make_envs()
    trajectory = await run_rollout(Fake(), env, limits=RolloutLimits(max_turns=1))
    try:
        await group.compute_group_rewards([trajectory], [env])
    except RuntimeError as error:
        return [str(error), str(trajectory.stop_reason)]
    finally:
        await group.cleanup()


async def masked() -> Any:
    """Run a spec that masks the stop reason: the rollout has a reward, and no trained token."""
    (group, *_) = await groups(2)
    played = await do_group_rollout(group, Fake())
    data = [datum for one in played.trajectories_G for datum in trajectory_to_data(one, 1.0)]
    return [played.get_total_rewards(), sum(float(datum.loss_fn_inputs["mask"].to_torch().sum()) for datum in data)]


async def doors() -> Any:
    """Return the total reward of each trajectory of the integration tests' spec, and its trained tokens."""
    found = []
    for group in await groups(MEMBERS, per_batch=1, batches=3):
        played = await do_group_rollout(group, Scripted())
        for trajectory, score in zip(played.trajectories_G, played.get_total_rewards(), strict=True):
            masks = [one.loss_fn_inputs["mask"].to_torch() for one in trajectory_to_data(trajectory, 1.0)]
            found.append((group.key, score, sum(int(mask.sum()) for mask in masks)))
    return found


async def comparing() -> Any:
    """Return the error for a spec with comparing rewards, which is refused before the first rollout."""
    try:
        await groups()
    except UserError as error:
        return str(error)


async def script() -> Any:
    """Return the cookbook configuration that the script of docs/integrations/tinker.md makes."""
    page = (ROOT / "docs" / "integrations" / "tinker.md").read_text("utf-8")
    (shown,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "shown"}
    exec(compile(shown, "tinker.md", "exec"), names)
    return [names["config"].dataset_builder.group_size, str(names["config"].rollout_error_tolerance)]


if __name__ == "__main__":
    print("\n" + json.dumps(asyncio.run(globals()[sys.argv[1]]())))
