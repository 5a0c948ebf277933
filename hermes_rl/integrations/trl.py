"""Door to TRL: a spec for `GRPOTrainer` (`HermesRollouts`), for `AsyncGRPOTrainer` (`HermesWorker`), and for TRL's own
loop of tool calls (`HermesEnvironments`).

Owns which rows become TRL's prompts, who samples the tokens of a rollout, and how rollouts look to TRL. What TRL cannot
carry is refused by name. A rollout without a score has the reward None there, which TRL keeps out of every baseline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import hermes_rl
from hermes_rl.errors import RunError, UserError, install_command
from hermes_rl.integrations.beside import Beside, Call, ModelCalls, dataset
from hermes_rl.integrations.opened import (
    logprobs_of,
    require_own_baseline,
    require_own_policy,
    trained_seats,
    values_of,
)
from hermes_rl.integrations.pull import (
    FAILURES,
    BatchPlace,
    BatchResult,
    Pull,
    is_scored,
    parameters,
    require_a_score,
    sampled_by_vllm,
)
from hermes_rl.integrations.trl_loop import HermesEnvironments as HermesEnvironments

logger = logging.getLogger(__name__)
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What the trainers sample with."""
WHERE = "the configuration of TRL"
DIFFERENCE = "sampling/sampling_logp_difference"
"""Begins the names under which TRL logs it, with vLLM."""
SIDES = ("chosen", "rejected")
MASKED = -100
"""The label of a token that nothing is learned from."""


# ------------------------------------------------------------------------------------------------ DPOTrainer


def pairs_collator(pad_token_id: int, max_length: int | None = None) -> Callable[[list[Mapping[str, Any]]], Any]:
    """Return the `data_collator` with which `DPOTrainer` trains on what the model of `dpo.jsonl` has written alone.

    TRL's own takes all behind the prompt for the model's words, what tools have said too. The trainer needs
    `remove_unused_columns=False`, since the tokens and their labels are in columns that it does not know.

    Args:
        pad_token_id: of the tokenizer.
        max_length: tokens of a sequence; what goes beyond it is cut off at the end. Default: all are kept.

    It raises `UserError` when it is called with rows that have no tokens.
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


class HermesRollouts(Beside):
    """A spec for TRL's `GRPOTrainer`, which then trains on the very tokens that were sampled.

    They are sampled by what the trainer has: its model, its vLLM in the same process, or its vLLM server.

    Args:
        spec, rows, environ, record: as for `Beside`.
        policy: a model that acts in place of the trainer's. Unless it has the trainer's weights at every step, tokens
            of another model are trained on: a warning says so, and the log has `hermes_rl/other_policy`.
        renderer, sampling, concurrency, replays, allow_inexact: as for `Pull`.
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
        self._policy, self._renderer = policy, renderer
        self._settings: dict[str, Any] = {"sampling": sampling, "concurrency": concurrency}
        self._settings |= {"replays": replays, "allow_inexact": allow_inexact}
        self._pull: Pull | None = None
        self._trainer: Any = None
        """Whose logs are listened to."""
        self._generate: Generate | None = None
        """What samples for the calls in this process; None where another process does."""
        self._calls = ModelCalls()
        self._batches = count()

    @cached_property
    def train_dataset(self) -> Any:
        """A `datasets.Dataset` whose prompts are the keys of the rows."""
        return dataset(prompt=list(self.rows("train")))

    @cached_property
    def eval_dataset(self) -> Any:
        """The same for the rows that the spec keeps for evaluation."""
        return dataset(prompt=list(self.rows("eval")))

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
        if self._pull is None:
            policy = self._policy or self._policy_of(trainer)
            self._pull = Pull("TRL", self.env, policy, where=WHERE, seats=True, **self._settings)
        pull = self._pull
        assert pull.policy is not None
        if self._trainer is not trainer:
            self._trainer = trainer
            if self._policy is not None:
                logger.warning(
                    "policy=… acts in place of the trainer's model: unless it has the trainer's weights at every step, "
                    "tokens of another model are trained on. Leave `policy` out to sample with what the trainer has"
                )
            trainer.add_callback(_difference_told_to(pull.policy))
        pull.policy.version = int(trainer.state.global_step)
        training = trainer.model.training
        size = int(trainer.num_generations if training else trainer.num_generations_eval)
        numbered = places_of(prompts, size, trainer.accelerator.process_index * len(prompts))
        require_own_baseline(self.env, "TRL", seats=True)
        together = self.sync.comparing or (["agents"] if trained_seats(self.env) > 1 else [])
        if size > 1 and together:
            require_whole(numbered, size, together)
        split, batch = "train" if training else "eval", next(self._batches)
        rows = self.rows(split)
        places = [
            BatchPlace(rows[key], f"{key}@{split}{batch}.{number}", member, size) for key, number, member in numbered
        ]
        sampling = pull.sampling({name: getattr(trainer, name) for name in SETTINGS})
        self._calls = ModelCalls()
        playing = self.sync.submit(pull.play_all(places, split, sampling))
        self._calls.answer_until(playing, lambda calls: self._generate(trainer, calls) if self._generate else [])
        columns = columns_of(playing.result(), _tokenizer(trainer).eos_token_id, pull)
        return {**columns, "other_policy": [self._policy is not None] * len(prompts)}

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


