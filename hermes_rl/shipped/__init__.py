"""Find the specs, rewards and starter files that hermes-rl ships, and the rewards of installed packages.

In a wheel the files are inside this package; in a checkout they are at the top level of the repository.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Literal

from hermes_rl.plugins import entry_points

REWARD_GROUP = "hermes_rl.rewards"
"""Entry point group of packages that publish rewards."""

_HERE = Path(__file__).resolve().parent
_CHECKOUT = _HERE.parent.parent


def shipped_dir(kind: Literal["specs", "rewards", "starters", "agents"]) -> Path:
    """Return the directory of the shipped specs, rewards, starter files, or recipes of agent programs.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    for folder in (_HERE / kind, _CHECKOUT / kind):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"hermes-rl was installed without its {kind}; install it again")


def shipped_rewards() -> dict[str, Path]:
    """Return the file of each shipped reward by name; the file defines a function of the same name."""
    return {path.stem: path for path in sorted(shipped_dir("rewards").glob("*.py")) if not path.stem.startswith("_")}


def published_rewards() -> list[EntryPoint]:
    """Return the rewards that installed packages publish. Two may share a name, which is then an error to use."""
    return entry_points(group=REWARD_GROUP)
