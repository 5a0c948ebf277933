"""An agent that tries to hold files which other sandboxes open too: ``python -m tests.sandbox.leases BACKEND IMAGE …``.

Started as a program, it lets every configuration attack every other one, and prints what each attacker held.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import product

from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import SandboxConfig

HOLD = """
import ctypes, glob, os
libc, held = ctypes.CDLL(None), []
paths = ["/bin/sh", "/bin/cat", "/usr/bin", "/etc/hosts", "/etc"]
paths += [*glob.glob("/.hermes-rl/*"), *glob.glob("/.hermes-rl/*/*")]
paths += glob.glob("/lib*/*/*.so*")[:50]
for path in paths:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        continue
    for command, argument in ((1024, 1), (1024, 0), (1026, 0x80000001), (1040, 0)):
        if libc.fcntl(fd, command, ctypes.c_long(argument)) == 0:
            held.append(f"{path} {command}")
print(len(paths), held, flush=True)
"""
LEAST = 40.0
"""Seconds; who opens a file with a lease waits 45."""


async def held(attacker: SandboxConfig, other: SandboxConfig) -> str:
    """Return what an agent in one sandbox holds while another one starts and opens files."""
    async with create_sandbox(attacker) as holding:
        await holding.run("true")
        program = f"{HOLD}\nimport time; time.sleep(600)"
        done = await holding.run(["python3", "-c", HOLD], timeout=60)
        process = await holding.spawn(["python3", "-c", program])
        async with asyncio.timeout(LEAST):
            async with create_sandbox(other) as opening:
                assert (await opening.run("cat /bin/sh /etc/hosts > /dev/null; ls /etc > /dev/null")).exit_code == 0
        await process.kill()
        return done.output


async def main(configs: list[SandboxConfig]) -> None:
    for attacker, other in product(configs, configs):
        sys.stdout.write(f"{attacker.backend} {other.backend} {await held(attacker, other)}")


if __name__ == "__main__":
    words = sys.argv[1:]
    asyncio.run(
        main([SandboxConfig(backend=b, image=i or None) for b, i in zip(words[::2], words[1::2], strict=True)])  # type: ignore[arg-type]
    )
