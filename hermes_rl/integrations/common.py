"""Code that the trainer integrations share.

This module opens specs once per process, rejects specs and rollouts that a trainer cannot represent, and runs rollouts
at endpoints. `pull` has the code for trainers that sample the tokens themselves.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import islice
from threading import Lock
from typing import Any

import hermes_rl
from hermes_rl.errors import UserError

BY_OTHERS = "train with TRL, or over HTTP (docs/service.md)"
_OPENING = Lock()
_OPENED: dict[str, tuple[hermes_rl.Env, Any]] = {}
_CLOSING = ExitStack()
_PROCESS: list[int] = []
"""Id of the process that opened the specs; empty before the first one."""


def shared_environment(spec: str) -> tuple[hermes_rl.Env, Any]:
    """Return a spec's environment and its synchronous wrapper, opened on the first use in this process.

    The environment runs on an event loop in a separate thread, so that it never blocks the trainer's loop. It closes
    when the process exits.

    Raises:
        UserError: the spec is wrong, or this process was forked after its parent opened a spec.
    """
    with _OPENING:
        if not _PROCESS:
            _PROCESS.append(os.getpid())
            atexit.register(_close_all)
        if [os.getpid()] != _PROCESS:
            raise UserError(
                "this process was forked from a process that runs rollouts, and a fork does not copy threads: "
                "start processes with the method `spawn`, or run rollouts only in the forked processes"
            )
        if spec not in _OPENED:
            env = hermes_rl.open_env(spec)
            _OPENED[spec] = env, _CLOSING.enter_context(hermes_rl.sync(env))
        return _OPENED[spec]


def _close_all() -> None:
    if [os.getpid()] == _PROCESS:  # a forked process has only copies of its parent's resources
        _CLOSING.close()


def tasks_of(spec: str, split: str, rows: int | None, trainer: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the key and the prompt messages of each row of a split; at most `rows` rows.

    The spec is closed again before the function returns, so that the trainer may fork.

    Raises:
        UserError: the spec is wrong, the trainer cannot run it, or the rows may be endless and `rows` is None.
    """
    env = hermes_rl.open_env(spec)
    with hermes_rl.sync(env):
        require_no_comparing(env, trainer)
        every_row = env.rows(split)
        if rows is not None and (not isinstance(rows, int) or rows < 0):
            raise UserError(f"rows is {rows!r:.60}, and not the number of rows")
        if rows is None and every_row.length is None:
            raise UserError("the spec's rows may be without end: pass the number of rows, such as rows=1000")
        return [(row.key, env.prompt(row)) for row in islice(every_row, rows)]


def require_no_comparing(env: hermes_rl.Env, trainer: str, instead: str = BY_OTHERS) -> None:
    """Raise `UserError` if rewards compare the members of a group, which the trainer runs independently.

    Also raise it in the cases of `require_own_baseline`. `instead` is the alternative that the message suggests.
    """
    require_own_baseline(env, trainer)
    if env.comparing:
        raise UserError(
            f"{', '.join(env.comparing)} compares the members of a group, and {trainer} runs each rollout by itself: "
            f"leave it out, or {instead}"
        )


def trained_seats(env: hermes_rl.Env) -> int:
    """Return the number of trained seats of an episode; 1 for a spec with a single agent."""
    return len(env.spec.trained_seats) if env.spec.agents else 1


def require_own_baseline(env: hermes_rl.Env, trainer: str, *, seats: bool = False) -> None:
    """Raise `UserError` if the trainer, which computes its own baseline, would compare scores in another way.

    That is the case if the spec scores infrastructure failures as the worst of their group, trains a policy other than
    `policy`, trains no seat, or trains several seats of an episode.

    Args:
        seats: the integration supports several trained seats if all are compared with each other (`baseline: row`).
    """
    require_own_policy(env, trainer)
    if not trained_seats(env):
        raise UserError(f"agents: no seat is trained (`train: false`), so {trainer} would get nothing")
    if trained_seats(env) > 1 and not (
        seats and {seat_config.baseline for seat_config in env.spec.agents.values() if seat_config.train} == {"row"}
    ):
        remedy = "write `baseline: row` for each of them" if seats else "train with TRL's GRPOTrainer"
        raise UserError(
            f"agents: {trained_seats(env)} seats are trained, and {trainer} has one rollout for each place: "
            f"{remedy}, or "
            "train through Atropos, TRL's asynchronous loop, HTTP (docs/service.md) or groups of the Python API"
        )
    if env.spec.on_stop.get("retries_exhausted") == "worst":
        raise UserError(
            f"on_stop.retries_exhausted is worst, and {trainer} compares the scores of a group itself, without "
            "rollouts that have none: leave it out, or train through Atropos, TRL's asynchronous loop or groups of the "
            "Python API"
        )


