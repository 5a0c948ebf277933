"""Integrate with TRL: `HermesRollouts` for `GRPOTrainer`, `HermesWorker` for `AsyncGRPOTrainer`.

This module selects the rows that become TRL's prompts, chooses the model or engine that samples, and converts rollouts
to TRL's formats. It rejects settings and rollouts that TRL cannot represent. A rollout without a score has the reward
None, which TRL excludes from every baseline. `trl_loop` has `HermesEnvironments`, for TRL's own tool-call loop.
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
from hermes_rl.integrations.background_loop import BackgroundEnv, Call, ModelCalls, dataset
from hermes_rl.integrations.base import (
    FAILURES,
    BatchPlace,
    BatchResult,
    TrainerAdapter,
    is_scored,
    parameters,
    require_a_score,
    sampled_by_vllm,
)
from hermes_rl.integrations.common import (
    logprobs_of,
    require_own_baseline,
    require_own_policy,
    trained_seats,
    values_of,
)
from hermes_rl.integrations.trl_loop import HermesEnvironments as HermesEnvironments
from hermes_rl.spec.new_names import with_renamed_parameters

logger = logging.getLogger(__name__)
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The trainers' sampling settings."""
WHERE = "the configuration of TRL"
DIFFERENCE = "sampling/sampling_logp_difference"
"""Prefix of the names under which TRL, if it uses vLLM, logs the log-probability difference."""
SIDES = ("chosen", "rejected")
MASKED = -100
"""Label of a token that is not trained on."""


# ------------------------------------------------------------------------------------------------ DPOTrainer


def pairs_collator(pad_token_id: int, max_length: int | None = None) -> Callable[[list[Mapping[str, Any]]], Any]:
    """Return the `data_collator` for `dpo.jsonl`, with which `DPOTrainer` trains only on the model's own tokens.

    TRL's own collator trains on everything after the prompt, including tool results. Set
    `remove_unused_columns=False` in the trainer, since it does not know the columns with tokens and labels. The
    collator raises `UserError` for rows that have no tokens.

    Args:
        pad_token_id: the padding token of the tokenizer.
        max_length: the maximum number of tokens of a sequence; the rest is cut off. Default: no limit.
    """
    import torch
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    base_collator = DataCollatorForPreference(pad_token_id=pad_token_id)

    def collate(rows: list[Mapping[str, Any]]) -> Any:
        lacking = [row for row in rows if not (row.get("chosen_labels") and row.get("rejected_labels"))]
        if lacking:
            raise UserError(
                f"the pair of group {lacking[0].get('group')} has no `chosen_labels` and `rejected_labels`: the tokens "
                "of its rollouts are not known, or are several sequences; leave such rows out with "
                '`dataset.filter(lambda row: row["chosen_labels"])`, and set remove_unused_columns=False'
            )
        sides = [{f"{side}_ids": row[f"{side}_input_ids"][:max_length] for side in SIDES} for row in rows]
        batch = base_collator([{**row, "prompt_ids": [], **ids} for row, ids in zip(rows, sides, strict=True)])
        labels = [row[f"{side}_labels"][:max_length] for side in SIDES for row in rows]
        mask = torch.zeros_like(batch["completion_mask"])
        for index, line in enumerate(labels):
            mask[index, : len(line)] = torch.tensor(line) != MASKED
        return {**batch, "completion_mask": mask}

    return collate


# ------------------------------------------------------------------------------------------------ GRPOTrainer


