"""Common part of the integrations with trainers that request rollouts and sample the tokens themselves.

`TrainerAdapter` runs one spec for such a trainer. It opens the spec, runs compared rollouts together, and rejects
trainer settings and rollouts that the other side cannot represent. An integration adds the formats of its trainer: how
data name a row, how a call is sampled, and how a rollout is returned. CONTRIBUTING.md has an example.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import hermes_rl
from hermes_rl.errors import RunError, UserError
from hermes_rl.integrations.common import require_carried, require_own_baseline, trained_seats
from hermes_rl.spec.new_names import with_renamed_parameters

FAILURES = tuple(stop_reason for stop_reason in hermes_rl.StopReason if not stop_reason.graded)
"""Stop reasons caused by infrastructure; integrations log them separately."""
CUT = (hermes_rl.StopReason.LENGTH, hermes_rl.StopReason.TOKEN_BUDGET)
"""Stop reasons of rollouts that a token limit truncated."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_k": (-1, 0, None), "min_p": (0.0, None), "repetition_penalty": (1.0, None), "stop": (None, []),
}  # fmt: skip
"""Sampling settings that rollouts do not apply, each with its neutral values; the first is the default."""


class BatchPlace(NamedTuple):
    """Position of a rollout: its row, the id of its group (None: a new one), its index and the size of the group."""

    row: hermes_rl.Row | str
    group: str | None
    member: int
    size: int


class BatchResult(NamedTuple):
    """Result at one position: the rollout (None if its group was dropped), the stop reason, and the error message."""

    rollout: hermes_rl.Rollout | None
    stop_reason: hermes_rl.StopReason
    error: str | None


