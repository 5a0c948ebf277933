"""Locate the cache for files that can be created or downloaded again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """Return $XDG_CACHE_HOME/hermes-rl if set, else ~/.cache/hermes-rl, for root /var/cache/hermes-rl."""
    top = os.environ.get("XDG_CACHE_HOME")
    default = Path("/var/cache") if os.geteuid() == 0 else Path.home() / ".cache"
    return (Path(top) if top else default) / "hermes-rl"