def places_of(prompts: Sequence[str], size: int, first: int) -> list[tuple[str, int, int]]:
    """Return where each rollout of this process belongs: the key of its row, its group's number, which member it is.

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


def require_whole(places: Sequence[tuple[str, int, int]], size: int, comparing: Sequence[str]) -> None:
    """Refuse a batch of which other processes have some members of a group, where rewards compare these."""
    members = Counter(number for _, number, _ in places)
    if set(members.values()) != {size}:
        raise UserError(
            f"{', '.join(comparing)} compares the members of a group, and TRL has split groups of {size} between "
            f"processes that have {len(places)} rollouts each: make per_device_train_batch_size times "
            "steps_per_generation (per_device_eval_batch_size in evaluation) a multiple of the group's size"
        )


def columns_of(ended: Sequence[BatchResult], end: int, pull: Pull) -> dict[str, Any]:
    """Return rollouts as TRL takes them. One without a score is a single token, `end`, that is not trained on.

    Raises:
        UserError: a rollout has several sequences, or one that is not proven.
        RunError: not one rollout could be scored, and that was not the policy's doing.
    """
    require_a_score(ended)
    examples = [hermes_rl.Example([end], [end], [0], [0.0], (None, None)) for _ in ended]
    for place, (rollout, _, _) in enumerate(ended):
        if is_scored(rollout):
            several = pull.examples(rollout)
            if len(several) != 1:
                raise UserError(
                    f"rollout {rollout.id} has {len(several)} sequences, as the policy did not see all of it in one "
                    f"context, and TRL's rollout_func takes one: {rollout.one_context}, or train with "
                    "AsyncGRPOTrainer and HermesWorker, which take all"
                )
            examples[place] = several[0]
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


# ------------------------------------------------------------------------------------ who samples for GRPOTrainer

Generate = Callable[[Any, Sequence[Call]], Sequence[hermes_rl.Sampled]]
"""What the trainer samples with: the trainer, and calls to answer together."""


def generate_with_model(trainer: Any, calls: Sequence[Call]) -> list[hermes_rl.Sampled]:
    """Sample with the model that is trained: a batch for all calls of equal settings, which may differ between seats.

    Raises:
        UserError: a seat has a `top_p` of its own.
    """
    alike: dict[tuple[float, tuple[int, ...]], list[int]] = {}
    for place, (_, sampling) in enumerate(calls):
        if sampling.top_p not in (None, 1.0):
            raise UserError(
                f"agents.….agent.top_p={sampling.top_p}: the trainer's log-probabilities know nothing of it, so tokens "
                "would seem likelier than they were. Leave it out, or use vLLM"
            )
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        alike.setdefault((temperature, sampling.stop_ids), []).append(place)
    answers: dict[int, hermes_rl.Sampled] = {}
    for (temperature, _), places in alike.items():
        batch = [calls[place] for place in places]
        answers.update(zip(places, _generate_alike(trainer, batch, temperature), strict=True))
    return [answers[place] for place in range(len(calls))]


def _generate_alike(trainer: Any, calls: Sequence[Call], temperature: float) -> list[hermes_rl.Sampled]:
    """Sample calls of the same stop tokens at one temperature, in one batch."""
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
        "eos_token_id": sorted(calls[0][1].stop_ids) or None,
        "pad_token_id": end,
        "do_sample": True,
        **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0},
    }
    scaled = _Scaled(temperature)
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

    fixed: dict[str, Any] = {"logprobs": 0, "detokenize": False}
    params = [SamplingParams(**parameters(sampling), seed=sampling.seed, **fixed) for _, sampling in calls]
    answers = trainer.vllm_generation.llm.generate(
        [{"prompt_token_ids": ids} for ids, _ in calls], sampling_params=params, use_tqdm=False
    )
    return [sampled_by_vllm(answer) for answer in answers]


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


class HermesWorker(Beside):
    """A spec as the `rollout_worker` of TRL's `AsyncGRPOTrainer`: groups are played while the trainer trains.

    Args:
        spec, environ, record, workers: as for `Beside`.
        args: the trainer's AsyncGRPOConfig.
        model: the name of the model at the trainer's vLLM server, and of its tokenizer.
        tokenizer: a hub name or a folder, where the model's name is none.
        adapter: where the trainer trains an adapter: what it calls it at the server; its versions get names of theirs.
        policy: a model that acts in place of that at the trainer's server.
        renderer, sampling, allow_inexact: as for `Pull`.
        drop_uniform: groups with equal scores are not trained on.
        normalise: how scores become advantages: "std", "mean" or "none".

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
        require_own_policy(self.env, "TRL")
        try:
            from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
        except ImportError as error:
            raise UserError(f"HermesWorker needs TRL 1.16 ({error}): {install_command('trl')}") from error
        self._sample_of = RolloutSample
        self._args, self._version = args, 0
        if policy is None and model is None:
            raise UserError("name the `model` that the trainer's vLLM server serves, or give a `policy`")
        name = model if adapter is None else lambda: f"{adapter}-v{self._version}"
        self._policy = policy or _vllm(args.vllm_server_base_url, name, tokenizer or str(model), renderer)
        self._pull = Pull("TRL", self.env, self._policy, sampling=sampling, where=WHERE, allow_inexact=allow_inexact)
        self._sampling = self._pull.sampling({name: getattr(args, name) for name in SETTINGS})
        self._drop_uniform, self._normalise = drop_uniform, normalise
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=args.queue_maxsize)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._left_out: Counter[str] = Counter()
        self._failure = "none, so a budget of the spec is used up"
        self._playing: concurrent.futures.Future[None] | None = None

    @cached_property
    def train_dataset(self) -> Any:
        """A `datasets.Dataset` of the rows' keys, for TRL to count epochs by; of endless rows, one."""
        rows = self.sync.rows()
        return dataset(prompt=[row.key for row in islice(rows, 1 if rows.length is None else None)])

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
                for sample in await asyncio.to_thread(self._samples, group, number):
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
        samples = []
        oldest = group.certificate.oldest
        compared = [
            (part, *member)
            for part in group.compared()
            for member in zip(part.rollouts, part.advantages(self._normalise), strict=True)
        ]
        for part, rollout, advantage in compared:
            prompt = rollout.messages[: rollout.result.prompt_length] if rollout.result is not None else []
            values = {f"rewards/{name}": value for name, value in values_of(rollout).items()}
            for example in self._pull.examples(rollout) if advantage is not None else []:
                if not any(example.mask):
                    continue
                before = [0] * len(example.prompt_ids)
                logprobs = [*before, *logprobs_of(example, "TRL")]
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
                        metrics={"reward": rollout.score, "reward_std": pstdev(part.scores), **values},
                    )
                )
        return samples

    def _metrics(self, group: hermes_rl.Group, left_out: Counter[str]) -> dict[str, Any]:
        """Return the metrics of a group; of a pair, a part and its whole, TRL adds up both over groups."""
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
