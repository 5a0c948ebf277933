"""Finding a reward by what the spec calls it.

A shipped name, ``/abs/file.py:function``, ``package.module:function``, ``atropos:<name>``, or a name that a
package publishes in the entry-point group ``hermes_rl.rewards``. Shipped names win over published ones.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.plugins import did_you_mean, load_object
from hermes_rl.scoring.call import RewardFunction
from hermes_rl.shipped import published_rewards, shipped_rewards


def find_reward(name: str, fn: str | None) -> RewardFunction:
    """Load the reward that the spec calls `name`; without `fn` the name itself is looked up.

    Raises:
        UserError: there is no such reward, or its code cannot be loaded.
    """
    reference = fn or name
    if reference.startswith("atropos:"):
        named = load_object("hermes_rl.env.registry_rewards:named")  # by name: the core does not know Atropos
        return RewardFunction.of(name, named(reference.removeprefix("atropos:")))
    if ":" in reference:
        return RewardFunction.of(name, load_object(reference))
    shipped = shipped_rewards()
    if reference in shipped:
        return RewardFunction.of(name, load_object(f"{shipped[reference]}:{reference}"))
    published = published_rewards()
    points = [point for point in published if point.name == reference]
    if points:
        return RewardFunction.of(name, _load(points))
    known = {*shipped, *(point.name for point in published)}
    raise UserError(
        f"there is no reward {reference!r}{did_you_mean(reference, known)} "
        f"(there are: {', '.join(sorted(known))}; your own: fn: file.py:function)"
    )


def _load(points: list[EntryPoint]) -> Any:
    point = points[0]
    if len(points) > 1:
        raise UserError(
            f"two packages publish the reward {point.name!r}: {point.value} and {points[1].value}; "
            "name the one you mean as package.module:function"
        )
    try:
        return point.load()
    except Exception as error:
        raise UserError(f"reward {point.name!r} of an installed package ({point.value}): {error}") from error
