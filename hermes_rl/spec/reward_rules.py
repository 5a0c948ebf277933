"""Combinations of a reward's keys with its function that cannot work, in the same words for `validate` and for a run.

`validate` knows a function by its source alone (`hermes_rl.spec.check_code`), a run by the loaded one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hermes_rl.spec.model import Spec
from hermes_rl.spec.sections.rewards import Reward


def unplayable(name: str, *, compares: bool, looks: bool, of_steps: bool, shares: bool) -> str | None:
    """Return why a reward cannot be called, None if it can.

    Args:
        name: of the reward.
        compares: it compares the members of a group.
        looks: it takes `ctx`.
        of_steps: the spec says `per_step`.
        shares: the spec gives a factor for each seat.
    """
    if of_steps and compares:
        return f"reward {name!r} compares the members of a group, and they have other steps"
    if shares and compares:
        return (
            f"reward {name!r} compares the members of a group, so each seat has its own values: name its "
            "seats in a list"
        )
    if compares and looks:
        return (
            f"reward {name!r} takes both `group` and `ctx`; a group-level reward runs after the sandboxes are gone: "
            "compute what it needs in a reward of weight 0"
        )
    return None


Requirement = tuple[str, str]
"""What must be true of the arguments of a reward: an expression of templates, and a template of the problem."""


def require(name: str, requirements: Sequence[Requirement], arguments: Mapping[str, Any]) -> None:
    """Raise `TemplateError` if the arguments of the reward function `name`, defaults included, do not go together."""
    from hermes_rl.spec.templates import TemplateError, evaluate, render_text

    for condition, problem in requirements:
        if not evaluate(condition, arguments):
            raise TemplateError(f"{name}: {render_text(problem, arguments)}")


def in_process(spec: Spec, reward: Reward, *, takes_state: bool, movable: bool) -> bool:
    """Return True if a reward runs in a separate process; `movable`: its function may."""
    # A reward that names the state runs in the state's process, unless the spec sets `isolate`.
    with_state = takes_state and spec.state is not None
    is_in_runner = reward.isolate == "none" or (reward.isolate is None and with_state and not spec.state_apart)
    return movable and not is_in_runner


def unisolated(spec: Spec, name: str, reward: Reward, *, takes_state: bool, movable: bool) -> str | None:
    """Return why a reward cannot run where the spec says, None if it can; arguments as `in_process`."""
    with_state = takes_state and spec.state is not None
    apart = in_process(spec, reward, takes_state=takes_state, movable=movable)
    if reward.isolate == "sandbox" and (
        not apart or (with_state and spec.state is not None and spec.state.isolate != "sandbox")
    ):
        hint = "set `isolate: sandbox` for the state" if with_state else "leave `isolate` out"
        location = "where the state is" if with_state else "in the runner alone"
        return f"rewards.{name}.isolate: it cannot run in a sandbox, as it runs {location}; {hint}"
    if not apart and with_state and spec.state_apart:
        hint = (
            "set `isolate: none` for the state too" if reward.isolate == "none" else "set `isolate: none` for the state"
        )
        return f"rewards.{name}: it runs in the runner and names `state`, which is in a process; {hint}"
    return None
