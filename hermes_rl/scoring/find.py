"""Finding a reward by what the spec calls it.

A shipped name, ``/abs/file.py:function``, ``package.module:function``, ``atropos:<name>``, or a name that a
package publishes in the entry-point group ``hermes_rl.rewards``. Shipped names win over published ones.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from hermes_rl.errors import NotYetAvailable, UserError
from hermes_rl.plugins import did_you_mean, load_object
from hermes_rl.scoring.call import RewardFunction
from hermes_rl.shipped import shipped_dir

ENTRY_POINTS = "hermes_rl.rewards"


def shipped_rewards() -> dict[str, Path]:
    """Name → file of the rewards that come with hermes-rl; each file holds a function of its own name."""
    return {path.stem: path for path in sorted(shipped_dir("rewards").glob("*.py")) if path.stem[0] != "_"}


def published_rewards() -> dict[str, EntryPoint]:
    """Name → entry point of the rewards that installed packages publish.

    Raises:
        UserError: two packages publish one name.
    """
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        if point.name in found:
            raise UserError(
                f"two packages publish the reward {point.name!r}: {found[point.name].value} and {point.value}; "
                "name the one you mean as package.module:function"
            )
        found[point.name] = point
    return found


def find_reward(name: str, fn: str | None) -> RewardFunction:
    """Load the reward that the spec calls `name`; without `fn` the name itself is looked up.

    Raises:
        UserError: there is no such reward, or its code cannot be loaded.
        NotYetAvailable: a reward of atroposlib's registry.
    """
    reference = fn or name
    if reference.startswith("atropos:"):
        raise NotYetAvailable(f"reward {name!r}: rewards of atroposlib's registry ({reference}) are not available yet")
    if ":" in reference:
        return RewardFunction.of(name, load_object(reference))
    shipped = shipped_rewards()
    if reference in shipped:
        return RewardFunction.of(name, load_object(f"{shipped[reference]}:{reference}"))
    published = published_rewards()
    if reference in published:
        return RewardFunction.of(name, _load(published[reference]))
    known = {*shipped, *published}
    raise UserError(
        f"there is no reward {reference!r}{did_you_mean(reference, known)} "
        f"(there are: {', '.join(sorted(known))}; your own: fn: file.py:function)"
    )


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise UserError(f"reward {point.name!r} of an installed package ({point.value}): {error}") from error