class TrainerAdapter:
    """A spec that runs for a trainer that requests rollouts.

    Integrations have arguments with these names, and `renderer`, which is the `renderer` of a server in a spec.

    Args:
        trainer: the trainer's name, for error messages.
        env: the environment that runs the rollouts.
        policy: the policy that samples; None: each call passes it.
        sampling: settings of the spec's `agent`, such as `{"max_turns": 4}`. The trainer sets temperature and top_p.
        config_location: the location of those two settings in the trainer, for error messages.
        retries: the maximum number of retries of a rollout after infrastructure failures.
        concurrency: the number of concurrent rollouts, or of groups if rewards compare their members; default: all of
            a batch.
        allow_inexact: also train on tokens that are not token-exact.
        seats: the integration passes on the results of `play_all`, so that several seats of an episode may be trained.

    Raises:
        UserError: `sampling` contains a setting that the trainer sets.
    """

    @with_renamed_parameters
    def __init__(
        self,
        trainer: str,
        env: hermes_rl.Env,
        policy: hermes_rl.Policy | None = None,
        *,
        sampling: Mapping[str, Any] | None = None,
        config_location: str = "its configuration",
        retries: int = 2,
        concurrency: int | None = None,
        allow_inexact: bool = False,
        seats: bool = False,
    ) -> None:
        self.trainer, self.env, self.policy, self._seats = trainer, env, policy, seats
        self.agent_settings = read_agent_settings(sampling, trainer, config_location)
        self._retries, self._exact = retries, not allow_inexact
        self._room = asyncio.Semaphore(concurrency or 1_000_000)
        self._opening: asyncio.Task[Any] | None = None

    async def open(self) -> hermes_rl.Env:
        """Return the environment, opened by the first call.

        Cancelling one caller does not cancel the opening for the others.

        Raises:
            UserError: the environment cannot be opened, or the trainer cannot run it.
        """
        if self._opening is None:
            self._opening = asyncio.create_task(self.env.open())
        await asyncio.shield(self._opening)
        require_own_baseline(self.env, self.trainer, seats=self._seats)
        return self.env

    async def close(self) -> None:
        """Cancel running rollouts and release all resources."""
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)
        await self.env.close()

    def sampling(
        self, parameters: Mapping[str, Any], raw: str | None = None, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
    ) -> dict[str, Any]:
        """Return the agent's settings for a rollout: the user's settings, with the trainer's temperature and top_p.

        Args:
            parameters: the trainer's sampling parameters, by vLLM's names.
            raw: advice for the error message, if the engine's log-probabilities, which are trained on, are computed
                before temperature and top_p are applied; None if they include both.
            neutral: settings that rollouts do not apply, with their neutral values.

        Raises:
            UserError: a parameter is not applied to rollouts, is not a number, or is missing in the log-probabilities.
        """
        for name, values in neutral.items():
            if parameters.get(name, values[0]) not in values:
                raise UserError(f"{name}={parameters[name]} of {self.trainer} is not applied to rollouts: remove it")
        settings = {name: parameters[name] for name in ("temperature", "top_p") if name in parameters}
        for name, value in settings.items():
            try:
                settings[name] = float(value)
            except (TypeError, ValueError, OverflowError):
                raise UserError(f"{name}={value!r:.60} of {self.trainer} is not a number") from None
        if raw is not None and set(settings.values()) - {1.0}:
            raise UserError(
                f"{settings}: the engine's log-probabilities ignore these settings, so they differ from the "
                f"log-probabilities of sampling. Leave both at 1, or {raw}"
            )
        return {**self.agent_settings, **settings}

    async def play(
        self, position: BatchPlace, split: str, sampling: Mapping[str, Any], policy: hermes_rl.Policy | None = None
    ) -> hermes_rl.Rollout:
        """Run one rollout, with `policy` if given, else with the policy of this object.

        Raises:
            UserError, RunError: as for `Env.run`.
        """
        row, group, member, size = position
        return await self.env.run(
            row,
            policy=policy or self.policy,
            group=group,
            index=member,
            size=size,
            split=split,
            sampling=sampling,
            retries=self._retries,
        )

    async def run_group(self, position: BatchPlace, split: str, sampling: Mapping[str, Any]) -> hermes_rl.Group:
        """Run all members of a group.

        If several seats of an episode are trained, the members are the rollouts of those seats.

        Raises:
            UserError: the group size is not a multiple of the number of trained seats; also as for `Env.run_group`.
        """
        row, group, _, size = position
        seats = trained_seats(self.env)
        if size % seats:
            raise UserError(f"{seats} seats of an episode are trained, so {self.trainer}'s groups are multiples of it")
        options: dict[str, Any] = {"split": split, "sampling": sampling, "retries": self._retries}
        played = await self.env.run_group(row, size // seats, self.policy, group, **options)
        return played if seats == 1 or played.dropped is not None else played.compared()[0]

    async def play_all(
        self, positions: Sequence[BatchPlace], split: str, sampling: Mapping[str, Any]
    ) -> list[BatchResult]:
        """Run every position of a batch and return the results in the same order.

        Members that rewards compare run together, so `positions` must contain all members of their group. Cancelling
        this coroutine cancels the rollouts.
        """

        comparing = bool(self.env.comparing) or trained_seats(self.env) > 1

        async def play(position: BatchPlace) -> dict[tuple[str | None, int], BatchResult]:
            async with self._room:
                if not comparing or position.size == 1:
                    members = {position.member: await self.play(position, split, sampling)}
                else:
                    group = await self.run_group(position, split, sampling)
                    if group.dropped is not None:
                        dropped_result = BatchResult(None, group.dropped, group.detail)
                        return {(position.group, member): dropped_result for member in range(position.size)}
                    members = dict(enumerate(group.rollouts))
            return {
                (position.group, member_index): BatchResult(rollout, rollout.stop_reason, rollout.error)
                for member_index, rollout in members.items()
            }

        # If the members of a group run together, the task of the first member runs them all.
        task_positions = [
            position for position in positions if not comparing or position.size == 1 or position.member == 0
        ]
        work = [asyncio.create_task(play(position)) for position in task_positions]
        try:
            ended = {position: played for part in await asyncio.gather(*work) for position, played in part.items()}
        finally:
            for task in work:
                task.cancel()
        return [ended[position.group, position.member] for position in positions]

    def examples(self, rollout: hermes_rl.Rollout, *, one: bool = False) -> list[hermes_rl.Example]:
        """Return the training examples of a rollout, one per sequence. This takes milliseconds: call it in a thread.

        Args:
            one: require exactly one sequence.

        Raises:
            UserError: the rewards give more than a score, the tokens are not token-exact, or `one` is not met.
        """
        return require_carried(rollout, self.trainer).examples(one=one, exact=self._exact)


def read_agent_settings(sampling: Mapping[str, Any] | None, trainer: str, config_location: str) -> dict[str, Any]:
    """Return the settings of `agent` that the user gave as `sampling`.

    Raises:
        UserError: `sampling` is not a mapping, or contains a setting that belongs into the trainer's `config_location`.
    """
    if not isinstance(sampling, Mapping | None):
        raise UserError(f"sampling is {sampling!r:.60}: write settings of `agent`, such as {{'max_turns': 4}}")
    settings = dict(sampling or {})
    for name in sorted({"temperature", "top_p"} & settings.keys()):
        raise UserError(f"{name} is {trainer}'s: set it in {config_location}, not in `sampling`")
    return settings


def row_named(value: Any, problem: str, docs_page: str, split: str | None = None) -> tuple[str, str]:
    """Return the split and the key of the row that a trainer's data name.

    `docs_page` is the name of the integration's page in `docs/integrations`.

    Args:
        value: a mapping with `split` and `key`, or its JSON text.
        problem: the start of the error message.
        split: the split if `value` has none; None: it must have one.

    Raises:
        UserError: `value` has another format.
    """
    try:
        row = json.loads(value) if isinstance(value, str) else value
        return str(row["split"] if split is None else row.get("split", split)), str(row["key"])
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError):
        raise UserError(f"{problem}: write the data as docs/integrations/{docs_page}.md shows") from None