class HermesRollouts(BackgroundEnv):
    """A spec for TRL's `GRPOTrainer`, which then trains on exactly the tokens that were sampled.

    The trainer's own sampler is used: its model, its vLLM engine in the same process, or its vLLM server.

    Args:
        spec, rows, environ, record: as for `BackgroundEnv`.
        policy: a model that acts instead of the trainer's. Unless it has the trainer's weights at every step, the
            trainer trains on tokens of another model; a warning and the metric `hermes_rl/other_policy` report this.
        renderer, sampling, concurrency, retries, allow_inexact: as for `TrainerAdapter`.
        workers: the number of processes that run rollouts; requires a server that samples, the trainer's vLLM server
            or the server of `policy`.
    """

    @with_renamed_parameters
    def __init__(
        self,
        spec: hermes_rl.Spec | str | Path,
        *,
        rows: int | Iterable[str] | None = None,
        policy: hermes_rl.Policy | None = None,
        renderer: str | Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
        retries: int = 2,
        allow_inexact: bool = False,
        environ: Mapping[str, str] | None = None,
        record: str | Path | None = None,
        workers: int | None = None,
    ) -> None:
        super().__init__(spec, rows, environ, record, workers)
        self._policy, self._renderer = policy, renderer
        self._settings: dict[str, Any] = {"sampling": sampling, "concurrency": concurrency}
        self._settings |= {"retries": retries, "allow_inexact": allow_inexact}
        self._pull: TrainerAdapter | None = None
        self._trainer: Any = None
        """Trainer whose logs are observed."""
        self._generate: Generate | None = None
        """Sampler of this process; None if another process samples."""
        self._calls = ModelCalls()
        self._batches = count()

    @cached_property
    def train_dataset(self) -> Any:
        """A `datasets.Dataset` whose prompts are the keys of the training rows."""
        return dataset(prompt=list(self.rows("train")))

    @cached_property
    def eval_dataset(self) -> Any:
        """A `datasets.Dataset` whose prompts are the keys of the evaluation rows."""
        return dataset(prompt=list(self.rows("eval")))

    @property
    def reward_funcs(self) -> list[Callable[..., list[float | None]]]:
        """The function that returns the score of each rollout; you may add your own functions to the list."""
        return [hermes_rl_score]

    def rollout_func(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Run a rollout for each prompt, which is the key of a row, and return TRL's columns.

        If the trainer's own model or vLLM engine samples, the calling thread does so while the rollouts run, since the
        current device, autocast and similar settings belong to a thread.

        Raises:
            UserError: settings of the trainer conflict with rollouts, or TRL cannot represent a rollout.
            RunError: infrastructure failed every rollout of the batch, or no rollout called the policy.
        """
        if trainer.tools:
            raise UserError("the trainer's `tools` would run TRL's own loop after each rollout: name them in the spec")
        if self._pull is None:
            policy = self._policy or self._policy_of(trainer)
            self._pull = TrainerAdapter("TRL", self.env, policy, config_location=WHERE, seats=True, **self._settings)
        pull = self._pull
        assert pull.policy is not None
        if self._trainer is not trainer:
            self._trainer = trainer
            if self._policy is not None:
                logger.warning(
                    "policy=… replaces the trainer's model: unless it has the trainer's weights at every step, "
                    "tokens of another model are trained on. Omit `policy` to sample with the trainer's model or engine"
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
        if unknown := [key for key, _, _ in numbered if key not in rows]:
            raise UserError(
                f"the prompt {unknown[0]!r:.60} is not the key of a row: give the trainer `train_dataset` and "
                "`eval_dataset` of HermesRollouts"
            )
        positions = [
            BatchPlace(rows[key], f"{key}@{split}{batch}.{group_index}", member, size)
            for key, group_index, member in numbered
        ]
        sampling = pull.sampling({name: getattr(trainer, name) for name in SETTINGS})
        self._calls = ModelCalls()
        playing = self.sync.submit(pull.play_all(positions, split, sampling))
        self._calls.answer_until(playing, lambda calls: self._generate(trainer, calls) if self._generate else [])
        columns = columns_of(playing.result(), _tokenizer_of(trainer).eos_token_id, pull)
        return {**columns, "other_policy": [self._policy is not None] * len(prompts)}

    def _policy_of(self, trainer: Any) -> hermes_rl.Policy:
        """Return the policy that uses the trainer's sampler."""
        tokenizer, args = _tokenizer_of(trainer), trainer.args
        if trainer.use_vllm and trainer.vllm_mode == "server":
            url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
            return _vllm_policy(url, None, tokenizer.name_or_path, self._renderer)
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
    stop_reason: list[str],
    turns: list[int],
    other_policy: Sequence[bool] = (),
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Return the scores of the rollouts, None if there is none; log failures by cause, rewards and turns."""
    if log_metric is not None:
        ended = Counter(stop_reason)
        # Also log zeros: TRL averages only over the processes that log a name.
        for cause in FAILURES:
            log_metric(f"hermes_rl/failed/{cause}", ended[cause] / len(stop_reason))
        log_metric("hermes_rl/unscored", score.count(None) / len(score))
        log_metric("hermes_rl/turns", fmean(turns))
        log_metric("hermes_rl/other_policy", float(any(other_policy)))
        for name in dict.fromkeys(name for values in rewards for name in values):
            log_metric(f"hermes_rl/rewards/{name}", fmean(values[name] for values in rewards if name in values))
    return score


def places_of(prompts: Sequence[str], size: int, first: int) -> list[tuple[str, int, int]]:
    """Return the row key, the group's index and the member's index of each rollout of this process.

    Args:
        prompts: row keys, each repeated `size` times in the batch of all processes.
        size: the number of members of a group.
        first: the number of prompts of the preceding processes.

    Raises:
        UserError: the prompts of a group are not the key of one row.
    """
    positions = [(key, position // size, position % size) for position, key in enumerate(prompts, start=first)]
    keys: dict[int, Any] = {}
    for key, group_index, _ in positions:
        if not isinstance(key, str) or keys.setdefault(group_index, key) != key:
            raise UserError(
                f"the prompts of a group are {size} times the key of one row, not {keys.get(group_index, key)!r} and "
                f"{key!r}: give the trainer `train_dataset` and `eval_dataset` of HermesRollouts"
            )
    return positions


def require_whole(positions: Sequence[tuple[str, int, int]], size: int, comparing: Sequence[str]) -> None:
    """Raise `UserError` if a compared group is split between processes; `comparing` names the rewards."""
    members = Counter(group_index for _, group_index, _ in positions)
    if set(members.values()) != {size}:
        raise UserError(
            f"{', '.join(comparing)} compares the members of a group, and TRL has split groups of {size} between "
            f"processes that have {len(positions)} rollouts each: make per_device_train_batch_size times "
            "steps_per_generation (per_device_eval_batch_size in evaluation) a multiple of the group's size"
        )


def columns_of(ended: Sequence[BatchResult], end: int, pull: TrainerAdapter) -> dict[str, Any]:
    """Return rollouts as columns for TRL's `rollout_func`, one entry per rollout.

    A rollout without a score becomes the single token `end`, which is not trained on.

    Raises:
        UserError: a rollout has several sequences, or its tokens are not token-exact.
        RunError: infrastructure failed every rollout of the batch, or no rollout called the policy.
    """
    require_a_score(ended)
    examples = [hermes_rl.Example([end], [end], [0], [0.0], (None, None)) for _ in ended]
    for index, (rollout, _, _) in enumerate(ended):
        if is_scored(rollout):
            several = pull.examples(rollout)
            if len(several) != 1:
                raise UserError(
                    f"rollout {rollout.id} has {len(several)} sequences, as the policy did not see all of it in one "
                    f"context, and TRL's rollout_func takes one: {rollout.one_context}, or train with "
                    "AsyncGRPOTrainer and HermesWorker, which take all"
                )
            examples[index] = several[0]
    has_logprobs = all(example.logprobs is not None for example in examples)
    return {
        "prompt_ids": [example.prompt_ids for example in examples],
        "completion_ids": [example.response_ids for example in examples],
        "logprobs": [example.logprobs for example in examples] if has_logprobs else None,
        "env_mask": [example.mask for example in examples],
        "score": [rollout.score if is_scored(rollout) else None for rollout, _, _ in ended],
        "rewards": [values_of(rollout) if rollout is not None else {} for rollout, _, _ in ended],
        "stop_reason": [str(stop_reason) for _, stop_reason, _ in ended],
        "turns": [rollout.turns if rollout is not None else 0 for rollout, _, _ in ended],
    }


# ------------------------------------------------------------------------------------ samplers for GRPOTrainer

Generate = Callable[[Any, Sequence[Call]], Sequence[hermes_rl.Sampled]]
"""A function that samples, with the trainer given, replies for a batch of calls."""


def generate_with_model(trainer: Any, calls: Sequence[Call]) -> list[hermes_rl.Sampled]:
    """Sample with the trained model, in one batch per temperature and stop tokens, which may differ between seats.

    Raises:
        UserError: a seat sets `top_p`.
    """
    alike: dict[tuple[float, tuple[int, ...]], list[int]] = {}
    for index, (_, sampling) in enumerate(calls):
        if sampling.top_p not in (None, 1.0):
            raise UserError(
                f"agents.….agent.top_p={sampling.top_p}: the trainer's log-probabilities ignore it, so tokens "
                "would seem likelier than they were. Leave it out, or use vLLM"
            )
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        alike.setdefault((temperature, sampling.stop_ids), []).append(index)
    answers: dict[int, hermes_rl.Sampled] = {}
    for (temperature, _), indices in alike.items():
        batch = [calls[index] for index in indices]
        answers.update(zip(indices, _generate_alike(trainer, batch, temperature), strict=True))
    return [answers[index] for index in range(len(calls))]


def _generate_alike(trainer: Any, calls: Sequence[Call], temperature: float) -> list[hermes_rl.Sampled]:
    """Sample one batch of calls that have the same stop tokens and temperature."""
    import torch
    from trl.models.utils import unwrap_model_for_generation

    end = _tokenizer_of(trainer).pad_token_id
    width = max(len(ids) for ids, _ in calls)
    device = trainer.accelerator.device
    prompts = torch.tensor([[end] * (width - len(ids)) + ids for ids, _ in calls], device=device)
    attention = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in calls], device=device)
    # Pass every setting, since the model's generation_config.json would supply the missing ones.
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
    values = torch.stack(scaled.collect_logprobs(ids), 1).tolist()
    return [
        until_end(line, logs, call[1]) for line, logs, call in zip(ids[:, width:].tolist(), values, calls, strict=True)
    ]


class _Scaled:
    """Logits processor that applies the temperature and records the log-probability of each sampled token.

    Recording step by step holds the logits of one step in memory; `output_scores` would hold the logits of all steps.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._last: Any = None
        self._noted: list[Any] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self._note(input_ids)
        self._last = scores.float() / self._temperature
        return self._last

    def collect_logprobs(self, ids: Any) -> list[Any]:
        """Return the log-probabilities of the sampled tokens: one tensor per step, with one entry per call."""
        self._note(ids)
        return self._noted

    def _note(self, ids: Any) -> None:
        if self._last is not None:
            chosen = self._last.gather(-1, ids[:, -1:]).squeeze(-1)
            self._noted.append(chosen - self._last.logsumexp(-1))


def until_end(ids: list[int], logprobs: list[float], sampling: hermes_rl.Sampling) -> hermes_rl.Sampled:
    """Return the tokens of one call up to its end; the batch ran until its longest call ended."""
    length = min(len(ids), sampling.max_tokens)
    length = next(
        (position for position, token in enumerate(ids[:length], start=1) if token in sampling.stop_ids), length
    )
    finish = "stop" if ids[length - 1] in sampling.stop_ids else "length"
    return hermes_rl.Sampled(ids[:length], [min(value, 0.0) for value in logprobs[:length]], finish)  # NaN stays


def generate_with_vllm(trainer: Any, calls: Sequence[Call]) -> list[hermes_rl.Sampled]:
    """Sample with the trainer's vLLM engine in this process."""
    from vllm import SamplingParams

    fixed: dict[str, Any] = {"logprobs": 0, "detokenize": False}
    params = [SamplingParams(**parameters(sampling), seed=sampling.seed, **fixed) for _, sampling in calls]
    answers = trainer.vllm_generation.llm.generate(
        [{"prompt_token_ids": ids} for ids, _ in calls], sampling_params=params, use_tqdm=False
    )
    return [sampled_by_vllm(answer) for answer in answers]


def _tokenizer_of(trainer: Any) -> Any:
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def _vllm_policy(url: str, model: Any, tokenizer: str, renderer: Any) -> hermes_rl.Policy:
    return hermes_rl.Policy.server("vllm", f"{url.rstrip('/')}/v1", model, tokenizer=tokenizer, renderer=renderer)


def _difference_told_to(policy: hermes_rl.Policy) -> Any:
    """Return a callback that reads the log-probability difference from TRL's logs and reports it to the policy."""
    from transformers import TrainerCallback

    class Listener(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            mean, largest = (logs or {}).get(f"{DIFFERENCE}/mean"), (logs or {}).get(f"{DIFFERENCE}/max")
            if mean is not None:
                policy.logprob_difference.tell(float(mean), None if largest is None else float(largest))

    return Listener()


def _require_one_vllm(args: Any) -> None:
    """Raise `UserError` if the vLLM engine in this process needs simultaneous calls of several processes, or sleeps."""
    if args.vllm_tensor_parallel_size > 1:
        raise UserError(
            "vllm_tensor_parallel_size > 1: processes would have to sample in step, and rollouts ask when they are "
            "ready. Set it to 1, or use vllm_mode='server'"
        )
    if args.vllm_enable_sleep_mode:
        raise UserError("vllm_enable_sleep_mode puts vLLM to sleep between calls: remove it, or use a vLLM server")


def _require_own_model(trainer: Any) -> None:
    """Raise `UserError` if sampling with the trainer's model needs all processes at once or an unsupported setting."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    if trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3):
        raise UserError(
            "the model is sharded (FSDP or ZeRO-3), so all processes would have to sample in step, and rollouts ask "
            "when they are ready. Use vLLM (use_vllm=True), or a strategy that keeps the model whole"
        )
    if trainer.use_transformers_continuous_batching:
        raise UserError("use_transformers_continuous_batching is not supported for rollouts: remove it, or use vLLM")
    if trainer.top_p != 1.0:
        raise UserError(
            f"top_p={trainer.top_p}: the trainer's log-probabilities ignore it, so tokens would seem likelier "
            "than they were. Leave it at 1, or use vLLM with vllm_importance_sampling_correction"
        )
    if trainer.args.generation_kwargs:
        raise UserError("generation_kwargs of the trainer are not applied to rollouts: leave them out, or use vLLM")


# ------------------------------------------------------------------------------------------- AsyncGRPOTrainer


class HermesWorker(BackgroundEnv):
    """A spec as the `rollout_worker` of TRL's `AsyncGRPOTrainer`: groups run while the trainer trains.

    Args:
        spec, environ, record, workers: as for `BackgroundEnv`.
        args: the trainer's AsyncGRPOConfig.
        model: the name of the model at the trainer's vLLM server, also used as the name of the tokenizer.
        tokenizer: a hub name or a directory, if it differs from `model`.
        adapter: the name of the trained adapter at the server; version N is requested as `ADAPTER-vN`.
        policy: a model that acts instead of the model at the trainer's server.
        renderer, sampling, allow_inexact: as for `TrainerAdapter`.
        drop_uniform: exclude groups whose scores are all equal.
        normalise: the normalization of advantages: "std", "mean" or "none".

    Attributes:
        rollout_buffer, metrics_queue: queues from which TRL reads rollouts and metrics.

    Raises:
        UserError: the spec is wrong or trains another policy, TRL 1.16 is not installed, or no model is given.
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
        self._policy = policy or _vllm_policy(args.vllm_server_base_url, name, tokenizer or str(model), renderer)
        self._pull = TrainerAdapter(
            "TRL", self.env, self._policy, sampling=sampling, config_location=WHERE, allow_inexact=allow_inexact
        )
        self._sampling = self._pull.sampling({name: getattr(args, name) for name in SETTINGS})
        self._drop_uniform, self._normalise = drop_uniform, normalise
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=args.queue_maxsize)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._excluded: Counter[str] = Counter()
        self._failure = "none, so a budget of the spec is used up"
        self._playing: concurrent.futures.Future[None] | None = None

    @cached_property
    def train_dataset(self) -> Any:
        """A `datasets.Dataset` with the row keys, by which TRL counts epochs; only one key if the rows are endless."""
        rows = self.sync.rows()
        return dataset(prompt=[row.key for row in islice(rows, 1 if rows.length is None else None)])

    def start(self) -> None:
        """Start running groups; TRL calls this after the server has received the trainer's weights."""
        self._policy.version = self._version
        self._playing = self.sync.submit(self._play())

    def update_model_version(self, model_version: int) -> None:
        """Record the version of the server's new weights."""
        self._version = model_version
        self._policy.version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that stopped the groups, or `RunError` if the event loop is stuck.

        Args:
            stale_after_s: the seconds after which an event loop without a response counts as stuck.
        """
        if self._playing is None:
            raise RunError("the worker has not been started")
        if self._playing.done():
            self._playing.result()
            raise RunError(f"no more groups are run. The last failure: {self._failure}")
        try:
            self.sync.submit(asyncio.sleep(0)).result(stale_after_s)
        except concurrent.futures.TimeoutError:
            raise RunError(f"the event loop of the rollouts has not answered for {stale_after_s:.0f} s") from None

    def stop(self) -> None:
        """Cancel running groups and release all resources."""
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
            for group_index in count():
                group = await anext(groups, None)
                if group is None:
                    return
                self.metrics_queue.put(self._metrics(group, groups.excluded))
                for sample in await asyncio.to_thread(self._samples, group, group_index):
                    while self.rollout_buffer.full():  # noqa: ASYNC110 - another thread empties it, and none fills it
                        await asyncio.sleep(0.05)
                    sample.enqueued_at = time.time()
                    self.rollout_buffer.put_nowait(sample)

    def _samples(self, group: hermes_rl.Group, group_index: int) -> list[Any]:
        """Return one sample per sequence with trained tokens; none if the group was dropped."""
        import numpy as np

        if group.dropped is not None:
            return []
        assert group.provenance is not None
        samples = []
        oldest = group.provenance.oldest
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
                        group_id=group_index,
                        metrics={"reward": rollout.score, "reward_std": pstdev(part.scores), **values},
                    )
                )
        return samples

    def _metrics(self, group: hermes_rl.Group, excluded: Counter[str]) -> dict[str, Any]:
        """Return the metrics of a group. A pair is a numerator and a denominator; TRL sums both over groups."""
        new = Counter(excluded)
        new.subtract(self._excluded)
        self._excluded = Counter(excluded)
        if group.dropped is not None:
            self._failure = f"{group.dropped}: {group.detail}"
            return {"hermes_rl/dropped_frac": (1, 1), f"hermes_rl/failed_{group.dropped}_total": 1.0}
        assert group.provenance is not None
        metrics: dict[str, Any] = {
            "hermes_rl/dropped_frac": (0, 1),
            "hermes_rl/zero_variance_frac": (new["uniform"] + group.uniform, new["uniform"] + 1),
            "hermes_rl/left_out_stale_total": float(new["stale"]),
            "hermes_rl/turns_mean": fmean(rollout.turns for rollout in group.rollouts),
        }
        if group.provenance.oldest is not None and group.provenance.newest is not None:
            metrics["hermes_rl/versions_spread_max"] = float(group.provenance.newest - group.provenance.oldest)
        return metrics
