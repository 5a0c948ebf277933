"""The helper's code in the form in which it is handed to the Python inside a sandbox.

Owns choosing that Python and compiling the helper for it, once per interpreter: compiling at every start
would cost a third of the time that a sandbox takes to start.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from hermes_rl.errors import SandboxFailure

MODULES = ("wire", "helper_files", "helper_system", "helper")
SYSTEM_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")

BOOT = """
import marshal, os, sys
for name, code in marshal.loads(os.pread(int(sys.argv[2]), 1 << 22, 0)):
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
module.main()
"""

_COMPILE = """
import marshal, sys
sources = eval(sys.stdin.read())
compiled = [(name, compile(source, name, "exec", dont_inherit=True)) for name, source in sources]
sys.stdout.buffer.write(marshal.dumps(compiled))
"""


@functools.cache
def helper_bundle(python: str) -> bytes:
    """The helper's modules, compiled by `python`; starts that interpreter when first asked for it."""
    folder = Path(__file__).parent
    sources = [(f"hermes_rl.sandbox.{name}", (folder / f"{name}.py").read_text("utf-8")) for name in MODULES]
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-X", "utf8", "-c", _COMPILE],
            input=repr(sources).encode(),
            capture_output=True,
            env={},
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxFailure(f"{python} cannot compile the sandbox helper: {error}") from error
    if done.returncode != 0:
        tail = done.stderr.decode("utf-8", "replace")[-500:]
        raise SandboxFailure(f"{python} cannot compile the sandbox helper: {tail}")
    return done.stdout


def boot_argv(python: str, control: int, code: int) -> list[str]:
    """The command that runs the helper with its socket and its code at these descriptors."""
    return [python, "-I", "-S", "-c", BOOT, str(control), str(code)]


def system_python() -> str | None:
    """A Python that is part of the system folders which every sandbox sees anyway."""
    for path in SYSTEM_PYTHONS:
        if os.access(path, os.X_OK) and os.path.realpath(path).startswith("/usr/"):
            return path
    return None


def own_python() -> str:
    """The interpreter that this program runs under, outside of any virtual environment."""
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(base if base.exists() else Path(sys.executable).resolve())
