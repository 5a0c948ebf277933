"""Programs for the real TRL: ``python trl_programs.py PROGRAM FOLDER SPEC``; the last line is the result as JSON.

FOLDER is that of `small_learner.py`. Each program runs in the environment with TRL.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

import hermes_rl
from examples.learning.model import padded
from hermes_rl import Policy
from hermes_rl.errors import UserError
from hermes_rl.integrations import trl as door
from hermes_rl.tokens.chat import chat_tokens
from hermes_rl.tokens.hub import HubTokenizer
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.integrations.doors import TOKENIZER, answer
from tests.integrations.doors import sample as scripted
from tests.learning import nim
from tests.real.doors_played import MEMBERS, write_doors
from tests.real.estimators import difference, score_groups

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations" / "trl.md").read_text("utf-8")
SCRIPTS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PLAIN = {
    "report_to": [],
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}
LEARNING = {
    "learning_rate": 4e-4,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "gradient_checkpointing": False,
}


class Checked(trl.GRPOTrainer):
    """Record the distance of the trainer's log-probabilities from the sampled ones, and the baselines used."""

    made: Checked

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Checked.made = self
        self.worst: list[float] = []
        self.trained: list[int] = []
        self.scores: list[list[float | None]] = []
        self.advantages: list[list[float]] = []

    def _calculate_rewards(self, *args: Any) -> Any:
        found = super()._calculate_rewards(*args)
        self.scores.append([None if one != one else one for one in found[:, 0].tolist()])
        return found

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        out = super()._generate_and_score_completions(inputs)
        self.advantages.append(out["advantages"].tolist())
        return out

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            own, _, _ = self._get_per_token_logps_and_entropies(model, ids, attention, inputs["completion_ids"].size(1))
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        self.worst.append(float(((own - inputs["sampling_per_token_logps"]) * mask).abs().max()))
        self.trained.append(int(mask.sum()))
        return super()._compute_loss(model, inputs)


def grpo(folder: Path, spec: Path) -> dict[str, Any]:
    """Run the first script of docs/integrations/trl.md, with other names and sizes."""
    torch.manual_seed(1)
    script = SCRIPTS[0].replace('"gsm8k"', repr(str(spec))).replace('"Qwen/Qwen3-0.6B"', repr(str(folder / "model")))
    script = script.replace("rows=1000", "rows=64").replace("learning_rate=1e-6", "**SMALL")
    small = {**PLAIN, **LEARNING, "max_steps": 12, "beta": 0.0}
    trl.GRPOTrainer = Checked
    exec(compile(script, "trl.md", "exec"), {"SMALL": small})
    trainer = Checked.made
    runs = list(Path("outputs/grpo").glob("*/rollouts.jsonl"))
    return {
        "means": [fmean(one for one in scores if one is not None) for scores in trainer.scores],
        "worst": trainer.worst,
        "trained": trainer.trained,
        "recorded": [len(run.read_text("utf-8").splitlines()) for run in runs],
        "log": trainer.state.log_history[0],
        "parameters": sum(one.numel() for one in trainer.model.parameters()),
    }


def failing(folder: Path, spec: Path) -> dict[str, Any]:
    """Train while a third of the model calls fail."""
    torch.manual_seed(1)
    chance, sample = random.Random(3), door.ModelCalls.sample

    async def flaky(self: Any, ids: list[int], sampling: Any) -> Any:
        if chance.random() < 1 / 3:
            raise OSError("the device is busy")
        return await sample(self, ids, sampling)

    door.ModelCalls.sample = flaky  # type: ignore[method-assign]
    with door.HermesRollouts(spec, rows=64, retries=0) as rollouts:
        args = trl.GRPOConfig(
            "out", per_device_train_batch_size=64, num_generations=8, max_steps=3, **PLAIN, **LEARNING
        )
        trainer = Checked(
            model=str(folder / "model"),
            train_dataset=rollouts.train_dataset,
            rollout_func=rollouts.rollout_func,
            reward_funcs=rollouts.reward_funcs,
            args=args,
        )
        trainer.train()
    off = 0.0
    for scores, advantages in zip(trainer.scores, trainer.advantages, strict=True):
        for start in range(0, 64, 8):
            group, given = scores[start : start + 8], advantages[start : start + 8]
            known = [one for one in group if one is not None]
            spread = torch.tensor(known).std().item() if len(known) > 1 else 0.0
            for score, advantage in zip(group, given, strict=True):
                wanted = 0.0 if score is None else (score - fmean(known)) / (spread + 1e-4)
                off = max(off, abs(wanted - advantage))
    return {
        "unscored": [scores.count(None) for scores in trainer.scores],
        "logged": [one["hermes_rl/failed/server_failure"] for one in trainer.state.log_history[:-1]],
        "off": off,
        "worst": trainer.worst,
    }


