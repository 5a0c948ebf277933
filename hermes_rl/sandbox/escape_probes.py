"""Escape probes: run a few possible attacks of an agent in this machine's default sandbox: `hermes-rl doctor
--security`.

Each is a short program that prints `GOT` if it succeeded, and `HELD` if not. A successful one is harmless: it reads, or
changes its own files. Owns the attacks and their results; the full set is in the tests.
"""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hermes_rl.errors import HermesRLError
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import KILLED_EXIT_CODE, ResourceLimits, SandboxConfig
from hermes_rl.sandbox.helper_sandbox import HelperSandbox
from hermes_rl.sandbox.helper_system import descendants, process_state
from hermes_rl.sandbox.seccomp import MACHINES

GOT, HELD = "GOT", "HELD"
SECONDS = 15.0
"""Seconds for all of it together."""
USUAL = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE"),
        *("PWD", "SHLVL", "OLDPWD", "TERM", "TMPDIR", "_"),
    }
)
"""Variables that a sandbox, a shell or Python sets itself."""
LIMITS = ResourceLimits(memory=256 << 20, processes=64, disk=32 << 20, open_files=256, best_effort=True)
START = f"""
import ctypes, os, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def say(word):
    os.write(1, word + b"\\n")
    os._exit(0)
def got(): say(b"{GOT}")
def held(): say(b"{HELD}")
"""
ATTACKS = {
    "files of this machine": "if os.path.exists({secret!r}) or os.path.exists('/etc/shadow'): got()",
    "processes of this machine": """
for pid in filter(str.isdigit, os.listdir("/proc")):
    if {mark!r} in open("/proc/" + pid + "/cmdline").read(): got()
""",
    "the environment of this program": "if set(os.environ) & set({names!r}): got()",
    "services on loopback": "s = socket.socket(); s.settimeout(2)\nif s.connect_ex(('127.0.0.1', {port})) == 0: got()",
    "abstract sockets": "s = socket.socket(socket.AF_UNIX)\nif s.connect_ex('\\0{mark}') == 0: got()",
    "capabilities": "if int(open('/proc/self/status').read().split('CapBnd:')[1].split()[0], 16): got()",
    "user namespaces": "if libc.unshare(0x10000000) == 0: got()",
    "mounts": "os.mkdir('m')\nif libc.mount(b'x', b'm', b'tmpfs', 0, None) == 0: got()",
    "io_uring and asynchronous I/O of the kernel": """
if libc.syscall(425, 8, ctypes.create_string_buffer(256)) >= 0: got()
if libc.syscall({io_setup}, 8, ctypes.byref(ctypes.c_ulong())) == 0: got()
""",
    "other address families": "if libc.socket(40, 1, 0) >= 0 or libc.socket(38, 5, 0) >= 0: got()",
    "messages in memory that no limit counts": """
for protocol in range(1, 32):
    try: socket.socket(16, socket.SOCK_DGRAM, protocol); got()
    except OSError: pass
""",
    "surviving others when memory runs out": """
try: open("/proc/self/oom_score_adj", "w").write("0")
except OSError: pass
if int(open("/proc/self/oom_score_adj").read()) < 1000: got()
""",
    "scheduling and limits of process 1": """
import resource
if libc.sched_setscheduler(1, 5, struct.pack("i", 0)) == 0: got()
try: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))
except OSError: held()
got()
""",
    "descriptors of process 1": """
if libc.syscall(438, os.pidfd_open(1), 3, 0) >= 0 or libc.ptrace(16, 1, 0, 0) == 0: got()
""",
    "more memory than its limit": """
try:
    data = bytearray(400 << 20)
    data[::4096] = b"x" * len(data[::4096])
except MemoryError: held()
got()
""",
    "more processes than its limit": """
try:
    for _ in range(100):
        if os.fork() == 0: time.sleep(20); os._exit(0)
except OSError: held()
got()
""",
    "more files than its limit": """
try:
    with open("big", "wb") as file:
        for _ in range(64): file.write(b"x" * (1 << 20))
except OSError: held()
got()
""",
}  # fmt: skip
"""Target of the attack → a Python program, with names of `_place_bait` in braces."""


