"""Door to TRL: a spec for `GRPOTrainer` (`HermesRollouts`), for `AsyncGRPOTrainer` (`HermesWorker`), and for TRL's own
loop of tool calls (`HermesEnvironments`).

Owns which rows become TRL's prompts, who samples the tokens of a rollout, and how rollouts look to TRL. What TRL cannot
carry is refused by name. A rollout without a score has the reward None there, which TRL keeps out of every baseline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import json
import logging
import os
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Self

import hermes_rl
from hermes_rl.errors import RunError, UserError
from hermes_rl.integrations.opened import (
    FAILURES,
    Played,
    is_scored,
    logprobs_of,
    require_a_score,
    require_carried,
    require_neutral,
    require_own_baseline,
    values_of,
    without_trainers,
)

logger = logging.getLogger(__name__)

Call = tuple[list[int], hermes_rl.Sampling]
"""One model call: the ids of its prompt, and how to sample."""
Place = tuple[str, int, int]
"""Where a rollout belongs in a batch: the key of its row, the number of its group, and which of its members it is."""
DIFFERENCE = "sampling/sampling_logp_difference"
"""Begins the names under which TRL logs it, with vLLM."""
SIDES = ("chosen", "rejected")
MASKED = -100
"""The label of a token that nothing is learned from."""
GATHERING = 0.005
"""Seconds without a further model call after which those that wait become one batch."""
_TYPES = {"integer": int, "number": float, "boolean": bool, "array": list, "object": dict}


class _Opened:
    """A spec that opens when something of it is first used, on a loop in a thread of its own.

    Each start writes a run directory of its own below `record`. Rollouts of an earlier start are never played into a
    later one: TRL begins at its checkpoint, and the weights that sampled them may be gone.
    """

    def __init__(
        self,
        spec: hermes_rl.Spec | str | Path,
        rows: int | Iterable[str] | None = None,
        environ: Mapping[str, str] | None = None,
        record: str | Path | None = None,
        workers: int | None = None,
    ) -> None:
        self._given, self._workers = (spec, environ), workers
        self._record = None if record is None else Path(record) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._chosen = rows if rows is None or isinstance(rows, int) else list(rows)
        self._splits: dict[str, dict[str, Any]] = {}
        self._stack = ExitStack()

    @cached_property
    def env(self) -> Any:
        """The environment, for what runs on its loop."""
        spec, environ = self._given
        return hermes_rl.open_env(spec, environ=environ, record=self._record, workers=self._workers)

    @cached_property
    def sync(self) -> Any:
        """The environment, open, for other threads than that of its loop."""
        return self._stack.enter_context(hermes_rl.sync(self.env))

    def rows(self, split: str) -> dict[str, Any]:
        """Return the rows of a split by their keys: those that were chosen, of the split that is trained on."""
        if split not in self._splits:
            rows, chosen = self.sync.rows(split), self._chosen if split == "train" else None
            if chosen is None and rows.length is None:
                raise UserError("the spec's rows may be without end, and TRL wants to know how many: say `rows=1000`")
            found = map(self.sync.row, chosen) if isinstance(chosen, list) else islice(rows, chosen)
            self._splits[split] = {row.key: row for row in found}
        return self._splits[split]

    def close(self) -> None:
        """End what is played and release everything; may be called twice."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ------------------------------------------------------------------------------------------------ DPOTrainer


def pairs_collator(pad_token_id: int, max_length: int | None = None) -> Callable[[list[Mapping[str, Any]]], Any]:
    """Return the `data_collator` with which `DPOTrainer` trains on what the model of `dpo.jsonl` has written alone.

    TRL's own takes all behind the prompt for the model's words, what tools have said too. The trainer needs
    `remove_unused_columns=False`, since the tokens and their labels are in columns that it does not know.

    Args:
        pad_token_id: of the tokenizer.
        max_length: tokens of a sequence; what goes beyond it is cut off at the end. Default: all are kept.

    Raises:
        UserError: when it is called with rows that have no tokens.
    """
    import torch
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    whole = DataCollatorForPreference(pad_token_id=pad_token_id)

    def collate(rows: list[Mapping[str, Any]]) -> Any:
        lacking = [row for row in rows if not (row.get("chosen_labels") and row.get("rejected_labels"))]
        if lacking:
            raise UserError(
                f"the pair of group {lacking[0].get('group')} has no `chosen_labels` and `rejected_labels`: the tokens "
                "of its rollouts are not known, or are several sequences; leave such rows out with "
                '`dataset.filter(lambda row: row["chosen_labels"])`, and set remove_unused_columns=False'
            )
        sides = [{f"{side}_ids": row[f"{side}_input_ids"][:max_length] for side in SIDES} for row in rows]
        batch = whole([{**row, "prompt_ids": [], **ids} for row, ids in zip(rows, sides, strict=True)])
        labels = [row[f"{side}_labels"][:max_length] for side in SIDES for row in rows]
        mask = torch.zeros_like(batch["completion_mask"])
        for place, line in enumerate(labels):
            mask[place, : len(line)] = torch.tensor(line) != MASKED
        return {**batch, "completion_mask": mask}

    return collate


