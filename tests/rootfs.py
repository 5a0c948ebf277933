"""Small root file systems made of copied files of this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hermes_rl.sandbox.launcher import own_python, system_python

PROGRAMS = (
    *(
        "bash",
        "cat",
        "chmod",
        "comm",
        "cp",
        "cut",
        "dd",
        "df",
        "echo",
        "env",
        "false",
        "find",
        "git",
        "grep",
        "head",
        "id",
        "kill",
        "ln",
    ),
    *(
        "ls",
        "mkdir",
        "mkfifo",
        "mktemp",
        "mv",
        "nohup",
        "patch",
        "printf",
        "yes",
        "pwd",
        "rm",
        "sed",
        "seq",
        "sha256sum",
        "setsid",
        "sh",
        "sleep",
        "sort",
        "stat",
    ),
    *("tail", "tar", "timeout", "touch", "tr", "true", "truncate", "uname", "wc", "xargs"),
)
HEAVY = (
    "test",
    "tests",
    "idlelib",
    "ensurepip",
    "config-*",
    "*.opt-?.pyc",
    "site-packages",
    "dist-packages",
    "lib2to3",
)
ASK = "import json, os, sys; print(json.dumps([os.path.realpath(sys.executable), os.path.dirname(os.__file__)]))"


def make_rootfs(folder: Path, mark: str = "") -> Path:
    """A root with a shell, the usual tools and a Python; `mark` tells one from another in /etc/issue."""
    for name in ("bin", "usr", "etc", "tmp", "testbed"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        found = shutil.which(name)
        if found is not None:
            install(Path(found), folder, f"bin/{name}")
    _python(folder)
    (folder / "etc/issue").write_text(f"image {mark}\n")
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return folder


def small_root(folder: Path, programs: Sequence[str]) -> Path:
    """Make a root file system with these programs of this machine and nothing else; returns its folder."""
    for name in ("bin", "etc", "tmp", "usr/bin"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in programs:
        install(Path(shutil.which(name) or name), folder, f"bin/{name}")
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n")
    return folder


def _python(folder: Path) -> None:
    python = system_python() or own_python()
    program, library = json.loads(subprocess.check_output([python, "-I", "-S", "-c", ASK]))
    install(Path(program), folder, "usr/bin/python3")
    (folder / "bin/python3").symlink_to("../usr/bin/python3")
    target = folder / "usr/lib" / Path(library).name
    shutil.copytree(library, target, ignore=shutil.ignore_patterns(*HEAVY), ignore_dangling_symlinks=True)
    for module in (target / "lib-dynload").iterdir():
        libraries(module, folder)


def install(source: Path, folder: Path, name: str) -> None:
    target = folder / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
        libraries(source, folder)


def libraries(program: Path, folder: Path) -> None:
    """The shared libraries of a program, at the paths where it looks for them."""
    said = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
    for word in said.split():
        target = folder / word.lstrip("/")
        if word.startswith("/") and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(word, target)
