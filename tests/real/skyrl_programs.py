"""Programs for the real SkyRL: ``skyrl_programs.py PROGRAM FOLDER``; the last line is the result as JSON.

FOLDER is that of `small_learner.py`. A small model samples in place of SkyRL's engines.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import typing
from pathlib import Path
from typing import Any

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[attr-defined, assignment]  # SkyRL is for Python 3.12

import numpy as np  # noqa: E402
import torch  # noqa: E402
from skyrl.backends.skyrl_train.utils import ppo_utils  # noqa: E402
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.dataset.dataset import PromptDataset  # noqa: E402
from skyrl.train.generators.utils import (  # noqa: E402
    get_metrics_from_generator_output,
    merge_stepwise_output,
    prepare_generator_input,
)
from skyrl.train.utils.trainer_utils import validate_generator_output  # noqa: E402
from small_engine import SmallEngine  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from hermes_rl.integrations.skyrl import HermesGenerator  # noqa: E402
from tests.real.doors_played import MEMBERS, ScriptedEngine, model_folder, write_doors  # noqa: E402
from tests.real.estimators import (  # noqa: E402
    DISCOUNT,
    difference,
    difference_of_returns,
    score_groups,
    turn_rewards,
)

PAGE = (Path(__file__).parents[2] / "docs" / "integrations" / "skyrl.md").read_text("utf-8")


class Engine:
    """Replacement for SkyRL's engine client, with the same method. It fails every `every`th rollout."""

    def __init__(self, model: SmallEngine | ScriptedEngine, every: int = 0) -> None:
        self.model, self.every, self.rollouts = model, every, list[str]()

    async def generate(self, given: dict[str, Any]) -> dict[str, Any]:
        (rollout,) = given["session_ids"]
        if rollout not in self.rollouts:
            self.rollouts.append(rollout)
        if self.every and self.rollouts.index(rollout) % self.every == 0:
            raise RuntimeError("the engine is gone")
        (prompt,), asked = given["prompt_token_ids"], given["sampling_params"]
        ids, logprobs = await self.model.sample(prompt, asked["max_tokens"], asked["stop_token_ids"])
        finish = "stop" if ids[-1] in asked["stop_token_ids"] else "length"
        return {"responses": [""], "response_ids": [ids], "stop_reasons": [finish], "response_logprobs": [logprobs]}


def played(folder: Path, model: str, step_wise: bool, every: int = 0) -> tuple[dict[str, Any], SmallEngine, list[str]]:
    engine = SmallEngine(folder / model)
    out, _, uids = generated(folder / "learning.yaml", folder / model, Engine(engine, every), step_wise)
    return out, engine, uids


def generated(
    spec: Path, model: Path, engine: Engine, step_wise: bool, members: int = 4, longest: int = 128
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return the GeneratorOutput, the GeneratorInput, and the names of SkyRL's groups."""
    script = re.search(r"^```python\n(# rows.py\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert script is not None
    text = script[1].replace('"gsm8k"', repr(str(spec))).replace("1000", "4")
    exec(compile(text.replace(', "eval")', ",)"), "skyrl.md", "exec"), {})
    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = re.search(r"^```bash\npython train.py(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert lines is not None
    settings = [one for one in lines[1].split() if one.startswith("generator.")]
    config = SkyRLTrainConfig.from_cli_overrides([*settings, f"generator.step_wise_trajectories={step_wise}".lower()])
    data = PromptDataset("train.jsonl", tokenizer, longest, num_workers=1)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 200, "logprobs": 1}
    rows = data.collate_fn([data[n] for n in range(len(data))])
    given, uids = prepare_generator_input(rows, members, sampling, "hermes_rl", "train", 3)

    async def play() -> dict[str, Any]:
        generator = HermesGenerator(spec, config.generator, engine, tokenizer, retries=0 if engine.every else 2)
        try:
            return await generator.generate(given)
        finally:
            await generator.close()

    out = asyncio.run(play())
    validate_generator_output(len(uids), out, step_wise=step_wise)
    return out, given, uids


def seen(out: dict[str, Any], engine: SmallEngine) -> dict[str, Any]:
    rows = list(
        zip(out["prompt_token_ids"], out["response_ids"], out["loss_masks"], out["rollout_logprobs"], strict=True)
    )
    return {
        "rows": len(rows),
        "trained": sum(sum(mask) for _, _, mask, _ in rows),
        "sampled": engine.sampled,
        "worst": max(engine.difference(*row) for row in rows),
        "metrics": out["rollout_metrics"],
    }


def plain(folder: Path) -> dict[str, Any]:
    out, engine, uids = played(folder, "model", step_wise=False)
    metrics = get_metrics_from_generator_output(out, uids)
    return {**seen(out, engine), "mean": metrics["avg_score"], "rewards": out["rewards"]}


def steps(folder: Path) -> dict[str, Any]:
    out, engine, _ = played(folder, "forgetful", step_wise=True)
    merged = merge_stepwise_output(out)
    return {**seen(out, engine), "last": sum(out["is_last_step"]), "merged": len(merged["response_ids"])}


def failing(folder: Path) -> dict[str, Any]:
    out, engine, _ = played(folder, "model", step_wise=False, every=3)
    masked = [not any(mask) for mask in out["loss_masks"]]
    return {**seen(out, engine), "masked": sum(masked), "errors": out["stop_reasons"].count("error")}


def doors(folder: Path) -> dict[str, Any]:
    """Run the integration tests' spec in both modes."""
    write_doors(Path())
    model, spec, found = model_folder(Path("model").resolve()), Path("doors.yaml").resolve(), {}
    for mode in ("plain", "steps"):
        out, given, _ = generated(spec, model, Engine(ScriptedEngine()), mode == "steps", MEMBERS, 1024)
        asked = zip(given["trajectory_ids"], given["env_extras"], strict=True)
        keys = {name.instance_id: extra["key"] for name, extra in asked}
        rows = zip(out["trajectory_ids"], out["rewards"], out["loss_masks"], strict=True)
        found[mode] = [
            (keys[name.instance_id], sum(reward) if mode == "steps" else reward, sum(mask))
            for name, reward, mask in rows
        ]
    return found


def estimators(folder: Path) -> dict[str, float]:
    """The distances of SkyRL's advantages and returns from ours."""
    groups = score_groups()
    scores = torch.tensor([[score] for group in groups for score in group], dtype=torch.float64)
    given = scores, torch.ones_like(scores), np.array([n for n, group in enumerate(groups) for _ in group])
    made = {
        "mean": ppo_utils.compute_grpo_outcome_advantage(*given, grpo_norm_by_std=False),
        "std": ppo_utils.compute_grpo_outcome_advantage(*given, epsilon=1e-6),
        "rloo": ppo_utils.compute_rloo_outcome_advantage(*given),
    }
    found = {name: difference(name, advantages[:, 0].tolist(), groups, 1e-6) for name, (advantages, _) in made.items()}
    rewards = torch.tensor(turn_rewards(), dtype=torch.float64)
    mask = torch.ones_like(rewards)
    _, returns = ppo_utils.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=DISCOUNT)
    return {**found, "returns": difference_of_returns(returns.tolist())}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))))
