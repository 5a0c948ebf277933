"""Python packages for the default sandbox: a virtual environment that is made once and shown read-only to all.

Owns how it is made (by the host's pip, of wheels alone, so that nothing of a package runs while it is installed) and
where it lies: in the user's cache, under a hash of the list and the interpreter. pip reads the user's own
configuration, so an index, a proxy or a folder of wheels is named there.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hermes_rl.errors import UserError
from hermes_rl.sandbox.bundle import own_python, system_python
from hermes_rl.sandbox.images import cached

PACKAGES = "/python"
"""Where a sandbox sees it; the environment is made for this path. It is at the top, as the agent cannot rename a mount,
but could rename a folder around it."""
PATIENCE = 1800.0
"""Seconds that pip may take."""


@functools.cache
def package_folder(packages: tuple[str, ...]) -> Path:
    """The environment with these packages, made where it is not there; blocks.

    Raises:
        UserError: it cannot be made, with what pip said last.
    """
    python = system_python() or own_python()
    version = _run([python, "-I", "-c", "import sys, sysconfig; print(sys.version, sysconfig.get_platform())"])
    key = hashlib.sha256("\n".join([python, version, *sorted(packages)]).encode()).hexdigest()[:32]
    return cached(f"python/{key}", lambda folder: _make(folder, python, packages))


def _make(folder: Path, python: str, packages: Sequence[str]) -> None:
    pip = find_pip()
    _run([python, "-I", "-m", "venv", "--without-pip", str(folder)])
    inside = str(folder / "bin" / "python")
    wheels = ["--only-binary=:all:", "--no-compile", "--no-input", "--disable-pip-version-check", "--quiet"]
    _run([*pip, "--python", inside, "install", *wheels, "--", *packages])
    _run(
        [inside, "-I", "-m", "compileall", "-q", "-s", str(folder), "-p", PACKAGES, str(folder / "lib")],
        status=(0, 1),
    )
    for path in (folder / "pyvenv.cfg", *(folder / "bin").iterdir()):
        if not path.is_symlink() and path.is_file():
            # Programs name the interpreter by the path at which the environment was made.
            path.write_bytes(path.read_bytes().replace(os.fsencode(folder), PACKAGES.encode()))
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():  # for the user of root's sandboxes, whatever the umask
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))


def find_pip() -> list[str]:
    """The command of a pip of this machine that can install for another interpreter.

    Raises:
        UserError: there is none.
    """
    programs = [[found] for name in ("pip3", "pip") if (found := shutil.which(name)) is not None]
    for command in ([sys.executable, "-m", "pip"], *programs, [system_python() or sys.executable, "-m", "pip"]):
        try:
            words = _run([*command, "--version"]).split()
        except UserError:
            continue  # a module or a program that is no pip
        if len(words) > 1 and _number(words[1]) >= (22, 3):  # the first with --python
            return command
    raise UserError("sandbox.python needs pip 22.3 or later on this machine; install it (python3 -m ensurepip)")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _run(command: Sequence[str], *, status: Sequence[int] = (0,)) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"sandbox.python cannot be made: {error}") from error
    if done.returncode not in status:
        said = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-5:])
        raise UserError(
            f"sandbox.python cannot be made: {said}\nOnly wheels are installed; pip takes its index from its own "
            "configuration (pip config set global.index-url URL, or global.find-links FOLDER)"
        )
    return done.stdout
