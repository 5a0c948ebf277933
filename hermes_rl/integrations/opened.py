"""What the doors to trainers share; those whose trainer samples the tokens itself have more of it in `pull`."""

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
"""The process that has opened something."""


def opened(spec: str) -> tuple[hermes_rl.Env, Any]:
    """Return the environment of a spec and its blocking twin, opened with the first use in this process.

    It lives on a loop in a thread of its own, so that the trainer's loop is never held up, and closes when the process
    ends. Raises `UserError` for a wrong spec, and in a process that was forked from one that had opened some.
    """
    with _OPENING:
        if not _PROCESS:
            _PROCESS.append(os.getpid())
            atexit.register(_close)
        if [os.getpid()] != _PROCESS:
            raise UserError(
                "this process was forked from one that plays rollouts already, and threads stay behind in a fork: "
                "start processes with the method `spawn`, or play in those alone"
            )
        if spec not in _OPENED:
            env = hermes_rl.open_env(spec)
            _OPENED[spec] = env, _CLOSING.enter_context(hermes_rl.sync(env))
        return _OPENED[spec]


def _close() -> None:
    if [os.getpid()] == _PROCESS:  # a fork has copies of what belongs to the other process
        _CLOSING.close()


def tasks_of(spec: str, split: str, rows: int | None, trainer: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the key and the prompt of each row of a split. The spec is closed again, so that a trainer may fork.

    Raises `UserError` where the trainer cannot play it, and for endless rows where nobody says how many are wanted.
    """
    env = hermes_rl.open_env(spec)
    with hermes_rl.sync(env):
        require_no_comparing(env, trainer)
        every_row = env.rows(split)
        if rows is None and every_row.length is None:
            raise UserError("the spec's rows may be without end: say how many are wanted, such as rows=1000")
        return [(row.key, env.prompt(row)) for row in islice(every_row, rows)]


def require_no_comparing(env: hermes_rl.Env, trainer: str, instead: str = BY_OTHERS) -> None:
    """Refuse a spec whose rewards compare rollouts that the trainer plays apart from each other, or that counts lost
    ones."""
    require_own_baseline(env, trainer)
    if env.comparing:
        raise UserError(
            f"{', '.join(env.comparing)} compares the members of a group, and {trainer} plays each rollout by itself: "
            f"leave it out, or {instead}"
        )


def trained_seats(env: hermes_rl.Env) -> int:
    """Return how many seats of an episode are trained; 1 where one agent plays."""
    return len(env.spec.trained_seats) if env.spec.agents else 1


def require_own_baseline(env: hermes_rl.Env, trainer: str, *, seats: bool = False) -> None:
    """Refuse a spec whose scores the trainer would compare otherwise than the spec says, as it does so itself.

    It counts lost members as the worst of their group, or trains several seats of an episode; `seats`: the door takes
    those that are all compared with each other.
    """
    require_own_policy(env, trainer)
    if not trained_seats(env):
        raise UserError(f"agents: no seat is trained (`train: false`), so {trainer} would get nothing")
    if trained_seats(env) > 1 and not (
        seats and {own.baseline for own in env.spec.agents.values() if own.train} == {"row"}
    ):
        way = "write `baseline: row` for each of them" if seats else "train with TRL's GRPOTrainer"
        raise UserError(
            f"agents: {trained_seats(env)} seats are trained, and {trainer} has one rollout for each place: {way}, or "
            "train through Atropos, TRL's asynchronous loop, HTTP (docs/service.md) or groups of the Python API"
        )
    if env.spec.endings.get("lost") == "worst":
        raise UserError(
            f"endings.lost is worst, and {trainer} compares the scores of a group itself, without those that have "
            "none: leave it out, or train through Atropos, TRL's asynchronous loop or groups of the Python API"
        )


def require_own_policy(env: hermes_rl.Env, trainer: str) -> None:
    """Refuse a spec that trains the policy of another server than the one that the trainer brings."""
    if others := env.spec.other_policies:
        raise UserError(
            f"agents: {others} is trained, and {trainer} trains one policy, that of `policy`: write `train: false`, or "
            "train through HTTP (docs/service.md), Atropos or groups of the Python API, which tell whose each token is"
        )


def require_one_stepped(env: hermes_rl.Env, door: str) -> None:
    """Refuse a spec in which `policy` plays other seats than the trained one, for which the door has no answers."""
    stepped = [name for name, seat in env.spec.agents.items() if "policy" in (seat.rivals or (seat.server,))]
    if stepped != env.spec.trained_seats:
        raise UserError(
            f"agents: {', '.join(stepped) or 'no seats'} are played by `policy`, and {door} answers for the trained "
            "seat alone: give the others servers of their own, or step a session (docs/python.md)"
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
    """Play a rollout whose model calls go to an endpoint that the trainer has opened for it.

    Cancelling the wait for it releases its sandbox. It is played once: the trainer repeats what failed. Raises
    `UserError` where there is no such row, or the trainer cannot play the spec.
    """
    env, sync = await asyncio.to_thread(opened, spec)
    require_no_comparing(env, trainer)

    async def play() -> hermes_rl.Rollout:
        policy = hermes_rl.Policy.endpoint(base_url, model, api_key=api_key)
        try:
            return await env.play(key, policy, split=split, sampling=sampling, replays=0)
        finally:
            await policy.close()

    rollout: hermes_rl.Rollout = await asyncio.wrap_future(sync.submit(play()))
    return require_carried(rollout, trainer)


# ------------------------------------------------------------------------------- a rollout as a trainer gets it


def require_carried(rollout: hermes_rl.Rollout, trainer: str) -> hermes_rl.Rollout:
    """Return the rollout; refuse one of which its rewards say more than a score, where a trainer takes no more."""
    parts = ["credit to its turns"] if rollout.credit else []
    parts += [f"overrides ({', '.join(rollout.overrides)})"] if rollout.overrides else []
    if parts:
        raise UserError(
            f"rewards give rollout {rollout.id} {' and '.join(parts)}, and {trainer} takes one score for all of it: "
            "leave that out of the rewards, or train through Atropos, the Python API or HTTP (docs/service.md)"
        )
    return rollout


def logprobs_of(example: hermes_rl.Example, trainer: str) -> list[float]:
    """Return the log-probabilities of a response; raises `UserError` where they are not known."""
    if example.logprobs is None:
        raise UserError(
            f"a rollout has no log-probabilities, and {trainer} trains with those that were sampled: name a "
            "token-level policy. allow_inexact=True takes tokens that are not proven, and makes no log-probabilities up"
        )
    return example.logprobs


def values_of(rollout: hermes_rl.Rollout) -> dict[str, float]:
    """Return the values of those rewards that have one."""
    return {name: reward.value for name, reward in rollout.rewards.items() if reward.value is not None}