def ranks(folder: Path, spec: Path) -> dict[str, Any]:
    """Train as one of two processes, each with one and a half groups of a batch."""
    with door.HermesRollouts(spec, rows=16) as rollouts:
        played: list[Any] = []

        play = rollouts.env.run

        async def noted(row: Any, **given: Any) -> Any:
            played.append((given["group"], given["index"], given["size"]))
            return await play(row, **given)

        rollouts.env.run = noted
        args = trl.GRPOConfig(
            "out", per_device_train_batch_size=12, num_generations=8, max_steps=2, **PLAIN, **LEARNING
        )
        trainer = Checked(
            model=str(folder / "model"),
            train_dataset=rollouts.train_dataset,
            rollout_func=rollouts.rollout_func,
            reward_funcs=rollouts.reward_funcs,
            args=args,
        )
        trainer.train()
    Path(f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(played))
    return {"worst": trainer.worst, "processes": trainer.accelerator.num_processes}


def asynchronous(folder: Path, spec: Path) -> dict[str, Any]:
    """Train with AsyncGRPOTrainer on rollouts of two sequences each, with replacements for the kernel and the GPU's
    name.
    """
    import trl.experimental.async_grpo.async_grpo_trainer as trainers
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing

    from tests.real.trl_engine import Engine, Kernel

    packing._flash_attn = lambda: Kernel
    trainers.get_peak_flops_per_device = lambda *_: None
    model = folder / "forgetful"
    engine = Engine(Qwen3ForCausalLM.from_pretrained(model))
    settings = {**PLAIN, **LEARNING, "max_steps": 6, "weight_sync_steps": 1, "dtype": "float32", "token_budget": 0}
    del settings["gradient_checkpointing"]
    args = AsyncGRPOConfig(
        "out-async",
        vllm_server_base_url=engine.url,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=1,
        activation_checkpointing=False,
        max_staleness=3,
        **settings,
    )
    groups: list[Any] = []
    samples: list[list[Any]] = []

    class Kept(door.HermesWorker):
        def _samples(self, group: Any, number: int) -> list[Any]:
            groups.append(group)
            samples.append(super()._samples(group, number))
            return samples[-1]

    with Kept(spec, args, "small", tokenizer=str(model)) as worker:
        trainer = AsyncGRPOTrainer(
            str(model), args=args, train_dataset=worker.train_dataset, rollout_worker=worker, weight_transfer=engine
        )
        trainer.train()
    log = trainer.state.log_history
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    row, wanted = packing.TreeRow(), ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id")
    few = [one for group in samples[:4] for one in group]
    for sample in few:
        row.add({name: getattr(sample, name) for name in wanted})
    packed = row.pack()
    return {
        "steps": trainer.state.global_step,
        "exact": [group.provenance.exact for group in groups],
        "sequences": max(len(rollout.sequences) for rollout in rollouts),
        "staleness": [one["sample/staleness_max"] for one in log if "sample/staleness_max" in one],
        "log": {key: [one.get(key) for one in log] for key in log[-2]},
        "rows": [len(rollouts), sum(map(len, samples))],
        "loss terms": len(packed["token_index"]),
        "sampled": sum(group.provenance.sampled for group in groups[:4]),
        "forwarded": len(packed["input_ids"]),
        "tokens": sum(len(one.input_ids) for one in few),
    }


GAMES, SELF_PLAY_BATCHES = 300, 160


