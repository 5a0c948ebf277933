"""The Python that runs the helper in a sandbox whose image may have none, or one that the agent can replace.

Owns a small folder with an interpreter, its loader, its libraries and the few modules that the helper imports, copied
from this machine into the cache once. It is shown to the sandbox read-only at a path of its own and started
through its own loader, so that nothing of the image has a part in it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.bundle import BOOT
from hermes_rl.sandbox.images import cached

RUNTIME_FOLDER = "/.hermes-rl"
"""Where a sandbox sees it."""

_LOOK = """
import __future__, _ctypes, _signal, _socket, errno, json, marshal, os, resource, select, stat, sys, time
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
    """The folder; `python` is any interpreter of this machine. Raises `SandboxFailure` where it cannot be looked at."""
    done = subprocess.run([python, "-I", "-S", "-c", _LOOK], capture_output=True, env={}, timeout=60, check=False)
    if done.returncode != 0:
        raise SandboxFailure(f"{python} cannot be looked at: {done.stderr.decode('utf-8', 'replace')[-500:]}")
    found = json.loads(done.stdout)
    stamps = [f"{path} {os.stat(path).st_mtime_ns}" for path in (found["python"], *found["mapped"])]  # noqa: PTH116
    key = hashlib.sha256("\n".join([*stamps, Path(__file__).read_text("utf-8")]).encode()).hexdigest()[:32]
    return cached(f"runtime/{key}", lambda folder: _copy(found, folder))


def runtime_argv(folder: Path, control: int, code: int) -> list[str]:
    """The command that runs the helper in a sandbox, as `boot_argv` for a Python of the system."""
    return [*runtime_python(folder), BOOT, str(control), str(code)]


def runtime_python(folder: Path) -> list[str]:
    """The command that runs in a sandbox the Python code that follows it."""
    loader, python = f"{RUNTIME_FOLDER}/lib/{_loader(folder)}", f"{RUNTIME_FOLDER}/bin/python3"
    return [loader, "--library-path", f"{RUNTIME_FOLDER}/lib", python, "-I", "-S", "-c"]


def _loader(folder: Path) -> str:
    return next(path.name for path in (folder / "lib").iterdir() if re.match(r"ld[-.].*\.so", path.name))


def _copy(found: dict[str, Any], folder: Path) -> None:
    library = folder / "lib" / found["version"]
    (library / "lib-dynload").mkdir(parents=True)
    (folder / "bin").mkdir()
    shutil.copy(found["python"], folder / "bin" / "python3")
    for path in map(Path, found["mapped"]):
        if ".so" in path.name and "lib-dynload" not in path.parts:
            _copy_library(path, folder / "lib")
    for path in map(Path, found["modules"]):
        target = library / os.path.relpath(path, found["library"])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)


def _copy_library(path: Path, folder: Path) -> None:
    """A library is asked for under a shorter name than that of its file: libz.so.1 is libz.so.1.2.13."""
    shutil.copy(path, folder / path.name)
    name = path.name
    while name.rpartition(".so.")[1]:
        name = name.rpartition(".")[0]
        if not (folder / name).exists():
            (folder / name).symlink_to(path.name)
