"""Programs for the real verl: ``python verl_programs.py PROGRAM FOLDER``; the last line is the result as JSON.

FOLDER is that of `small_learner.py`. verl's workers and configuration are its own; in place of its servers, which need
a GPU, a small model samples, and in place of its TransferQueue a dictionary takes what the worker puts there.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl
from hydra import compose, initialize_config_dir
from small_engine import SmallEngine
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils import tensordict_utils
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.workers.rollout.replica import TokenOutput

from hermes_rl.errors import UserError
from hermes_rl.integrations.verl import VerlAgentLoop
from tests.real.doors_played import MEMBERS, ScriptedEngine, model_folder, write_doors
from tests.real.estimators import DISCOUNT, difference, difference_of_returns, score_groups, turn_rewards

PAGE = (Path(__file__).parents[2] / "docs" / "integrations" / "verl.md").read_text("utf-8")
ROWS = re.search(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
AGENTS = re.search(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
LINES = re.search(r"^```bash\npython -m verl.trainer.main_ppo(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
STEP = 3


class Servers:
    """Replacement for verl's LLMServerClient, with the same method, without Ray and without a GPU."""

    tokenizer = None

    def __init__(self, engine: SmallEngine | ScriptedEngine, broken: bool = False) -> None:
        self.engine, self.broken = engine, broken

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        if self.broken:
            raise RuntimeError("the replica is gone")
        stop = sampling_params["stop_token_ids"]
        ids, logprobs = await self.engine.sample(prompt_ids, sampling_params["max_tokens"], stop)
        told = {"global_steps": STEP, "min_global_steps": STEP, "max_global_steps": STEP}
        return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields=told)


def prepared(
    folder: Path, model: Path, spec: Path, members: int = 4, prompt: int = 128, response: int = 256
) -> tuple[Any, Any]:
    """Write the data and the agents as documented, and return verl's configuration and dataset."""
    assert ROWS is not None and AGENTS is not None and LINES is not None
    script = ROWS[1].replace('"gsm8k"', repr(str(spec))).replace("1000", "4").replace(', "eval")', ",)")
    exec(compile(script, "verl.md", "exec"), {})
    (folder / "agents.yaml").write_text(AGENTS[1].replace("gsm8k", str(spec)))
    given = [one for one in LINES[1].split() if "=" in one]
    own = {"actor_rollout_ref.model.path": model, "actor_rollout_ref.rollout.n": members,
           "data.max_prompt_length": prompt, "data.max_response_length": response}  # fmt: skip
    given = [one for one in given if one.partition("=")[0] not in own] + [
        f"{key}={value}" for key, value in own.items()
    ]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=given)
    from verl.utils import hf_tokenizer

    return config, RLHFDataset("train.jsonl", hf_tokenizer(str(model)), config.data)


def batch_of_older(config: Any, data: Any, servers: Servers, rows: Sequence[int], members: int) -> DataProto:
    batch = collate_fn([data[n] for n in rows for _ in range(members)])
    batch["uid"] = np.array([f"uid{n}" for n in rows for _ in range(members)], dtype=object)
    given = DataProto.from_single_dict(batch, meta_info={"global_steps": STEP, "validate": False})

    async def play() -> DataProto:
        try:
            return await AgentLoopWorker(config, servers).generate_sequences(given)
        finally:
            await VerlAgentLoop.close()

    return asyncio.run(play())


def older(folder: Path) -> dict[str, Any]:
    """Run the older trainer's worker: a DataProto of 16 rollouts."""
    engine = SmallEngine(folder / "model")
    config, data = prepared(Path(), folder / "model", folder / "learning.yaml")
    out = batch_of_older(config, data, Servers(engine), range(4), 4)
    mask = out.batch["response_mask"].bool()
    size = out.batch["responses"].shape[1]
    with torch.no_grad():
        scores = engine.model(
            input_ids=out.batch["input_ids"],
            attention_mask=out.batch["attention_mask"],
            position_ids=out.batch["position_ids"],
        ).logits.log_softmax(-1)
    own = scores[:, -size - 1 : -1].gather(-1, out.batch["responses"][..., None])[..., 0]
    trained = [ids[kept].tolist() for ids, kept in zip(out.batch["responses"], mask, strict=True)]
    return {
        "rollouts": len(out),
        "worst": float(((own - out.batch["rollout_log_probs"]) * mask).abs().max()),
        "trained": sorted(token for ids in trained for token in ids),
        "sampled": sorted(token for _, ids in engine.calls for token in ids),
        "scores": out.batch["rm_scores"].sum(1).tolist(),
        "right": out.non_tensor_batch["right"].tolist(),
        "steps": out.non_tensor_batch["min_global_steps"].tolist(),
        "stop_reasons": out.non_tensor_batch["stop_reason"].tolist(),
    }


