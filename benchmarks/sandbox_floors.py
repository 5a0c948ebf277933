"""What a sandbox costs at least: bubblewrap and shells without anything of ours around them.

`python benchmarks/sandbox.py` measures these in the same run as our own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hermes_rl.sandbox.bubblewrap import UID, find_bwrap, namespace_options
from hermes_rl.sandbox.images import OUTER_UID

END = b"--end of a command--"
MOUNTS = ("--tmpfs", "/", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib")
MORE = (
    "--symlink",
    "usr/lib64",
    "/lib64",
    "--proc",
    "/proc",
    "--dev",
    "/dev",
    "--dir",
    "/tmp",
    "--chdir",
    "/tmp",
    "--",
)


async def bare(*command: str) -> asyncio.subprocess.Process:
    """A command in bubblewrap with the namespaces and the user that sandboxes have."""
    as_root = os.geteuid() == 0
    fds: list[int] = []
    executable, env = find_bwrap().by_descriptor(fds.append)
    try:
        return await asyncio.create_subprocess_exec(
            "bwrap", *namespace_options(UID, network=False), *MOUNTS, *MORE, *command,
            executable=executable, env=env, pass_fds=fds, cwd="/",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            user=OUTER_UID if as_root else None, group=OUTER_UID if as_root else None,
            extra_groups=[] if as_root else None,
        )  # fmt: skip
    finally:
        for fd in fds:
            os.close(fd)


class Shell:
    """A shell that stays, fed with commands over a pipe."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process, self._in, self._out = process, process.stdin, process.stdout

    async def run(self, command: str) -> bytes:
        """Run a command to its end; what it printed."""
        self._in.write(f"{command}\nprintf '\\n{END.decode()}\\n'\n".encode())
        await self._in.drain()
        output = await self._out.readuntil(b"\n" + END + b"\n")
        return output[: -len(END) - 2]


@asynccontextmanager
async def shell() -> AsyncIterator[Shell]:
    """A persistent bash in bare bubblewrap."""
    process = await bare("/usr/bin/env", "LANG=C.UTF-8", "PATH=/usr/bin:/bin", "/bin/bash", "--norc")
    assert process.stdin is not None
    try:
        yield Shell(process)
    finally:
        process.stdin.close()
        await process.wait()
