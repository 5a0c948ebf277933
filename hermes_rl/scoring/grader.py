"""Grading a rollout, then its group, by the rewards of a spec.

Owns the order (gates first, then file order; group-level rewards once all members have ended) and what each
reward is offered. A failure leaves as an exception; what was computed before it is kept by the caller.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from hermes_rl.errors import RewardFailure, UserError
from hermes_rl.scoring.call import CONTEXT, RewardFunction, call_reward
from hermes_rl.scoring.combine import Weighting, combine
from hermes_rl.scoring.value import RewardValue, interpret, total


class Restorable(Protocol):
    """What the grader needs of a `ToolContext`: files that a reward lays down go away after it."""

    def restore(self) -> None: ...


@dataclass(frozen=True)
class GradedReward:
    """One reward of a spec: the function, how it counts, its arguments before rendering."""

    function: RewardFunction
    weighting: Weighting
    args: Mapping[str, Any] = field(default_factory=dict)
    fresh: bool = False
    """It looks into a new sandbox with the artifacts laid in, not into the rollout's own."""

    @property
    def name(self) -> str:
        return self.weighting.name


Render = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
"""(arguments with templates, columns of the row) → arguments."""

Machines = Callable[[GradedReward], AbstractAsyncContextManager[Restorable | None]]
"""The sandbox that a reward looks into, there for as long as it runs; None for one that does not look."""


@dataclass(frozen=True)
class Grader:
    """The rewards of a spec, ready to be called for any rollout.

    `roles` are the servers by role name, offered to rewards that name them.
    """

    rewards: tuple[GradedReward, ...]
    render: Render
    clamp: tuple[float, float] | None = None
    roles: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for reward in self.rewards:
            if reward.function.group_level and reward.function.uses_context:
                raise UserError(
                    f"reward {reward.name!r} takes both `group` and `ctx`; a group-level reward runs after the "
                    "sandboxes are gone: compute what it needs in a reward of weight 0"
                )

    @property
    def ordered(self) -> tuple[GradedReward, ...]:
        """Gates first, otherwise in file order."""
        return tuple(sorted(self.rewards, key=lambda reward: not reward.weighting.gate))

    @property
    def has_group_rewards(self) -> bool:
        return any(reward.function.group_level for reward in self.rewards)

    async def grade_rollout(
        self,
        item: Mapping[str, Any],
        result: Any,
        machines: Machines | None,
        state: Any,
        values: dict[str, RewardValue],
        only: Container[str] | None = None,
    ) -> None:
        """Call the per-rollout rewards in order, each value put into `values` as soon as it is known.

        `machines` is None where the sandbox is gone and no reward that is called looks into it; `only` are their names,
        None is all.

        Raises:
            Failure: a reward failed; `values` keeps those before it.
        """
        for reward in self.ordered:
            if reward.function.group_level or (only is not None and reward.name not in only):
                continue
            own = copy.deepcopy(item)  # a reward that changes its row must not change anybody else's
            async with machines(reward) if machines is not None else nullcontext() as ctx:
                offered = {"item": own, "result": result, "ctx": ctx, "state": state, **self._roles}
                arguments = self._arguments(reward, own, offered)
                # What it laid down goes away in the same thread: ToolContext waits for this loop.
                restore = ctx.restore if reward.function.uses_context and ctx is not None else None
                returned, seconds = await call_reward(reward.function, arguments, after=restore)
            values[reward.name] = interpret(reward.name, returned, seconds, result.turns_used)

    async def grade_group(
        self,
        item: Mapping[str, Any],
        results: Sequence[Any],
        values: Sequence[dict[str, RewardValue]],
        only: Container[str] | None = None,
    ) -> None:
        """Call the group-level rewards (those named `only`); `values[i]` receives those of rollout *i*.

        Raises:
            Failure: a reward failed, or did not return one value per rollout.
        """
        for reward in self.ordered:
            if not reward.function.group_level or (only is not None and reward.name not in only):
                continue
            own = copy.deepcopy(item)
            offered = {"item": own, "group": list(results), **self._roles}
            returned, seconds = await call_reward(reward.function, self._arguments(reward, own, offered))
            members = _per_member(reward.name, returned, len(results))
            for slot, value, result in zip(values, members, results, strict=True):
                slot[reward.name] = interpret(reward.name, value, seconds, result.turns_used)

    def score(self, values: Mapping[str, RewardValue]) -> float:
        """The score of a rollout whose rewards are all known; see `combine`."""
        return combine([reward.weighting for reward in self.rewards], values, self.clamp)

    def credit(self, values: Mapping[str, RewardValue]) -> tuple[float, ...] | None:
        """The weighted sum of what rewards give to each turn; None where none does."""
        given = [
            [reward.weighting.weight * turn for turn in value.per_turn]
            for reward in self.rewards
            if not reward.weighting.gate and (value := values.get(reward.name)) is not None and value.per_turn
        ]
        return tuple(map(total, zip(*given, strict=True))) if given else None

    @property
    def _roles(self) -> dict[str, Any]:
        """Each role by its name, and all of them as `roles` for rewards that are told which to ask."""
        return {**self.roles, "roles": self.roles}

    def _arguments(self, reward: GradedReward, item: Mapping[str, Any], offered: Mapping[str, Any]) -> dict[str, Any]:
        function = reward.function
        given = function.arguments(self.render(reward.args, item))
        missing = [
            name
            for name, parameter in function.parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and name not in given
            and name not in offered
        ]
        if missing:
            kind = "this context is not offered here" if missing[0] in CONTEXT else "give it under args"
            raise UserError(f"reward {reward.name!r} needs {missing[0]!r}: {kind}")
        return {**function.wanted(offered), **given}


def _per_member(name: str, returned: object, size: int) -> Sequence[object]:
    if isinstance(returned, str | bytes) or not isinstance(returned, Sequence) or len(returned) != size:
        found = f"{len(returned)} values" if isinstance(returned, list | tuple) else type(returned).__name__
        raise RewardFailure(
            f"group-level reward {name!r} must return a list with one value per rollout ({size}), not {found}"
        )
    return returned