# ---------------------------------------------------------------------------- sampling parameters, by vLLM's names


def parameters(sampling: hermes_rl.Sampling, token_limit: int | None = None) -> dict[str, Any]:
    """Return the sampling parameters of a call by vLLM's names.

    `token_limit` is an additional limit on `max_tokens`.
    """
    return {
        "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "max_tokens": sampling.max_tokens if token_limit is None else min(sampling.max_tokens, token_limit),
        "stop_token_ids": list(sampling.stop_ids),
    }


def sampled_by_vllm(answer: Any) -> hermes_rl.Sampled:
    """Return the tokens of a vLLM `RequestOutput` with one completion, requested with `logprobs=0`.

    Raises:
        ValueError: the numbers of tokens and log-probabilities differ.
    """
    (output,) = answer.outputs
    if len(output.token_ids) != (logprob_count := len(output.logprobs or ())):
        raise ValueError(f"vLLM gave {len(output.token_ids)} tokens and {logprob_count} log-probabilities")
    logprobs = [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
    return hermes_rl.Sampled(list(output.token_ids), logprobs, output.finish_reason or "stop")


# ------------------------------------------------------------------------------------ scores


def is_scored(rollout: hermes_rl.Rollout | None) -> TypeGuard[hermes_rl.Rollout]:
    """Return True if the rollout has a score and sampled tokens."""
    return rollout is not None and rollout.score is not None and rollout.turns > 0


def require_score(rollout: hermes_rl.Rollout) -> hermes_rl.Rollout:
    """Return the rollout; raise `RunError` if it has no score or no sampled tokens."""
    if not is_scored(rollout):
        lack = "score" if rollout.score is None else "tokens"
        raise RunError(
            f"rollout {rollout.id} has no {lack} ({rollout.stop_reason}: {rollout.error or rollout.no_tokens})"
        )
    return rollout


def require_a_score(batch: Sequence[BatchResult]) -> None:
    """Raise `RunError` if infrastructure failed every rollout of a batch, or no rollout called the policy."""
    ended = Counter(stop_reason for _, stop_reason, _ in batch)
    unasked = [played.no_tokens for played, _, _ in batch if played is not None and not played.turns]
    if ended.keys() <= set(FAILURES) or len(unasked) == len(batch):
        causes = ", ".join(f"{many} {stop_reason}" for stop_reason, many in ended.items())
        details = sorted({detail for detail in (*(detail for _, _, detail in batch), *unasked) if detail})
        raise RunError(f"not one of {len(batch)} rollouts could be scored ({causes}): {'; '.join(details[:3])}")
