"""Where the specs and rewards that come with hermes-rl lie.

In a wheel they are inside this package; in a checkout they stand at the top level of the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

_HERE = Path(__file__).resolve().parent
_CHECKOUT = _HERE.parent.parent


def shipped_dir(kind: Literal["specs", "rewards"]) -> Path:
    """The folder of the shipped specs or rewards.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    for folder in (_HERE / kind, _CHECKOUT / kind):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"hermes-rl was installed without its {kind}; install it again")
