"""What the sandboxes of this machine get beside its system: packages that a spec lists, and a runtime for our helper.

`package_folder` makes a virtual environment once, by the host's pip and of wheels alone, and `npm_folder` a folder of
npm's without their scripts, so that nothing of a package runs while it is installed. Both programs read the user's own
configuration, so an index, a proxy or a folder of wheels is named there. `runtime_folder` copies an interpreter with
its loader, its libraries and the few modules that the helper imports: an image may have no Python, or one that the
agent can replace. All lie in the user's cache under a hash of what they are made of, and sandboxes see them read-only.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hermes_rl.errors import SandboxFailure, UserError
from hermes_rl.sandbox.images import cached
from hermes_rl.sandbox.launcher import isolated, own_python, system_python

# -------------------------------------------------------------------------------- runtime of the helper
# It is started through its own loader at a path of its own, so that nothing of the image has a part in it.

RUNTIME_FOLDER = "/.hermes-rl"
"""Where a sandbox sees it."""

_LOOK = """
import __future__, _ctypes, _signal, _socket, errno, fnmatch, json, marshal, os, re, resource, select, stat, sys, time
maps = open("/proc/self/maps").read().split("\\n")
print(json.dumps({
    "python": os.path.realpath("/proc/self/exe"),
    "version": "python%d.%d" % sys.version_info[:2],
    "mapped": sorted({line.split(None, 5)[5] for line in maps if line.count("/") and " r-xp " in line}),
    "modules": [f for m in sys.modules.values() if (f := getattr(m, "__file__", None))] + [os.__file__],
    "library": os.path.dirname(os.__file__),
}))
"""


@functools.cache
def runtime_folder(python: str) -> Path:
    """Return the folder for an interpreter of this machine; raises `SandboxFailure` where it cannot be looked at."""
    done = subprocess.run([*isolated(python), "-c", _LOOK], capture_output=True, env={}, timeout=60, check=False)
    if done.returncode != 0:
        raise SandboxFailure(f"{python} cannot be looked at: {done.stderr.decode('utf-8', 'replace')[-500:]}")
    description = json.loads(done.stdout)
    stamps = [f"{path} {os.stat(path).st_mtime_ns}" for path in (description["python"], *description["mapped"])]  # noqa: PTH116
    key = hashlib.sha256("\n".join([*stamps, Path(__file__).read_text("utf-8")]).encode()).hexdigest()[:32]
    return cached(f"runtime/{key}", lambda folder: _copy(description, folder))


def runtime_python(folder: Path) -> list[str]:
    """Return the command that runs in a sandbox the Python code behind `-c`, or behind `-` on its input."""
    loader, python = f"{RUNTIME_FOLDER}/lib/{_loader(folder)}", f"{RUNTIME_FOLDER}/bin/python3"
    return [loader, "--library-path", f"{RUNTIME_FOLDER}/lib", *isolated(python)]


def _loader(folder: Path) -> str:
    return next(path.name for path in (folder / "lib").iterdir() if re.match(r"ld[-.].*\.so", path.name))


def _copy(description: dict[str, Any], folder: Path) -> None:
    library = folder / "lib" / description["version"]
    (library / "lib-dynload").mkdir(parents=True)
    (folder / "bin").mkdir()
    shutil.copy(description["python"], folder / "bin" / "python3")
    for path in map(Path, description["mapped"]):
        if ".so" in path.name and "lib-dynload" not in path.parts:
            _copy_library(path, folder / "lib")
    for path in map(Path, description["modules"]):
        target = library / os.path.relpath(path, description["library"])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)


def _copy_library(path: Path, folder: Path) -> None:
    """Copy a library, with the shorter names under which it is asked for: libz.so.1 is libz.so.1.2.13."""
    shutil.copy(path, folder / path.name)
    name = path.name
    while name.rpartition(".so.")[1]:
        name = name.rpartition(".")[0]
        if not (folder / name).exists():
            (folder / name).symlink_to(path.name)


# -------------------------------------------------------------------------------- packages

PACKAGES = "/python"
"""Where a sandbox sees it; the environment is made for this path. It is at the top, as the agent cannot rename a mount,
but could rename a folder around it."""
NPM = "/npm"
PATIENCE = 1800.0
"""Seconds that pip or npm may take."""
WHEELS = (
    "Only wheels are installed; pip takes its index from its own configuration (pip config set global.index-url URL, "
    "or global.find-links FOLDER)"
)
REGISTRY = "npm takes its registry from its own configuration (npm config set registry URL)"


@functools.cache
def package_folder(packages: tuple[str, ...]) -> Path:
    """Return the environment with these packages, made where it is not there; blocks.

    Raises:
        UserError: it cannot be made, with the end of what pip printed.
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
    _open(folder)


@functools.cache
def npm_folder(packages: tuple[str, ...]) -> Path:
    """Return the folder with these packages of npm, made where it is not there; blocks.

    Raises:
        UserError: it cannot be made, with the end of what npm printed.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise UserError("sandbox.npm needs npm on this machine; install it (apt-get install npm), or name an image")
    versions = [_run([program, "--version"], key="sandbox.npm", way=REGISTRY) for program in (npm, "node")]
    key = hashlib.sha256("\n".join([*versions, *sorted(packages)]).encode()).hexdigest()[:32]

    def make(folder: Path) -> None:
        quiet = ["--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund", "--no-update-notifier"]
        _run(
            [npm, "install", *quiet, "--loglevel=error", "--prefix", str(folder), "--", *packages],
            key="sandbox.npm",
            way=REGISTRY,
        )
        _open(folder)

    return cached(f"npm/{key}", make)


def _open(folder: Path) -> None:
    """Let all users read it: root's sandboxes have users of their own, and the umask may be strict."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))


def find_pip() -> list[str]:
    """Return the command of a pip of this machine that can install for another interpreter.

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


def _run(
    command: Sequence[str], *, status: Sequence[int] = (0,), key: str = "sandbox.python", way: str = WHEELS
) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"{key} cannot be made: {error}") from error
    if done.returncode not in status:
        message = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-5:])
        raise UserError(f"{key} cannot be made: {message}\n{way}")
    return done.stdout
