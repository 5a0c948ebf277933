"""What is played with the real SkyRL: ``python skyrl_programs.py PROGRAM FOLDER``; the last line says what was seen.

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

PAGE = (Path(__file__).parents[2] / "docs" / "integrations" / "skyrl.md").read_text("utf-8")


class Engine:
    """In place of SkyRL's client of its engines: the same method. It fails every `every`th rollout."""

    def __init__(self, model: SmallEngine, every: int = 0) -> None:
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
    script = re.search(r"^```python\n(# rows.py\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert script is not None
    text = script[1].replace('"gsm8k"', repr(str(folder / "learning.yaml"))).replace("1000", "4")
    exec(compile(text.replace(', "eval")', ",)"), "skyrl.md", "exec"), {})
    tokenizer = AutoTokenizer.from_pretrained(folder / model)
    lines = re.search(r"^```bash\npython train.py(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert lines is not None
    generator = [one for one in lines[1].split() if one.startswith("generator.")]
    config = SkyRLTrainConfig.from_cli_overrides([*generator, f"generator.step_wise_trajectories={step_wise}".lower()])
    data = PromptDataset("train.jsonl", tokenizer, 128, num_workers=1)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 200, "logprobs": 1}
    rows = data.collate_fn([data[n] for n in range(4)])
    given, uids = prepare_generator_input(rows, 4, sampling, "hermes_rl", "train", 3)
    engine = SmallEngine(folder / model)

    async def play() -> dict[str, Any]:
        generator = HermesGenerator(
            folder / "learning.yaml", config.generator, Engine(engine, every), tokenizer, replays=0 if every else 2
        )
        try:
            return await generator.generate(given)
        finally:
            await generator.close()

    out = asyncio.run(play())
    validate_generator_output(16, out, step_wise=step_wise)
    return out, engine, uids


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


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))))
