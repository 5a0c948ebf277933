"""A pull door's half that is the same for all trainers: they ask for rollouts and sample the tokens themselves.

`Pull` is one spec behind such a trainer. It owns when the spec opens, which rollouts are played together, and what of a
trainer's settings or of a rollout is refused because the other side has no place for it. A door adds the shapes of its
trainer: what names a row, how a call is sampled, and what a rollout looks like there. CONTRIBUTING.md has an example.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import hermes_rl
from hermes_rl.errors import RunError, UserError
from hermes_rl.integrations.opened import require_carried, require_own_baseline, trained_seats

FAILURES = tuple(ending for ending in hermes_rl.Ending if not ending.graded)
"""Endings that infrastructure caused, which trainers are told apart by."""
CUT = (hermes_rl.Ending.LENGTH, hermes_rl.Ending.TOKEN_BUDGET)
"""Endings of a rollout that a bound on its tokens has cut short."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_k": (-1, 0, None), "min_p": (0.0, None), "repetition_penalty": (1.0, None), "stop": (None, []),
}  # fmt: skip
"""Settings of sampling that rollouts do not apply, and their values that change nothing."""


class BatchPlace(NamedTuple):
    """Where a rollout belongs: its row, the id of its group (None: a new one), and which of so many members it is."""

    row: hermes_rl.Row | str
    group: str | None
    member: int
    size: int


class BatchResult(NamedTuple):
    """What became of a place: its rollout, None where its group was dropped, how that ended, and what had failed."""

    rollout: hermes_rl.Rollout | None
    ending: hermes_rl.Ending
    error: str | None


