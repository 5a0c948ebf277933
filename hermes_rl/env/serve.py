"""Serve mode: send an environment's groups to a trainer, and call the environment's hooks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import aiohttp
from atroposlib.envs.base import EvalHandlingEnum

from hermes_rl.env.custom_collection import run_of
from hermes_rl.env.hooks import ConductedEnv, call, convert_author_errors
from hermes_rl.errors import HermesRLError, UserError
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.deliveries import DeliveryLog
from hermes_rl.runs.groups import GroupsFile
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.run import RunBudget
from hermes_rl.servers.transport import public_url
from hermes_rl.spec.model import Spec
from hermes_rl.tokens.transcript import MASKED
from hermes_rl.trainers.atropos import AtroposTrainer
from hermes_rl.trainers.base import Registered, Registration, Trainer
from hermes_rl.trainers.checks import Checks, TooLong
from hermes_rl.trainers.serving import Hooks, Serving, closed

logger = logging.getLogger(__name__)


async def serve_environment(env: ConductedEnv, trainer: Trainer | None = None) -> None:
    """Serve an environment, on which `setup` was called, until the trainer has finished its steps.

    Sent groups are recorded in `data_path_to_save_groups`, if it is set.

    Args:
        trainer: the trainer; default: the trajectory API that the configuration names.
    """
    config = env.config
    trainer = trainer or atropos_trainer(config, Progress())
    path = config.data_path_to_save_groups
    with ExitStack() as stack:
        file = stack.enter_context(closing(GroupsFile(Journal(Path(path)), ""))) if path is not None else None
        differing = bool(config.ensure_scores_are_not_same)
        run = run_of(env, pauses=True, budget=RunBudget(), progress=Progress(), drop_uniform=differing)
        checks = Checks(
            group_size=int(config.group_size),
            uniform=not differing,
            too_long=TooLong("drop", env._training_counts.sequences),
            counts=env._training_counts.dropped,
        )
        journal = Journal(Path(f"{path}.deliveries")) if path is not None else None
        log = stack.enter_context(closing(DeliveryLog(journal, trainer.name)))
        try:
            await Serving(run, trainer, registration(env), log, checks, EnvHooks(env), file=file).play()
        finally:
            await closed(trainer)


def atropos_trainer(config: Any, progress: Progress) -> AtroposTrainer:
    """Return a client of the trajectory API that the configuration names; `progress` shows its messages."""
    return AtroposTrainer(
        url=config.rollout_server_url,
        total_steps=int(config.total_steps),
        batches_ahead=int(config.max_batches_offpolicy),
        batch_size=int(config.batch_size),
        min_batch_allocation=config.min_batch_allocation,
        include_messages=bool(config.include_messages),
        say=progress.note,
    )


def registration(env: ConductedEnv) -> Registration:
    config = env.config
    return Registration(
        name=config.wandb_name,
        group_size=int(config.group_size),
        max_token_length=int(config.max_token_length),
        weight=float(config.inference_weight),
    )


class EnvHooks(Hooks):
    """Adapter that calls an environment's hooks while it serves, such as `evaluate`, `wandb_log`, `save_checkpoint`."""

    def __init__(self, env: ConductedEnv) -> None:
        self._env = env
        self.evaluate_every = int(env.config.steps_per_eval)
        shares = {EvalHandlingEnum.STOP_TRAIN: 0.0, EvalHandlingEnum.LIMIT_TRAIN: float(env.config.eval_limit_ratio)}
        self.evaluation_share = shares.get(env.config.eval_handling, 1.0)

    async def registered(self, answer: Registered, step: int) -> None:
        env = self._env
        env.env_id, env.curr_step, env.wandb_prepend = answer.number, step, answer.run_name
        env.checkpoint_dir, env.checkpoint_interval = answer.checkpoint_folder, answer.checkpoint_every or -1
        env.wandb_project = env.wandb_project or answer.project
        env.wandb_group = env.wandb_group or answer.run_group
        env.max_token_len = answer.longest + 1 if answer.longest is not None else -1
        if step > 0 and answer.checkpoint_folder:
            with convert_author_errors(env.load_checkpoint):
                env.load_checkpoint()
        env._begin_tracking()

    async def stepped(self, before: int, now: int) -> None:
        env, every = self._env, self._env.checkpoint_interval
        if every > 0 and before // every < now // every:
            with convert_author_errors(env.save_checkpoint):
                env.save_checkpoint(now // every * every)
        env.curr_step = now
        env._note_step()
        if env.items_sent_this_step >= env.config.min_items_sent_before_logging:
            env.items_sent_this_step = 0
            await call(env.wandb_log, {})

    async def evaluate(self, step: int) -> None:
        try:
            await call(self._env.evaluate)
        except HermesRLError as error:
            logger.error("the evaluation at step %d failed: %s", step, error)
        except Exception:  # training continues without this evaluation
            logger.exception("the evaluation at step %d failed", step)

    async def sending(self, group: Group, lines: list[dict[str, Any]]) -> None:
        env = self._env
        env._training_counts.add_group(group)
        env.items_sent_this_step += len(lines)
        for line in lines:
            env.completion_lengths += [sum(1 for value in mask if value != MASKED) for mask in line["masks"]]
        await call(env.add_rollouts_for_wandb, lines[0], group.row.columns)
        await call(env.cleanup)

    async def excluded(self, group: Group, cause: str, detail: str) -> None:
        counts = self._env._training_counts
        counts.add_group(group)
        if group.dropped is None:
            counts.dropped[cause] += 1
        await call(self._env.cleanup)

    async def arrived(self, ages: Sequence[int], stale: int) -> None:
        self._env._training_counts.add_arrivals(ages, stale)

    def state(self) -> Any:
        return self._env._state_at_step()

    def restore(self, state: Any) -> None:
        self._env._restore_state(state)


def require_exact(spec: Spec) -> None:
    """Raise `UserError` if the policy's sampled tokens are unknown and the spec does not allow that.

    Also raise it if `max_staleness` is set and a server does not report the version of its weights. The token
    provenance of token-level and scripted servers is checked later, for each group.
    """
    policy, staleness = spec.servers["policy"], spec.serve.max_staleness
    if staleness is not None and any(
        not server.kind.tells_version and server.weights_path is None for server in policy
    ):
        raise UserError(
            "serve.max_staleness: the policy's server does not report the version of its weights. Set weights_path to "
            'a path that returns {"version": N}, or remove max_staleness'
        )
    if spec.serve.allow_inexact or all(server.kind.exact for server in policy):
        return
    raise UserError(
        "serve: a chat server does not report which tokens it sampled, so a trainer would train on a reconstruction "
        "without log-probabilities. Set serve.allow_inexact: true to accept that"
    )


async def require_trajectory_api(url: str) -> None:
    try:
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
            await answer.read()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise UserError(
            f"no trajectory API at {public_url(url)} ({type(error).__name__}): start one with `run-api`, or set "
            "serve.api_url"
        ) from error