# ------------------------------------------------------------------------------------------------ GRPOTrainer


class HermesRollouts(_Opened):
    """A spec for TRL's `GRPOTrainer`, which then trains on the very tokens that were sampled.

    They are sampled by what the trainer has: its model, its vLLM in the same process, or its vLLM server.

    Args:
        spec: a loaded spec, a path, or the name of a shipped one.
        rows: how many rows to train on, or the keys of those; default: all.
        policy: a model that acts in place of the trainer's. Unless it has the trainer's weights at every step, tokens
            of another model are trained on: a warning says so, and the log has `hermes_rl/other_policy`.
        renderer: as `renderer` of a server in a spec; its name is enough.
        sampling: settings of the spec's `agent`, such as `{"max_turns": 4}`. Temperature and top_p are the trainer's.
        concurrency: rollouts at a time, or groups where a reward compares their members; default: all of a batch.
        replays: how often a rollout is played again after a failure that was not the policy's doing.
        allow_inexact: train also on tokens that are not proven to be those that were sampled.
        environ: where `${VAR}` and the keys of servers are looked up.
        record: a folder that every start of the trainer writes a run directory into.
        workers: processes that play, where a server samples: the trainer's vLLM server, or that of a `policy`.
    """

    def __init__(
        self,
        spec: hermes_rl.Spec | str | Path,
        *,
        rows: int | Iterable[str] | None = None,
        policy: hermes_rl.Policy | None = None,
        renderer: str | Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
        replays: int = 2,
        allow_inexact: bool = False,
        environ: Mapping[str, str] | None = None,
        record: str | Path | None = None,
        workers: int | None = None,
    ) -> None:
        super().__init__(spec, rows, environ, record, workers)
        self._policy, self._renderer, self._sampling = policy, renderer, dict(sampling or {})
        self._other_policy = policy is not None
        self._trainer: Any = None
        """Whose logs are listened to."""
        self._concurrency, self._replays, self._allow_inexact = concurrency, replays, allow_inexact
        self._generate: Generate | None = None
        """What samples for the calls in this process; None where another process does."""
        self._calls = ModelCalls()
        self._batches = count()

    @cached_property
    def train_dataset(self) -> Any:
        """A `datasets.Dataset` whose prompts are the keys of the rows."""
        return _dataset(prompt=list(self.rows("train")))

    @cached_property
    def eval_dataset(self) -> Any:
        """The same for the rows that the spec keeps for evaluation."""
        return _dataset(prompt=list(self.rows("eval")))

    @property
    def reward_funcs(self) -> list[Callable[..., list[float | None]]]:
        """The function that says the score of each rollout; functions of yours may stand beside it."""
        return [hermes_rl_score]

    def rollout_func(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Play a rollout for each prompt, which is the key of a row.

        The calling thread samples meanwhile, where the trainer's own model is to do that: the device, autocast and the
        like belong to a thread.

        Raises:
            UserError: settings of the trainer and rollouts exclude each other, or rollouts are none that TRL can take.
            RunError: not one rollout could be scored, and that was not the policy's doing.
        """
        if trainer.tools:
            raise UserError("the trainer's `tools` would run TRL's own loop behind each rollout: name them in the spec")
        self._policy = policy = self._policy or self._policy_of(trainer)
        if self._trainer is not trainer:
            self._trainer = trainer
            if self._other_policy:
                logger.warning(
                    "policy=… acts in place of the trainer's model: unless it has the trainer's weights at every step, "
                    "tokens of another model are trained on. Leave `policy` out to sample with what the trainer has"
                )
            trainer.add_callback(_difference_told_to(policy))
        policy.version = int(trainer.state.global_step)
        training = trainer.model.training
        size = int(trainer.num_generations if training else trainer.num_generations_eval)
        places = places_of(prompts, size, trainer.accelerator.process_index * len(prompts))
        given = {
            "policy": policy,
            "split": "train" if training else "eval",
            "sampling": _sampling(trainer, self._sampling),
            "replays": self._replays,
        }
        self._calls = ModelCalls()
        playing = self.sync.submit(self._play(places, size, given))
        self._calls.answer_until(playing, lambda calls: self._generate(trainer, calls) if self._generate else [])
        columns = columns_of(playing.result(), _tokenizer(trainer).eos_token_id)
        return {**columns, "other_policy": [self._other_policy] * len(prompts)}

    async def _play(self, places: Sequence[Place], size: int, given: Mapping[str, Any]) -> list[Played]:
        """Play every place; the members of groups that are compared are played together."""
        require_own_baseline(self.env, "TRL's GRPOTrainer")
        rows, env, batch = self.rows(given["split"]), self.env, next(self._batches)
        room = nullcontext() if self._concurrency is None else asyncio.Semaphore(self._concurrency)

        async def one(key: str, number: int, index: int) -> list[Played]:
            async with room:
                group = f"{key}@{given['split']}{batch}.{number}"
                rollout = await env.play(rows[key], group=group, index=index, size=size, **given)
                return [(rollout, rollout.ending, rollout.error)]

        async def all_of(key: str, number: int, _: int) -> list[Played]:
            async with room:
                group = await env.play_group(rows[key], size, group=f"{key}@{given['split']}{batch}.{number}", **given)
                if group.dropped is not None:
                    return [(None, group.dropped, group.detail)] * size
                members = sorted(group.rollouts, key=lambda member: member.key.index)
                return [(member, member.ending, member.error) for member in members]

        if env.comparing and size > 1:
            require_whole(places, size, env.comparing)
            work = [asyncio.create_task(all_of(*place)) for place in places if place[2] == 0]
        else:
            work = [asyncio.create_task(one(*place)) for place in places]
        try:
            ended = [played for found in await asyncio.gather(*work) for played in found]
        finally:
            for task in work:
                task.cancel()
        if not self._allow_inexact:
            await asyncio.to_thread(_require_exact, [one[0] for one in ended if is_scored(one[0])])
        return ended

    def _policy_of(self, trainer: Any) -> hermes_rl.Policy:
        """Make the policy that asks what the trainer samples with."""
        tokenizer, args = _tokenizer(trainer), trainer.args
        if trainer.use_vllm and trainer.vllm_mode == "server":
            url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
            return _vllm(url, None, tokenizer.name_or_path, self._renderer)
        if trainer.use_vllm:
            _require_one_vllm(args)
            self._generate, context = generate_with_vllm, args.vllm_max_model_length
        else:
            _require_own_model(trainer)
            config = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()
            self._generate, context = generate_with_model, getattr(config, "max_position_embeddings", None)

        async def sample(ids: list[int], sampling: hermes_rl.Sampling) -> hermes_rl.Sampled:
            return await self._calls.sample(ids, sampling)

        return hermes_rl.Policy.sampling(sample, tokenizer, renderer=self._renderer, context=context)


def hermes_rl_score(
    prompts: Any,
    completions: Any,
    *,
    score: list[float | None],
    rewards: list[dict[str, float]],
    ending: list[str],
    turns: list[int],
    other_policy: Sequence[bool] = (),
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Return the scores of the rollouts, None for those without one; log failures by their cause, rewards and turns."""
    if log_metric is not None:
        ended = Counter(ending)
        # Zeros too: TRL averages over those processes that log a name.
        for cause in FAILURES:
            log_metric(f"hermes_rl/failed/{cause}", ended[cause] / len(ending))
        log_metric("hermes_rl/unscored", score.count(None) / len(score))
        log_metric("hermes_rl/turns", fmean(turns))
        log_metric("hermes_rl/other_policy", float(any(other_policy)))
        for name in dict.fromkeys(name for values in rewards for name in values):
            log_metric(f"hermes_rl/rewards/{name}", fmean(values[name] for values in rewards if name in values))
    return score


def places_of(prompts: Sequence[str], size: int, first: int) -> list[Place]:
    """Return where each rollout of this process belongs.

    Args:
        prompts: keys of rows, each `size` times in a row over the batches of all processes.
        size: members of a group.
        first: how many prompts the processes before this one have.
    """
    places = [(key, place // size, place % size) for place, key in enumerate(prompts, start=first)]
    keys: dict[int, Any] = {}
    for key, number, _ in places:
        if not isinstance(key, str) or keys.setdefault(number, key) != key:
            raise UserError(
                f"the prompts of a group are {size} times the key of one row, not {keys.get(number, key)!r} and "
                f"{key!r}: give the trainer `train_dataset` and `eval_dataset` of HermesRollouts"
            )
    return places


def require_whole(places: Sequence[Place], size: int, comparing: Sequence[str]) -> None:
    """Refuse a batch of this process that has parts of groups.

    Raises:
        UserError: rewards compare the members of a group, and other processes have some of them.
    """
    members = Counter(number for _, number, _ in places)
    if set(members.values()) != {size}:
        raise UserError(
            f"{', '.join(comparing)} compares the members of a group, and TRL has split groups of {size} between "
            f"processes that have {len(places)} rollouts each: make per_device_train_batch_size times "
            "steps_per_generation (per_device_eval_batch_size in evaluation) a multiple of the group's size"
        )


def columns_of(ended: Sequence[Played], end: int) -> dict[str, Any]:
    """Return rollouts as TRL takes them. One without a score is a single token, `end`, that is not trained on.

    Raises:
        UserError: a rollout has several sequences.
        RunError: not one rollout could be scored, and that was not the policy's doing.
    """
    require_a_score(ended)
    nothing = hermes_rl.Example([end], [end], [0], [0.0], (None, None))
    examples = [_example(rollout) if is_scored(rollout) else nothing for rollout, _, _ in ended]
    known = all(example.logprobs is not None for example in examples)
    return {
        "prompt_ids": [example.prompt_ids for example in examples],
        "completion_ids": [example.response_ids for example in examples],
        "logprobs": [example.logprobs for example in examples] if known else None,
        "env_mask": [example.mask for example in examples],
        "score": [rollout.score if is_scored(rollout) else None for rollout, _, _ in ended],
        "rewards": [values_of(rollout) if rollout is not None else {} for rollout, _, _ in ended],
        "ending": [str(ending) for _, ending, _ in ended],
        "turns": [rollout.turns if rollout is not None else 0 for rollout, _, _ in ended],
    }


def _example(rollout: hermes_rl.Rollout) -> hermes_rl.Example:
    examples = require_carried(rollout, "TRL's GRPOTrainer").examples()
    if len(examples) != 1:
        raise UserError(
            f"rollout {rollout.id} has {len(examples)} sequences, as the policy did not see all of it in one context, "
            "and TRL's rollout_func takes one: choose a renderer that keeps earlier turns "
            "(renderer={'thinking_retention': 'all'}), or train with AsyncGRPOTrainer and HermesWorker, which take all"
        )
    return examples[0]


def _require_exact(rollouts: list[hermes_rl.Rollout]) -> None:
    if rollouts:
        certificate = hermes_rl.certify(hermes_rl.Group("batch", rollouts[0].key.row, rollouts))
        _require_certified(certificate.problems)


def _require_certified(problems: Sequence[str]) -> None:
    if problems:
        raise UserError(
            f"tokens are not proven to be those that were sampled, so they are not trained on ({len(problems)} "
            f"problems, the first: {problems[0]}). allow_inexact=True trains on them all the same"
        )


def _dataset(**columns: list[Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(columns)


# ------------------------------------------------------------------------------------ who samples for GRPOTrainer

Generate = Callable[[Any, Sequence[Call]], Sequence[hermes_rl.Sampled]]
"""What the trainer samples with: the trainer, and calls to answer together."""


class ModelCalls:
    """Model calls of rollouts, which play on another thread; the thread that owns the model answers them in batches."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Call, concurrent.futures.Future[hermes_rl.Sampled]] | None] = (
            queue.SimpleQueue()
        )

    async def sample(self, ids: list[int], sampling: hermes_rl.Sampling) -> hermes_rl.Sampled:
        """Wait for the answer of the other thread."""
        answer: concurrent.futures.Future[hermes_rl.Sampled] = concurrent.futures.Future()
        self._waiting.put(((ids, sampling), answer))
        return await asyncio.wrap_future(answer)

    def answer_until(
        self,
        playing: concurrent.futures.Future[Any],
        generate: Callable[[Sequence[Call]], Sequence[hermes_rl.Sampled]],
    ) -> None:
        """Answer calls until `playing` has ended; what ends this sooner ends `playing` as well."""
        playing.add_done_callback(lambda _: self._waiting.put(None))
        try:
            while (first := self._waiting.get()) is not None:
                batch, ended = [first], False
                while not ended:
                    try:
                        further = self._waiting.get(timeout=GATHERING)
                    except queue.Empty:
                        break
                    ended = further is None
                    batch += [further] if further is not None else []
                self._answer([one for one in batch if one[1].set_running_or_notify_cancel()], generate)
                if ended:
                    return
        except BaseException:  # Ctrl-C too: what is played on another thread would go on
            playing.cancel()
            raise

    def _answer(
        self,
        batch: Sequence[tuple[Call, concurrent.futures.Future[hermes_rl.Sampled]]],
        generate: Callable[[Sequence[Call]], Sequence[hermes_rl.Sampled]],
    ) -> None:
        if not batch:
            return
        try:
            answers = generate([call for call, _ in batch])
        except Exception as error:  # noqa: BLE001 - a failed attempt of each rollout that asked
            for _, answer in batch:
                answer.set_exception(error)
            return
        for (_, answer), sampled in zip(batch, answers, strict=True):
            answer.set_result(sampled)


def generate_with_model(trainer: Any, calls: Sequence[Call]) -> list[hermes_rl.Sampled]:
    """Sample with the model that is trained, all calls in one batch."""
    import torch
    from trl.models.utils import unwrap_model_for_generation

    end = _tokenizer(trainer).pad_token_id
    width = max(len(ids) for ids, _ in calls)
    device = trainer.accelerator.device
    prompts = torch.tensor([[end] * (width - len(ids)) + ids for ids, _ in calls], device=device)
    attention = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in calls], device=device)
    # Every setting is given, since the model's generation_config.json fills in what is not.
    settings = {
        "max_new_tokens": max(sampling.max_tokens for _, sampling in calls),
        "eos_token_id": sorted({token for _, sampling in calls for token in sampling.stop_ids}) or None,
        "pad_token_id": end,
        "do_sample": True,
        **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0},
    }
    temperature = calls[0][1].temperature
    scaled = _Scaled(1.0 if temperature is None else temperature)
    unwrapped = unwrap_model_for_generation(
        trainer.model_wrapped,
        trainer.accelerator,
        generation_kwargs=settings,
        gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
    )
    with unwrapped as model, torch.no_grad():
        ids = model.generate(input_ids=prompts, attention_mask=attention, logits_processor=[scaled], **settings)
    values = torch.stack(scaled.taken(ids), 1).tolist()
    return [
        _until_end(line, logs, call[1]) for line, logs, call in zip(ids[:, width:].tolist(), values, calls, strict=True)
    ]


class _Scaled:
    """Divides scores by the temperature, and notes the log-probability of each token that is then sampled.

    Noting it step by step keeps one step of scores in memory, where `output_scores` keeps all of them.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._last: Any = None
        self._noted: list[Any] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self._note(input_ids)
        self._last = scores.float() / self._temperature
        return self._last

    def taken(self, ids: Any) -> list[Any]:
        """Return the log-probabilities of the sampled tokens, step by step."""
        self._note(ids)
        return self._noted

    def _note(self, ids: Any) -> None:
        if self._last is not None:
            chosen = self._last.gather(-1, ids[:, -1:]).squeeze(-1)
            self._noted.append(chosen - self._last.logsumexp(-1))


def _until_end(ids: list[int], logprobs: list[float], sampling: hermes_rl.Sampling) -> hermes_rl.Sampled:
    """Return the tokens of one call: the batch went on until the longest had ended."""
    length = min(len(ids), sampling.max_tokens)
    length = next((place for place, token in enumerate(ids[:length], start=1) if token in sampling.stop_ids), length)
    finish = "stop" if ids[length - 1] in sampling.stop_ids else "length"
    return hermes_rl.Sampled(ids[:length], [min(value, 0.0) for value in logprobs[:length]], finish)  # NaN stays


def generate_with_vllm(trainer: Any, calls: Sequence[Call]) -> list[hermes_rl.Sampled]:
    """Sample with the vLLM that the trainer has in this process."""
    from vllm import SamplingParams

    asked = [
        SamplingParams(
            temperature=1.0 if sampling.temperature is None else sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_ids),
            seed=sampling.seed,
            logprobs=0,
            detokenize=False,
        )
        for _, sampling in calls
    ]
    answers = trainer.vllm_generation.llm.generate(
        [{"prompt_token_ids": ids} for ids, _ in calls], sampling_params=asked, use_tqdm=False
    )
    outputs = [answer.outputs[0] for answer in answers]
    return [
        hermes_rl.Sampled(
            list(one.token_ids),
            [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)],
            "length" if one.finish_reason == "length" else "stop",
        )
        for one in outputs
    ]


def _tokenizer(trainer: Any) -> Any:
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def _vllm(url: str, model: Any, tokenizer: str, renderer: Any) -> hermes_rl.Policy:
    return hermes_rl.Policy.server("vllm", f"{url.rstrip('/')}/v1", model, tokenizer=tokenizer, renderer=renderer)


def _difference_told_to(policy: hermes_rl.Policy) -> Any:
    """Return a callback that hears in TRL's logs how far its log-probabilities are from the sampled ones."""
    from transformers import TrainerCallback

    class Listener(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            mean, largest = (logs or {}).get(f"{DIFFERENCE}/mean"), (logs or {}).get(f"{DIFFERENCE}/max")
            if mean is not None:
                policy.logprob_difference.tell(float(mean), None if largest is None else float(largest))

    return Listener()


def _sampling(args: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the agent's settings with the temperature that the trainer computes its log-probabilities with.

    Raises:
        UserError: the trainer is to sample in a way that rollouts do not.
    """
    own = without_trainers(given, "the trainer", "the configuration of TRL")
    require_neutral({name: getattr(args, name) for name in ("top_k", "min_p", "repetition_penalty")}, "the trainer")
    return {**own, "temperature": args.temperature, "top_p": args.top_p}


def _require_one_vllm(args: Any) -> None:
    """Refuse a vLLM in this process that several processes have to call at the same time, or that sleeps."""
    if args.vllm_tensor_parallel_size > 1:
        raise UserError(
            "vllm_tensor_parallel_size > 1: processes would have to sample in step, and rollouts ask when they are "
            "ready. Set it to 1, or use vllm_mode='server'"
        )
    if args.vllm_enable_sleep_mode:
        raise UserError("vllm_enable_sleep_mode puts vLLM to sleep between calls: leave it out, or use a vLLM server")


def _require_own_model(trainer: Any) -> None:
    """Refuse to sample with the trainer's model where that takes all processes at once, or is to be done otherwise."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    if trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3):
        raise UserError(
            "the model is sharded (FSDP or ZeRO-3), so all processes would have to sample in step, and rollouts ask "
            "when they are ready. Use vLLM (use_vllm=True), or a strategy that keeps the model whole"
        )
    if trainer.use_transformers_continuous_batching:
        raise UserError("use_transformers_continuous_batching is not supported for rollouts: leave it out, or use vLLM")
    if trainer.top_p != 1.0:
        raise UserError(
            f"top_p={trainer.top_p}: the trainer's log-probabilities know nothing of it, so tokens would seem likelier "
            "than they were. Leave it at 1, or use vLLM with vllm_importance_sampling_correction"
        )
    if trainer.args.generation_kwargs:
        raise UserError("generation_kwargs of the trainer are not applied to rollouts: leave them out, or use vLLM")


# ------------------------------------------------------------------------------------------- AsyncGRPOTrainer


class HermesWorker(_Opened):
    """A spec as the `rollout_worker` of TRL's `AsyncGRPOTrainer`: groups are played while the trainer trains.

    Args:
        spec: a loaded spec, a path, or the name of a shipped one.
        args: the trainer's AsyncGRPOConfig.
        model: the name of the model at the trainer's vLLM server, and of its tokenizer.
        tokenizer: a hub name or a folder, where the model's name is none.
        adapter: where the trainer trains an adapter: what it calls it at the server; its versions get names of theirs.
        policy: a model that acts in place of that at the trainer's server.
        renderer: as `renderer` of a server in a spec; its name is enough.
        sampling: settings of the spec's `agent`, such as `{"max_turns": 4}`. Temperature and top_p are the trainer's.
        drop_uniform: groups with equal scores are not trained on.
        normalise: how scores become advantages: "std", "mean" or "none".
        allow_inexact: train also on tokens that are not proven to be those that were sampled.
        environ: where `${VAR}` and the keys of servers are looked up.
        record: a folder that every start of the trainer writes a run directory into.
        workers: processes that play.

    Attributes:
        rollout_buffer, metrics_queue: what TRL takes rollouts and metrics from.
    """

    def __init__(
        self,
        spec: hermes_rl.Spec | str | Path,
        args: Any,
        model: str | None = None,
        *,
        tokenizer: str | None = None,
        adapter: str | None = None,
        policy: hermes_rl.Policy | None = None,
        renderer: str | Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        drop_uniform: bool = False,
        normalise: Any = "std",
        allow_inexact: bool = False,
        environ: Mapping[str, str] | None = None,
        record: str | Path | None = None,
        workers: int | None = None,
    ) -> None:
        super().__init__(spec, None, environ, record, workers)
        try:
            from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
        except ImportError as error:
            raise UserError(f"HermesWorker needs TRL 1.16 ({error}): pip install 'hermes-rl[trl]'") from error
        self._sample_of = RolloutSample
        self._args, self._version = args, 0
        if policy is None and model is None:
            raise UserError("name the `model` that the trainer's vLLM server serves, or give a `policy`")
        name = model if adapter is None else lambda: f"{adapter}-v{self._version}"
        self._policy = policy or _vllm(args.vllm_server_base_url, name, tokenizer or str(model), renderer)
        self._sampling, self._drop_uniform, self._normalise = _sampling(args, sampling or {}), drop_uniform, normalise
        self._allow_inexact = allow_inexact
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=args.queue_maxsize)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._left_out: Counter[str] = Counter()
        self._failure = "none, so a budget of the spec is used up"
        self._playing: concurrent.futures.Future[None] | None = None

    @cached_property
    def train_dataset(self) -> Any:
        """A `datasets.Dataset` of the rows' keys, for TRL to count epochs by; of endless rows, one."""
        rows = self.sync.rows()
        return _dataset(prompt=[row.key for row in islice(rows, 1 if rows.length is None else None)])

    def start(self) -> None:
        """Begin to play; TRL calls it once the server has the trainer's weights."""
        self._policy.version = self._version
        self._playing = self.sync.submit(self._play())

    def update_model_version(self, model_version: int) -> None:
        """Note that the server has new weights."""
        self._version = model_version
        self._policy.version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the playing, or a RunError where the loop does not answer for so many seconds."""
        if self._playing is None:
            raise RunError("the worker has not been started")
        if self._playing.done():
            self._playing.result()
            raise RunError(f"no more groups are played. The last failure: {self._failure}")
        try:
            self.sync.submit(asyncio.sleep(0)).result(stale_after_s)
        except concurrent.futures.TimeoutError:
            raise RunError(f"the loop that plays has not answered for {stale_after_s:.0f} s") from None

    def stop(self) -> None:
        """End what is played and release everything."""
        self.close()

    async def _play(self) -> None:
        inflight = self._args.max_inflight_tasks
        playing = self.env.groups(
            self._args.num_generations,
            self._policy,
            concurrency=inflight if inflight > 0 else None,
            drop_uniform=self._drop_uniform,
            max_staleness=self._args.max_staleness,
            sampling=self._sampling,
        )
        async with playing as groups:
            for number in count():
                group = await anext(groups, None)
                if group is None:
                    return
                self.metrics_queue.put(self._metrics(group, groups.left_out))
                for sample in self._samples(group, number):
                    while self.rollout_buffer.full():  # noqa: ASYNC110 - another thread empties it, and none fills it
                        await asyncio.sleep(0.05)
                    sample.enqueued_at = time.time()
                    self.rollout_buffer.put_nowait(sample)

    def _samples(self, group: hermes_rl.Group, number: int) -> list[Any]:
        """Return a sample for each sequence of a group that was not dropped, and in which something is trained on."""
        import numpy as np

        if group.dropped is not None:
            return []
        assert group.certificate is not None
        if not self._allow_inexact:
            _require_certified(group.certificate.problems)
        samples, prompt = [], self.env.prompt(group.row)
        oldest = group.certificate.oldest
        for rollout, advantage in zip(group.rollouts, group.advantages(self._normalise), strict=True):
            values = {f"rewards/{name}": value for name, value in values_of(rollout).items()}
            require_carried(rollout, "TRL's AsyncGRPOTrainer")
            for example in rollout.examples() if advantage is not None else []:
                if not any(example.mask):
                    continue
                before = [0] * len(example.prompt_ids)
                logprobs = [*before, *logprobs_of(example, "TRL's AsyncGRPOTrainer")]
                samples.append(
                    self._sample_of(
                        prompt=prompt,
                        completion=rollout.messages[len(prompt) :],
                        input_ids=np.asarray(example.prompt_ids + example.response_ids),
                        completion_mask=np.asarray(before + example.mask),
                        old_log_probs=np.asarray(logprobs, dtype=np.float32),
                        advantage=advantage,
                        model_version=self._version if oldest is None else oldest,
                        group_id=number,
                        metrics={"reward": rollout.score, "reward_std": pstdev(group.scores), **values},
                    )
                )
        return samples

    def _metrics(self, group: hermes_rl.Group, left_out: Counter[str]) -> dict[str, Any]:
        """Return what TRL is told of a group; pairs are parts of wholes, which it adds up."""
        new = Counter(left_out)
        new.subtract(self._left_out)
        self._left_out = Counter(left_out)
        if group.dropped is not None:
            self._failure = f"{group.dropped}: {group.detail}"
            return {"hermes_rl/dropped_frac": (1, 1), f"hermes_rl/failed_{group.dropped}_total": 1.0}
        assert group.certificate is not None
        metrics: dict[str, Any] = {
            "hermes_rl/dropped_frac": (0, 1),
            "hermes_rl/zero_variance_frac": (new["uniform"] + group.uniform, new["uniform"] + 1),
            "hermes_rl/left_out_stale_total": float(new["stale"]),
            "hermes_rl/turns_mean": fmean(rollout.turns for rollout in group.rollouts),
        }
        if group.certificate.oldest is not None and group.certificate.newest is not None:
            metrics["hermes_rl/versions_spread_max"] = float(group.certificate.newest - group.certificate.oldest)
        return metrics


# ------------------------------------------------------------------------------------- TRL's own loop of tool calls


class HermesEnvironments(_Opened):
    """A spec's tools, sandbox and rewards for the loop of TRL: `GRPOTrainer(environment_factory=…)`.

    TRL renders, samples and stops; budgets of the spec hold, and its endings. A spec with a simulated user, with tools
    that differ between rows, or with rewards that compare is refused: `HermesRollouts` plays it.

    Args:
        spec, rows, environ, record: as for `HermesRollouts`.
    """

    def __init__(
        self,
        spec: hermes_rl.Spec | str | Path,
        *,
        rows: int | Iterable[str] | None = None,
        environ: Mapping[str, str] | None = None,
        record: str | Path | None = None,
    ) -> None:
        super().__init__(spec, rows, environ, record)

    @cached_property
    def train_dataset(self) -> Any:
        """A `datasets.Dataset` with the messages of each row, and its key."""
        rows = self.rows("train")
        return _dataset(prompt=[self.sync.prompt(row) for row in rows.values()], key=list(rows))

    @cached_property
    def environment_factory(self) -> type[Any]:
        """A class whose methods are the spec's tools."""
        if self.env.spec.user is not None:
            raise UserError("the spec has a simulated user, and TRL's own loop knows none: use HermesRollouts")
        require_own_baseline(self.env, "TRL's own loop")
        if self.env.comparing:
            raise UserError(
                f"{', '.join(self.env.comparing)} compares the members of a group, and TRL's own loop plays each "
                "rollout by itself: use HermesRollouts"
            )
        tools = [self.sync.tools(row) for row in self.rows("train").values()]
        if any(tool != tools[0] for tool in tools):
            raise UserError("the tools differ between rows, and TRL's own loop has one set: use HermesRollouts")
        methods = {tool["function"]["name"]: _method(tool["function"]) for tool in tools[0]}
        return type("HermesEnvironment", (_Stepped,), {"_opened": self, **methods})

    @property
    def reward_funcs(self) -> list[Callable[..., list[float | None]]]:
        """The function that ends each rollout with the model's last words, and says its score."""

        def hermes_rl_score(completions: Any, environments: Any, **_: Any) -> list[float | None]:
            return [one._ended(turns) for one, turns in zip(environments, completions, strict=True)]

        return [hermes_rl_score]


class _Stepped:
    """One rollout that TRL steps; a subclass has a method for each tool. TRL takes every public method for a tool."""

    _opened: HermesEnvironments

    def __init__(self) -> None:
        self._session: Any = None
        self._numbers = count(1)

    def reset(self, key: str, **_: Any) -> None:
        """Begin the rollout of a row."""
        self._close()
        self._session = self._opened.sync.session(self._opened.rows("train")[key])
        self._session.start()

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call{next(self._numbers)}", "type": "function", "function": function}
        turn = None if self._session.done else self._session.step({"content": "", "tool_calls": [call]})
        if turn is None:  # TRL shows the model what a tool raises
            raise ValueError(f"the episode is over: {self._session.rollout.ending}")
        return str(turn.messages[-1]["content"])

    def _ended(self, completion: Sequence[Mapping[str, Any]]) -> float | None:
        """Answer with the model's last words; None where the rollout has no score, or does not end with them."""
        last = completion[-1] if completion else {}
        if not self._session.done:
            self._session.step(last.get("content") or "" if last.get("role") == "assistant" else "")
        rollout = self._session.rollout
        self._close()
        return None if rollout is None else require_carried(rollout, "TRL's own loop").score

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()


def _method(tool: Mapping[str, Any]) -> Callable[..., str]:
    """Return a tool as a method, from whose signature and docstring TRL makes the schema again."""
    wanted = tool["parameters"].get("properties", {})
    required = tool["parameters"].get("required", ())

    def call(self: _Stepped, **arguments: Any) -> str:
        return self._call(tool["name"], arguments)

    types = {name: _TYPES.get(given.get("type", ""), str) for name, given in wanted.items()}
    lines = [f"    {name}: {_one_line(given.get('description') or name)}" for name, given in wanted.items()]
    call.__name__ = tool["name"]
    call.__doc__ = "\n".join([_one_line(tool.get("description") or tool["name"]), "", "Args:", *lines])
    call.__annotations__ = {**types, "return": str}
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name, kind in sorted(types.items(), key=lambda one: one[0] not in required):
        default = inspect.Parameter.empty if name in required else None
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)
        )
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _one_line(text: str) -> str:
    return " ".join(text.split())