def require_own_policy(env: hermes_rl.Env, trainer: str) -> None:
    """Raise `UserError` if the spec trains the policy of a server other than `policy`, which the trainer provides."""
    if others := env.spec.other_policies:
        raise UserError(
            f"agents: {others} is trained, and {trainer} trains one policy, that of `policy`: write `train: false`, or "
            "train through HTTP (docs/service.md), Atropos or groups of the Python API, which tell whose each token is"
        )


def require_one_stepped(env: hermes_rl.Env, integration: str) -> None:
    """Raise `UserError` if `policy` acts for seats other than the trained seat: the client steps only that one."""
    stepped = [name for name, seat in env.spec.agents.items() if "policy" in (seat.opponents or (seat.server,))]
    if stepped != env.spec.trained_seats:
        raise UserError(
            f"agents: {', '.join(stepped) or 'no seats'} use the server `policy`, and {integration} answers for the "
            "trained seat alone: give the others other servers, or step a session (docs/python.md)"
        )


async def play_at_endpoint(
    spec: str,
    key: str,
    *,
    base_url: str,
    model: str,
    api_key: str | None,
    trainer: str,
    split: str = "train",
    sampling: Mapping[str, Any] | None = None,
) -> hermes_rl.Rollout:
    """Run a rollout whose model calls go to an endpoint that the trainer has opened for it.

    Cancelling this coroutine releases the rollout's sandbox. A failed rollout is not retried here, since the trainer
    retries it.

    Raises:
        UserError: the row does not exist, or the trainer cannot run the spec.
    """
    env, sync = await asyncio.to_thread(shared_environment, spec)
    require_no_comparing(env, trainer)

    async def play() -> hermes_rl.Rollout:
        policy = hermes_rl.Policy.endpoint(base_url, model, api_key=api_key)
        try:
            return await env.run(key, policy, split=split, sampling=sampling, retries=0)
        finally:
            await policy.close()

    rollout: hermes_rl.Rollout = await asyncio.wrap_future(sync.submit(play()))
    return require_carried(rollout, trainer)


# ------------------------------------------------------------------------------- conversion of rollouts


def require_carried(rollout: hermes_rl.Rollout, trainer: str) -> hermes_rl.Rollout:
    """Return the rollout; raise `UserError` if its rewards give more than the one score that the trainer takes.

    These are credit for single turns and overrides, which set fields of a ScoredDataGroup for one member.
    """
    parts = ["credit to its turns"] if rollout.credit else []
    parts += [f"overrides ({', '.join(rollout.overrides)})"] if rollout.overrides else []
    if parts:
        raise UserError(
            f"rewards give rollout {rollout.id} {' and '.join(parts)}, and {trainer} takes one score for all of it: "
            "leave that out of the rewards, or train through Atropos, the Python API or HTTP (docs/service.md)"
        )
    return rollout


def logprobs_of(example: hermes_rl.Example, trainer: str) -> list[float]:
    """Return the log-probabilities of a response, one per token; raise `UserError` if they are unknown."""
    if example.logprobs is None:
        raise UserError(
            f"a rollout has no log-probabilities, and {trainer} trains with the log-probabilities of sampling: name a "
            "token-level policy. allow_inexact=True accepts unproven tokens, but cannot add log-probabilities"
        )
    return example.logprobs


def values_of(rollout: hermes_rl.Rollout) -> dict[str, float]:
    """Return the values of the rewards by name, without the rewards that have no value."""
    return {name: reward.value for name, reward in rollout.rewards.items() if reward.value is not None}
