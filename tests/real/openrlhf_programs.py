"""Programs for the real OpenRLHF: ``openrlhf_programs.py PROGRAM FOLDER``; the last line is the result as JSON.

FOLDER is that of `small_learner.py`. OpenRLHF's packages import deepspeed when they are loaded, which is not there; its
modules are loaded without them. A small model samples in place of its vLLM.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from small_engine import SmallEngine
from transformers import AutoTokenizer

from hermes_rl.errors import UserError
from tests.real.doors_played import MEMBERS, ScriptedEngine, model_folder, write_doors
from tests.real.estimators import DISCOUNT, difference, difference_of_returns, score_groups, turn_rewards

PAGE = (Path(__file__).parents[2] / "docs" / "integrations" / "openrlhf.md").read_text("utf-8")
sys.dont_write_bytecode = True  # two versions of agent.py may have one size and one second
LONGEST = 1024
"""Tokens of a rollout."""


class Engine:
    """Replacement for OpenRLHF's RolloutRayActor, with the same method."""

    def __init__(self, model: SmallEngine | ScriptedEngine) -> None:
        self.model = model

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        stop = sampling_params.stop_token_ids
        ids, values = await self.model.sample(prompt_token_ids, sampling_params.max_tokens, stop)
        steps = [{token: SimpleNamespace(logprob=value)} for token, value in zip(ids, values, strict=True)]
        finish = "stop" if ids[-1] in stop else "length"
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=steps, finish_reason=finish)])


def packages(*names: str) -> None:
    """Let modules of these packages be imported without what the packages import."""
    place = next(Path(one) for one in sys.path if (Path(one) / "openrlhf").is_dir())
    for name in names:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(place.joinpath(*name.split(".")))]


def executed(
    spec: Path, model: Path, engine: SmallEngine | ScriptedEngine, repeats: int = 1
) -> tuple[bool, list[dict[str, Any]]]:
    """Return whether the executor is one of OpenRLHF's, and its responses to as many of each row."""
    packages("openrlhf", "openrlhf.utils")
    rows, agent = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    text = rows.replace('"gsm8k"', repr(str(spec))).replace("1000", "16").replace(', "eval")', ",)")
    exec(compile(text, "openrlhf.md", "exec"), {})
    Path("agent.py").write_text(agent.replace('"gsm8k"', repr(str(spec))))
    found = importlib.util.spec_from_file_location("agent", "agent.py")  # as OpenRLHF does
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    from openrlhf.utils.agent import AgentExecutorBase

    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()] * repeats
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": None, "min_tokens": 1, "logprobs": 1}

    async def play() -> list[dict[str, Any]]:
        one = module.AgentExecutor()
        asked = SimpleNamespace(**plain)
        try:
            work = [one.execute(row["input"], row["label"], asked, LONGEST, tokenizer, Engine(engine)) for row in lines]
            return list(await asyncio.gather(*work))
        finally:
            await one.env.close()

    return issubclass(module.AgentExecutor, AgentExecutorBase), asyncio.run(play())


def mask_of(response: dict[str, Any]) -> list[int]:
    mask = [0] * len(response["observation_tokens"])
    for start, end in response["action_ranges"]:
        mask[start:end] = [1] * (end - start)
    return mask


def batch(folder: Path) -> dict[str, Any]:
    engine = SmallEngine(folder / "model")
    base, responses = executed(folder / "learning.yaml", folder / "model", engine)
    worst, trained = 0.0, 0
    for one in responses:
        ids, values = one["observation_tokens"], one["rollout_log_probs"]
        mask = mask_of(one)
        trained += sum(mask)
        worst = max(worst, engine.difference(ids[:1], ids[1:], mask[1:], values[1:]))
    return {
        "base": base,
        "responses": len(responses),
        "trained": trained,
        "sampled": engine.sampled,
        "worst": worst,
        "scores": [one["scores"] for one in responses],
        "right": [one["extra_logs"]["right"] for one in responses],
    }


def doors(folder: Path) -> dict[str, Any]:
    """Run the integration tests' spec without the reward that compares rollouts; the full spec is refused."""
    write_doors(Path())
    model, found = model_folder(Path("model").resolve()), {}
    _, responses = executed(Path("alone.yaml").resolve(), model, ScriptedEngine(), MEMBERS)
    found["rows"] = [(json.loads(one["label"])["key"], one["reward"], sum(mask_of(one))) for one in responses]
    try:
        executed(Path("doors.yaml").resolve(), model, ScriptedEngine())
    except UserError as error:
        found["refused"] = str(error)
    return found


def estimators(folder: Path) -> dict[str, float]:
    """The distances of OpenRLHF's advantages and returns from ours; nothing of Ray and deepspeed is used for them."""
    packages("openrlhf", "openrlhf.utils", "openrlhf.models", "openrlhf.trainer", "openrlhf.trainer.ppo_utils")
    for name in ("ray", "deepspeed", "openrlhf.trainer.ray", "openrlhf.trainer.ray.launcher"):
        sys.modules[name] = ModuleType(name)
    sys.modules["openrlhf.trainer.ray.launcher"].RayActorGroup = object  # type: ignore[attr-defined]
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    maker, groups, found = object.__new__(RemoteExperienceMaker), score_groups(8), {}
    scores = torch.tensor([score for group in groups for score in group], dtype=torch.float64)
    maker.kl_ctl = SimpleNamespace(value=0.0)
    for name, estimator in (("std", "group_norm"), ("mean", "dr_grpo"), ("rloo", "rloo")):
        advantage = SimpleNamespace(estimator=estimator, gamma=1.0)
        args = SimpleNamespace(
            reward=SimpleNamespace(clip_range=None),
            rollout=SimpleNamespace(n_samples_per_prompt=8),
            algo=SimpleNamespace(advantage=advantage),
        )
        maker.strategy, maker.advantage_estimator = SimpleNamespace(args=args), estimator
        one_token = torch.ones((len(scores), 1), dtype=torch.float64)
        batch = SimpleNamespace(
            rewards=scores, index=range(len(scores)), kl=0 * one_token, action_mask=one_token, info={}
        )
        maker.compute_advantages_and_returns([batch])
        found[name] = difference(name, batch.advantages[:, 0].tolist(), groups, 1e-9)
    rewards = torch.tensor(turn_rewards(), dtype=torch.float64)
    returns = maker.get_cumulative_returns(rewards, torch.ones_like(rewards), DISCOUNT)
    return {**found, "returns": difference_of_returns(returns.tolist())}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))))