def queued_by_newer(
    config: Any, data: Any, servers: Servers, rows: Sequence[int]
) -> tuple[list[tuple[str, dict[str, Any], dict[str, Any]]], dict[str, str]]:
    """Return the queued items of each sequence with their tags, by key, and the outcome of each group."""
    put: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    status: dict[str, str] = {}
    names = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores")

    async def kv_put(key: str, partition_id: str, tag: dict[str, Any], **_: Any) -> None:
        status[key] = tag["status"]

    async def batch_put(keys: list[str], fields: Any, tags: list[dict[str, Any]], partition_id: str) -> None:
        for n, key in enumerate(keys):
            put.append((key, {name: fields[name][n].tolist() for name in names}, tags[n]))

    agent_loop_tq.tq.init = lambda: None
    agent_loop_tq.tq.async_kv_put, agent_loop_tq.tq.async_kv_batch_put = kv_put, batch_put
    batch = collate_fn([data[n] for n in rows])
    batch["uid"] = np.array([f"uid{n}" for n in rows], dtype=object)
    given = tensordict_utils.get_tensordict(batch)
    tensordict_utils.assign_non_tensor_data(given, "global_steps", STEP)

    async def play() -> None:
        worker = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class(config, servers)
        try:
            await worker.generate_sequences(given)
            await asyncio.gather(*worker.background_tasks)
        finally:
            await VerlAgentLoop.close()

    asyncio.run(play())
    return put, status


def newer(folder: Path, broken: bool = False) -> dict[str, Any]:
    """Run the newer trainer's worker: groups of 4, of two sequences each, with the contents of its queue."""
    engine = SmallEngine(folder / "forgetful")
    config, data = prepared(Path(), folder / "forgetful", folder / "learning.yaml")
    rows, status = queued_by_newer(config, data, Servers(engine, broken), range(4))
    worst = max(
        (
            engine.difference(row["prompts"], row["responses"], row["response_mask"], row["rollout_log_probs"])
            for _, row, _ in rows
        ),
        default=0.0,
    )
    return {
        "status": sorted(status.items()),
        "keys": sorted(key for key, _, _ in rows),
        "worst": worst,
        "trained": sum(sum(row["response_mask"]) for _, row, _ in rows),
        "sampled": engine.sampled,
        "scores": sorted({sum(row["rm_scores"]) for _, row, _ in rows}),
        "tags": sorted({tag["min_global_steps"] for _, _, tag in rows}),
    }


def failing(folder: Path) -> dict[str, Any]:
    """Run the newer trainer's worker while its servers are down."""
    return newer(folder, broken=True)


def doors(folder: Path) -> dict[str, Any]:
    """Run the integration tests' spec: whole groups with the newer trainer; with the older one, without comparing
    rewards.
    """
    write_doors(Path())
    model, servers, found = model_folder(Path("model").resolve()), Servers(ScriptedEngine()), {}
    config, data = prepared(Path(), model, Path("doors.yaml").resolve(), MEMBERS, 1024, 1024)
    keys = [data[n]["extra_info"]["key"] for n in range(len(data))]
    put, _ = queued_by_newer(config, data, servers, range(len(keys)))
    found["newer"] = [
        (keys[int(key.split("_")[0].removeprefix("uid"))], sum(row["rm_scores"]), sum(row["response_mask"]))
        for key, row, _ in put
    ]
    try:
        batch_of_older(config, data, servers, range(len(keys)), MEMBERS)
    except UserError as error:
        found["refused"] = str(error)
    config, data = prepared(Path(), model, Path("alone.yaml").resolve(), MEMBERS, 1024, 1024)
    out = batch_of_older(config, data, servers, range(len(keys)), MEMBERS)
    scores, trained = out.batch["rm_scores"].sum(1).tolist(), out.batch["response_mask"].sum(1).tolist()
    found["older"] = list(zip((key for key in keys for _ in range(MEMBERS)), scores, trained, strict=True))
    return found


def estimators(folder: Path) -> dict[str, float]:
    """The distances of verl's advantages and returns from ours."""
    groups = score_groups()
    scores = torch.tensor([[score] for group in groups for score in group], dtype=torch.float64)
    given = scores, torch.ones_like(scores), np.array([n for n, group in enumerate(groups) for _ in group])
    made = {
        "mean": core_algos.compute_grpo_outcome_advantage(*given, norm_adv_by_std_in_grpo=False),
        "mean, vectorized": core_algos.compute_grpo_vectorized_outcome_advantage(*given, norm_adv_by_std_in_grpo=False),
        "std": core_algos.compute_grpo_outcome_advantage(*given, epsilon=1e-6),
        "rloo": core_algos.compute_rloo_outcome_advantage(*given),
        "rloo, vectorized": core_algos.compute_rloo_vectorized_outcome_advantage(*given),
    }
    found = {
        name: difference(name.split(",")[0], advantages[:, 0].tolist(), groups, 1e-6)
        for name, (advantages, _) in made.items()
    }
    rewards = torch.tensor(turn_rewards(), dtype=torch.float64)
    config = AlgoConfig(gamma=DISCOUNT)
    mask = torch.ones_like(rewards)
    _, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config)
    return {**found, "returns": difference_of_returns(returns.tolist())}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))))
