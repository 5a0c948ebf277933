"""What the doors to trainers share.

Owns the one environment of a spec in a process, whichever one a trainer calls; the play of a rollout at an endpoint
where the trainer captures the tokens; and what of a rollout, or of a trainer's settings, is refused because the other
side has no place for it.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from threading import Lock
from typing import Any, TypeGuard

import hermes_rl
from hermes_rl.errors import RunError, UserError

Played = tuple[hermes_rl.Rollout | None, hermes_rl.Ending, str | None]
"""What became of a place in a batch: its rollout, None where its group was dropped, how that ended, what had failed."""
FAILURES = tuple(ending for ending in hermes_rl.Ending if not ending.graded)
"""Endings that infrastructure caused, which trainers are told apart by."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_k": (-1, 0, None), "min_p": (0.0, None), "repetition_penalty": (1.0, None), "stop": (None, []),
}  # fmt: skip
"""Settings of sampling that rollouts do not apply, and their values that change nothing."""

_OPENING = Lock()
_OPENED: dict[str, tuple[hermes_rl.Env, Any]] = {}
_CLOSING = ExitStack()
_PROCESS: list[int] = []
"""The process that has opened something."""


def opened(spec: str) -> tuple[hermes_rl.Env, Any]:
    """Return the environment of a spec and its blocking twin, opened with the first use in this process.

    It lives on a loop in a thread of its own, so that the trainer's loop is never held up, and closes when the process
    ends.

    Raises:
        UserError: the spec is wrong, or the process was forked from one that had opened some.
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

    Raises:
        UserError: the rows may be without end, and nobody has said how many are wanted; or the trainer cannot play it.
    """
    env = hermes_rl.open_env(spec)
    with hermes_rl.sync(env):
        require_no_comparing(env, trainer)
        found = env.rows(split)
        if rows is None and found.length is None:
            raise UserError("the spec's rows may be without end: say how many are wanted, such as rows=1000")
        return [(row.key, env.prompt(row)) for row in islice(found, rows)]


def require_no_comparing(env: hermes_rl.Env, trainer: str) -> None:
    """Refuse a spec whose rewards compare rollouts that the trainer plays apart from each other.

    Raises:
        UserError: there are such rewards, or lost members are to count in their group.
    """
    require_own_baseline(env, trainer)
    if env.comparing:
        raise UserError(
            f"{', '.join(env.comparing)} compares the members of a group, and {trainer} plays each rollout by itself: "
            "leave it out, or train with TRL, or over HTTP (docs/service.md)"
        )


def require_own_baseline(env: hermes_rl.Env, trainer: str) -> None:
    """Refuse a spec that counts lost members as the worst of their group, where the trainer compares scores itself.

    Raises:
        UserError: the spec does so.
    """
    if env.spec.endings.get("lost") == "worst":
        raise UserError(
            f"endings.lost is worst, and {trainer} compares the scores of a group itself, without those that have "
            "none: leave it out, or train through Atropos, TRL's asynchronous loop or groups of the Python API"
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

    Cancelling the wait for it releases its sandbox. It is played once: the trainer repeats what failed.

    Raises:
        UserError: there is no such row, or the trainer cannot play the spec.
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


def is_scored(rollout: hermes_rl.Rollout | None) -> TypeGuard[hermes_rl.Rollout]:
    """Whether it has a score and something that was sampled."""
    return rollout is not None and rollout.score is not None and rollout.turns > 0


def require_a_score(batch: Sequence[Played]) -> None:
    """Raise a RunError where infrastructure failed every rollout of a batch."""
    if all(ending in FAILURES for _, ending, _ in batch):
        causes = ", ".join(f"{many} {ending}" for ending, many in Counter(ending for _, ending, _ in batch).items())
        details = sorted({detail for _, _, detail in batch if detail})
        raise RunError(f"not one of {len(batch)} rollouts could be scored ({causes}): {'; '.join(details[:3])}")


def require_carried(rollout: hermes_rl.Rollout, trainer: str) -> hermes_rl.Rollout:
    """Return the rollout; refuse one of which its rewards say more than a score, where a trainer takes no more.

    Raises:
        UserError: a reward gives credit to turns, or has `overrides`.
    """
    said = ["credit to its turns"] if rollout.credit else []
    said += [f"overrides ({', '.join(rollout.overrides)})"] if rollout.overrides else []
    if said:
        raise UserError(
            f"rewards give rollout {rollout.id} {' and '.join(said)}, and {trainer} takes one score for all of it: "
            "leave that out of the rewards, or train through Atropos, the Python API or HTTP (docs/service.md)"
        )
    return rollout


def logprobs_of(example: hermes_rl.Example, trainer: str) -> list[float]:
    """Return the log-probabilities of a response.

    Raises:
        UserError: they are not known, and the trainer cannot do without.
    """
    if example.logprobs is None:
        raise UserError(
            f"a rollout has no log-probabilities, and {trainer} trains with those that were sampled: name a "
            "token-level policy. allow_inexact=True takes tokens that are not proven, and makes no log-probabilities up"
        )
    return example.logprobs


def values_of(rollout: hermes_rl.Rollout) -> dict[str, float]:
    """Return the values of those rewards that have one."""
    return {name: reward.value for name, reward in rollout.rewards.items() if reward.value is not None}


# ------------------------------------------------------------------------------------- the settings of a trainer


def without_trainers(sampling: Mapping[str, Any] | None, trainer: str, where: str) -> dict[str, Any]:
    """Return settings of `agent` that the user gives a door; refuse those that the trainer sets `where` it says."""
    given = dict(sampling or {})
    for name in sorted({"temperature", "top_p"} & given.keys()):
        raise UserError(f"{name} is {trainer}'s: set it in {where}, not in `sampling`")
    return given


def require_neutral(given: Mapping[str, Any], trainer: str, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL) -> None:
    """Refuse settings of a trainer's sampling that rollouts do not apply."""
    for name, values in neutral.items():
        if given.get(name, values[0]) not in values:
            raise UserError(f"{name}={given[name]} of {trainer} is not applied to rollouts: leave it out")


def require_in_logprobs(settings: Mapping[str, float], way_out: str) -> None:
    """Refuse temperature and top_p of an engine whose log-probabilities are those before them."""
    if set(settings.values()) - {1.0}:
        raise UserError(
            f"{dict(settings)}: the engine's log-probabilities know nothing of it, so they are not those that were "
            f"sampled. Leave both at 1, or {way_out}"
        )
