"""Rewards by name, without loading any: those that come along, and those that installed packages publish."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from hermes_rl.shipped import shipped_dir
from hermes_rl.spec.signatures import CodeError, Function, function

GROUP = "hermes_rl.rewards"
"""Entry points of packages that bring rewards."""


def shipped_rewards() -> dict[str, Path]:
    """Name → file; each file holds a function of its own name."""
    try:
        folder = shipped_dir("rewards")
    except FileNotFoundError:
        return {}
    return {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}


def published_rewards() -> list[str]:
    """Names in the entry-point group, one per package that publishes it."""
    return [point.name for point in entry_points(group=GROUP)]


def shipped_signatures() -> dict[str, Function]:
    """Name → signature of the rewards that come along."""
    found = {}
    for name, path in shipped_rewards().items():
        try:
            signature = function(path, name)
        except CodeError:
            continue  # a reward that is being written; its own tests say so
        if signature is not None:
            found[name] = signature
    return found