@dataclass(frozen=True)
class Trial:
    """One attack, and if the sandbox held; `detail` is the observation."""

    name: str
    held: bool
    detail: str


async def trials(backend: str = "bubblewrap") -> list[Trial]:
    """Run all attacks, each in a separate sandbox; an attack that cannot run counts as not held."""
    config = SandboxConfig(backend=backend, limits=LIMITS)
    with _place_bait() as bait:
        outcomes = await asyncio.gather(
            *(_run_probe(name, code.format(**bait), config) for name, code in ATTACKS.items())
        )
    return [*outcomes, await _try_to_outlive(config)]


async def _run_probe(name: str, code: str, config: SandboxConfig) -> Trial:
    try:
        async with asyncio.timeout(SECONDS), create_sandbox(config) as sandbox:
            await sandbox.write_file("attack.py", f"{START}{code}\nheld()\n".encode())
            answer = await sandbox.run("python3 attack.py 2>&1", timeout=SECONDS / 2)
            if GOT in answer.output.split():
                return Trial(name, False, "it got through")
            if HELD in answer.output.split() or answer.exit_code == KILLED_EXIT_CODE:  # a limit has ended it
                return Trial(name, True, "held")
            return Trial(name, False, f"could not be tried: {answer.output.strip()[-200:]}")
    except TimeoutError:
        return Trial(name, False, f"had no end within {SECONDS:g} s")
    except HermesRLError as error:
        return Trial(name, False, f"could not be tried: {error}")


async def _try_to_outlive(config: SandboxConfig) -> Trial:
    """Test if processes that ignore signals, in separate sessions, end with their sandbox."""
    name = "processes that outlive the sandbox"
    command = "for i in 1 2 3 4 5 6; do (trap '' HUP TERM INT; exec setsid sleep 600) >/dev/null 2>&1 & done"
    try:
        async with asyncio.timeout(SECONDS):
            async with create_sandbox(config) as sandbox:
                await sandbox.run(command)
                inside = descendants(sandbox.pid) if isinstance(sandbox, HelperSandbox) else []
            processes = await _still_there(inside)
    except TimeoutError:
        return Trial(name, False, f"it did not end within {SECONDS:g} s")
    except HermesRLError as error:
        return Trial(name, False, f"could not be tried: {error}")
    return Trial(name, bool(inside) and not processes, f"{len(processes)} of {len(inside)} processes are left")


async def _still_there(pids: list[int]) -> list[int]:
    """Return the processes that have not ended a second later; their parent reaps ended ones, which may take a
    moment.
    """
    for _ in range(50):
        pids = [pid for pid in pids if process_state(pid) not in (b"", b"Z", b"X")]
        if not pids:
            break
        await asyncio.sleep(0.02)
    return pids


@contextmanager
def _place_bait() -> Iterator[dict[str, object]]:
    """Yield objects of this machine that an agent must not reach: a file, a process, a service, an abstract socket."""
    marker = f"hermes-rl-{secrets.token_hex(8)}"
    architecture = MACHINES.get(platform.machine())
    with (
        tempfile.NamedTemporaryFile(prefix="hermes-rl-trial-") as secret,
        socket.create_server(("127.0.0.1", 0)) as service,
        socket.socket(socket.AF_UNIX) as abstract,
        subprocess.Popen([marker, "120"], executable=shutil.which("sleep") or "/bin/sleep") as process,
    ):
        abstract.bind(f"\0{marker}")
        abstract.listen()
        try:
            yield {
                "secret": secret.name,
                "mark": marker,
                "port": service.getsockname()[1],
                "names": sorted(set(os.environ) - USUAL),
                "io_setup": architecture.numbers["io_setup"] if architecture is not None else -1,
            }
        finally:
            process.kill()