class Pull:
    """A spec behind a trainer that asks for rollouts.

    Doors have these arguments by the same names, with `renderer`, which is as `renderer` of a server in a spec.

    Args:
        trainer: its name in what is refused.
        env: the environment that plays.
        policy: what samples for it; None: each play says it.
        sampling: settings of the spec's `agent`, such as `{"max_turns": 4}`. Temperature and top_p are the trainer's.
        where: the trainer's own place for those two.
        replays: how often a rollout is played again after a failure that was not the policy's doing.
        concurrency: rollouts at a time, or groups where a reward compares their members; default: all of a batch.
        allow_inexact: train also on tokens that are not proven to be those that were sampled.
        seats: the door hands on what `play_all` returns, so that several seats of an episode may be trained.

    Raises:
        UserError: `sampling` has what the trainer sets.
    """

    def __init__(
        self,
        trainer: str,
        env: hermes_rl.Env,
        policy: hermes_rl.Policy | None = None,
        *,
        sampling: Mapping[str, Any] | None = None,
        where: str = "its configuration",
        replays: int = 2,
        concurrency: int | None = None,
        allow_inexact: bool = False,
        seats: bool = False,
    ) -> None:
        self.trainer, self.env, self.policy, self._seats = trainer, env, policy, seats
        self.own = own_settings(sampling, trainer, where)
        self._replays, self._exact = replays, not allow_inexact
        self._room = asyncio.Semaphore(concurrency or 1_000_000)
        self._opening: asyncio.Task[Any] | None = None

    async def open(self) -> hermes_rl.Env:
        """Return the environment, opened by the first call; raises `UserError` where it cannot be opened, or the
        trainer cannot play it. A caller who is cancelled leaves the others their opening."""
        if self._opening is None:
            self._opening = asyncio.create_task(self.env.open())
        await asyncio.shield(self._opening)
        require_own_baseline(self.env, self.trainer, seats=self._seats)
        return self.env

    async def close(self) -> None:
        """End what is played and release everything."""
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)
        await self.env.close()

    def sampling(
        self, parameters: Mapping[str, Any], raw: str | None = None, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
    ) -> dict[str, Any]:
        """Return the agent's settings for a play: the user's, and the trainer's temperature and top_p.

        Args:
            parameters: how the trainer samples, by vLLM's names.
            raw: the way out where the engine's log-probabilities, which are trained on, are those before both.
            neutral: what rollouts do not apply, with the values that change nothing.

        Raises:
            UserError: something is not applied to rollouts, or the log-probabilities know nothing of it.
        """
        for name, values in neutral.items():
            if parameters.get(name, values[0]) not in values:
                raise UserError(f"{name}={parameters[name]} of {self.trainer} is not applied to rollouts: leave it out")
        settings = {name: parameters[name] for name in ("temperature", "top_p") if name in parameters}
        for name, value in settings.items():
            try:
                settings[name] = float(value)
            except (TypeError, ValueError):
                raise UserError(f"{name}={value!r:.60} of {self.trainer} is no number") from None
        if raw is not None and set(settings.values()) - {1.0}:
            raise UserError(
                f"{settings}: the engine's log-probabilities know nothing of it, so they are not those that were "
                f"sampled. Leave both at 1, or {raw}"
            )
        return {**self.own, **settings}

    async def play(
        self, place: BatchPlace, split: str, sampling: Mapping[str, Any], policy: hermes_rl.Policy | None = None
    ) -> hermes_rl.Rollout:
        """Play one rollout by itself, with another policy where one is given. `Env.play` raises the same."""
        row, group, member, size = place
        return await self.env.play(
            row,
            policy=policy or self.policy,
            group=group,
            index=member,
            size=size,
            split=split,
            sampling=sampling,
            replays=self._replays,
        )

    async def play_group(self, place: BatchPlace, split: str, sampling: Mapping[str, Any]) -> hermes_rl.Group:
        """Play all members of a group. `Env.play_group` raises the same.

        Where several seats of an episode are trained, its members are those seats' rollouts; `UserError` where these
        are no whole number of episodes.
        """
        row, group, _, size = place
        seats = trained_seats(self.env)
        if size % seats:
            raise UserError(f"{seats} seats of an episode are trained, so {self.trainer}'s groups are multiples of it")
        options: dict[str, Any] = {"split": split, "sampling": sampling, "replays": self._replays}
        played = await self.env.play_group(row, size // seats, self.policy, group, **options)
        return played if seats == 1 or played.dropped is not None else played.compared()[0]

    async def play_all(
        self, places: Sequence[BatchPlace], split: str, sampling: Mapping[str, Any]
    ) -> list[BatchResult]:
        """Play every place of a batch; members that a reward compares are played together, and have to be there all.

        Cancelling the wait ends what is played.
        """

        comparing = bool(self.env.comparing) or trained_seats(self.env) > 1

        async def play(place: BatchPlace) -> dict[tuple[str | None, int], BatchResult]:
            async with self._room:
                if not comparing or place.size == 1:
                    members = {place.member: await self.play(place, split, sampling)}
                else:
                    group = await self.play_group(place, split, sampling)
                    if group.dropped is not None:
                        lost = BatchResult(None, group.dropped, group.detail)
                        return {(place.group, member): lost for member in range(place.size)}
                    members = dict(enumerate(group.rollouts))
            return {(place.group, number): BatchResult(own, own.ending, own.error) for number, own in members.items()}

        # Where the members of a group are played together, the play of the first one is that of all.
        begun = [place for place in places if not comparing or place.size == 1 or place.member == 0]
        work = [asyncio.create_task(play(place)) for place in begun]
        try:
            ended = {place: played for part in await asyncio.gather(*work) for place, played in part.items()}
        finally:
            for task in work:
                task.cancel()
        return [ended[place.group, place.member] for place in places]

    def examples(self, rollout: hermes_rl.Rollout, *, one: bool = False) -> list[hermes_rl.Example]:
        """Return what is trained on of a rollout. That takes milliseconds: call it in a thread.

        Raises:
            UserError: its rewards say more than the trainer takes, its tokens are not proven, or there have to be those
                of `one` sequence and there are others.
        """
        return require_carried(rollout, self.trainer).examples(one=one, exact=self._exact)


def own_settings(sampling: Mapping[str, Any] | None, trainer: str, where: str) -> dict[str, Any]:
    """Return settings of `agent` that the user gives a door; refuse those that the trainer sets `where` it says."""
    if not isinstance(sampling, Mapping | None):
        raise UserError(f"sampling is {sampling!r:.60}: write settings of `agent`, such as {{'max_turns': 4}}")
    settings = dict(sampling or {})
    for name in sorted({"temperature", "top_p"} & settings.keys()):
        raise UserError(f"{name} is {trainer}'s: set it in {where}, not in `sampling`")
    return settings


def row_named(value: Any, problem: str, door: str) -> tuple[str, str]:
    """Return the split and the key of the row that a trainer's data name, in a mapping or as JSON; UserError says the
    `problem`, and which page shows how the data are written."""
    try:
        row = json.loads(value) if isinstance(value, str) else value
        return str(row["split"]), str(row["key"])
    except (KeyError, IndexError, TypeError, ValueError, RecursionError):
        raise UserError(f"{problem}: write the data as docs/integrations/{door}.md shows") from None


# ---------------------------------------------------------------------------- how a call is sampled, by vLLM's names


def parameters(sampling: hermes_rl.Sampling, most: int | None = None) -> dict[str, Any]:
    """Return how a call is to be sampled, as vLLM names it; `most` tokens at the most where that is fewer."""
    return {
        "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "max_tokens": sampling.max_tokens if most is None else min(sampling.max_tokens, most),
        "stop_token_ids": list(sampling.stop_ids),
    }


def sampled_by_vllm(answer: Any) -> hermes_rl.Sampled:
    """Return the tokens of a vLLM `RequestOutput` with one completion, which was asked with `logprobs=0`."""
    (output,) = answer.outputs
    if len(output.token_ids) != (known := len(output.logprobs or ())):
        raise ValueError(f"vLLM gave {len(output.token_ids)} tokens and {known} log-probabilities")
    logprobs = [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
    return hermes_rl.Sampled(list(output.token_ids), logprobs, output.finish_reason or "stop")


# ------------------------------------------------------------------------------------ whether there is a score


def is_scored(rollout: hermes_rl.Rollout | None) -> TypeGuard[hermes_rl.Rollout]:
    """Whether it has a score and something that was sampled."""
    return rollout is not None and rollout.score is not None and rollout.turns > 0


def require_score(rollout: hermes_rl.Rollout) -> hermes_rl.Rollout:
    """Return the rollout, or raise a RunError where it has no score."""
    if not is_scored(rollout):
        lack = "score" if rollout.score is None else "tokens"
        raise RunError(f"rollout {rollout.id} has no {lack} ({rollout.ending}: {rollout.error or rollout.no_tokens})")
    return rollout


def require_a_score(batch: Sequence[BatchResult]) -> None:
    """Raise a RunError where infrastructure failed every rollout of a batch, or no program of it asked the policy."""
    ended = Counter(ending for _, ending, _ in batch)
    unasked = [played.no_tokens for played, _, _ in batch if played is not None and not played.turns]
    if ended.keys() <= set(FAILURES) or len(unasked) == len(batch):
        causes = ", ".join(f"{many} {ending}" for ending, many in ended.items())
        details = sorted({detail for detail in (*(detail for _, _, detail in batch), *unasked) if detail})
        raise RunError(f"not one of {len(batch)} rollouts could be scored ({causes}): {'; '.join(details[:3])}")