def self_play(folder: Path, spec: Path) -> dict[str, Any]:
    """Train a model on Nim against itself, and evaluate it against a random opponent (`rival.yaml`)."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    small = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 4, "head_dim": 16, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), pad_token_id=tokenizer.eos_token_id, **small))
    warm_up(model, HubTokenizer(str(folder / "tokenizer")))
    settings = {**PLAIN, **LEARNING, "learning_rate": 5e-4, "num_iterations": 4, "entropy_coef": 0.02}
    settings |= {"per_device_train_batch_size": 192, "num_generations": 12, "max_steps": 4 * SELF_PLAY_BATCHES}
    measured = [wins(model, tokenizer, spec.with_name("rival.yaml"))]

    class UntilLearned(TrainerCallback):  # type: ignore[misc]
        """Stop when the game is learned: sampling depends on timing, so the number of batches varies."""

        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % (4 * 20) == 0:
                measured.append(wins(model, tokenizer, spec.with_name("rival.yaml")))
                control.should_training_stop = measured[-1] >= 0.9

    with door.HermesRollouts(spec, rows=200, record="outputs/self_play") as rollouts:
        trainer = Checked(
            model=model,
            processing_class=tokenizer,
            train_dataset=rollouts.train_dataset,
            rollout_func=rollouts.rollout_func,
            reward_funcs=rollouts.reward_funcs,
            args=trl.GRPOConfig("out", **settings),
            callbacks=[UntilLearned()],
        )
        trainer.train()
    return {"wins": measured, "worst": trainer.worst[::4], "trained": trainer.trained[::4]}


def warm_up(model: Any, tokenizer: HubTokenizer) -> None:
    """Train a model to play as badly as the game's book."""
    chance = random.Random(0)
    lines = [chat_tokens(tokenizer, nim.badly_played(chance, 0.0), []).sequences[0] for _ in range(2000)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(300):
        batch = chance.sample(lines, 64)
        scores = model(input_ids=padded([line.tokens for line in batch])).logits[:, :-1]
        labels = padded([line.masks for line in batch], -100)[:, 1:]
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def wins(model: Any, tokenizer: Any, spec: Path) -> float:
    """Return the share of games that a model wins."""

    @torch.no_grad()
    def answer(ids: list[int], most: int) -> hermes_rl.Sampled:
        line, logs = list(ids), []
        while len(logs) < most and (not logs or line[-1] != tokenizer.eos_token_id):
            values = torch.log_softmax(model(input_ids=torch.tensor([line])).logits[0, -1], -1)
            token = int(torch.multinomial(values.exp(), 1))
            line.append(token)
            logs.append(float(values[token]))
        return hermes_rl.Sampled(line[len(ids) :], logs)

    async def sample(ids: list[int], sampling: hermes_rl.Sampling) -> hermes_rl.Sampled:
        return answer(ids, sampling.max_tokens)

    policy = hermes_rl.Policy.sampling(sample, tokenizer, context=1024)

    async def play() -> float:
        async with hermes_rl.open_env(spec) as env:
            rows = [row for row, _ in zip(env.rows(), range(GAMES), strict=False)]
            async with env.groups(1, rows=rows, policy=policy) as groups:
                return fmean([rollout.score or 0.0 async for group in groups for rollout in group.rollouts])

    return asyncio.run(play())


def estimators(folder: Path, spec: Path) -> dict[str, float]:
    """The distances of the advantages of GRPOTrainer and RLOOTrainer from ours; a reward gives the scores."""
    groups, found = score_groups(8), {}
    for name, trainer_class, config in (
        ("std", trl.GRPOTrainer, partial(trl.GRPOConfig, scale_rewards="group")),
        ("mean", trl.GRPOTrainer, partial(trl.GRPOConfig, scale_rewards="none")),
        ("rloo", trl.RLOOTrainer, partial(trl.RLOOConfig, beta=0.0, normalize_advantages=False)),
    ):
        scores, advantages = chain(*groups), list[float]()

        class Noting(trainer_class):  # type: ignore[misc, valid-type]
            taken = advantages

            def _generate_and_score_completions(self, inputs: Any) -> Any:
                out = super()._generate_and_score_completions(inputs)
                self.taken += out["advantages"].tolist()
                return out

        def given(completions: list[str], scores: Iterator[float] = scores, **_: Any) -> list[float]:
            return list(islice(scores, len(completions)))

        model, tokenizer = untrained()
        size = {"per_device_train_batch_size": 8 * len(groups), "num_generations": 8, "max_completion_length": 2}
        Noting(
            model=model,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": "Say."}] * len(groups)),
            reward_funcs=given,
            args=config(f"out-{name}", max_steps=1, **size, **PLAIN),
        ).train()
        found[name] = difference(name, advantages, groups, 1e-4)
    return found


def untrained() -> tuple[Any, Any]:
    """Return a model with random weights, and the small tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(small_tokenizer_path(), padding_side="left")
    tokenizer.eos_token = "<|im_end|>"
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 2, "head_dim": 32, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **small)), tokenizer


class Noted(Checked):
    """Record each rollout's row key, score and number of trained tokens."""

    key = "prompt"
    """The column of the data set that has it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: list[tuple[str, float | None, int]] = []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        out = super()._generate_and_score_completions(inputs)
        trained = (out["completion_mask"] * out["tool_mask"]).sum(1).tolist()
        self.rows += zip((one[self.key] for one in inputs), self.scores[-1], trained, strict=True)
        return out


def stepped_by_trl(spec: Path, write: Callable[[str], str], **given: Any) -> Noted:
    """Train with TRL's own loop of tool calls, in which the model sees a continued prompt."""
    model, tokenizer = untrained()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()

    class Scripted(Noted):
        key = "key"

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            said = [write(tokenizer.decode(ids)) for ids in prompt_ids]
            end = tokenizer.eos_token_id
            return [[*tokenizer.encode(one, add_special_tokens=False), end] for one in said], None

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return super(Checked, self)._compute_loss(model, inputs)  # TRL has no log-probabilities to check

    with door.HermesEnvironments(spec) as environments:
        trainer = Scripted(
            model=model,
            processing_class=tokenizer,
            train_dataset=environments.train_dataset,
            environment_factory=environments.environment_factory,
            reward_funcs=environments.reward_funcs,
            args=trl.GRPOConfig("out-env", **given, **PLAIN),
        )
        trainer.train()
    return trainer


def environments(folder: Path, spec: Path) -> dict[str, Any]:
    """Run TRL's own loop with scripted replies, since a random model would never call a tool."""
    from tests.api.summing import write

    chance = random.Random(0)
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 2}
    trainer = stepped_by_trl(spec, lambda prompt: write(prompt, right=chance.random() < 0.5), **sizes)
    called = [one["tools/call_frequency"] for one in trainer.state.log_history if "tools/call_frequency" in one]
    return {"steps": trainer.state.global_step, "scores": trainer.scores, "called": called}


def doors(folder: Path, spec: Path) -> dict[str, Any]:
    """Run a step of GRPOTrainer and collect AsyncGRPOTrainer's input on the integration tests' spec, with a scripted
    policy.
    """
    from trl.experimental.async_grpo import AsyncGRPOConfig, packing

    write_doors(Path())
    model, tokenizer = untrained()
    sizes = {"per_device_train_batch_size": 3 * MEMBERS, "num_generations": MEMBERS, "max_steps": 1}
    with door.HermesRollouts(spec, policy=Policy.sampling(scripted, TOKENIZER)) as rollouts:
        trainer = Noted(
            model=model,
            processing_class=tokenizer,
            train_dataset=rollouts.train_dataset,
            rollout_func=rollouts.rollout_func,
            reward_funcs=rollouts.reward_funcs,
            args=trl.GRPOConfig("out-doors", **sizes, **PLAIN),
        )
        trainer.train()
    packed, samples = packing.TreeRow(), []
    wanted = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id")
    args = AsyncGRPOConfig("out-async", num_generations=MEMBERS, max_inflight_tasks=MEMBERS, **PLAIN)
    with door.HermesWorker(spec, args, policy=Policy.sampling(scripted, TOKENIZER)) as worker:
        worker.start()
        while len(samples) < 3 * MEMBERS:
            samples.append(worker.rollout_buffer.get(timeout=60))
    for one in samples:
        packed.add({name: getattr(one, name) for name in wanted})
    refused = None
    try:
        stepped_by_trl(spec, answer, **sizes)
    except UserError as error:
        refused = str(error)
    return {
        "refused": refused,
        "rows": trainer.rows,
        "in the loss": trainer.trained,
        "samples": [
            (one.prompt[-1]["content"].split()[2], one.metrics["reward"], int(one.completion_mask.sum()))
            for one in samples
        ],
        "loss terms": len(packed.pack()["token_index"]),
        "stepped": stepped_by_trl(Path("alone.yaml"), answer, **sizes).rows,
    }


if __name__ == "__main__":
    seen = globals()[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    print(json.dumps(seen))
