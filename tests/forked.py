"""Functions that processes of `tests/user_code/test_fork_server.py` run: each writes JSON to its descriptor."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.transport import Transport


def describe(output: int) -> None:
    """Tell what this process took over from its client."""
    tell(
        output,
        {
            "variables": dict(os.environ),
            "directory": str(Path.cwd()),
            "path": sys.path,
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "cores": sorted(os.sched_getaffinity(0)),
            "descriptors": sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir()),
            "threads": len(list(Path("/proc/self/task").iterdir())),
            "parent": os.getppid(),
            "session": os.getsid(0),
            "name": Path("/proc/self/comm").read_text().strip(),
        },
    )


def draw(output: int) -> None:
    import numpy as np

    tell(output, [random.random(), float(np.random.random())])


def wait(output: int) -> None:
    tell(output, os.getpid())
    time.sleep(600)


def clean_up(output: int, client: int) -> None:
    """Wait until the client has closed its end of the second descriptor, then tell that it was noticed."""
    tell(output, os.getpid())
    os.read(client, 1)
    tell(output, "cleaned up")
    time.sleep(600)


ENTRY = b'{"entry": "tests.forked:describe", "name": "x", "preload": [], "linger": 0, "client": false}'
ODD_MESSAGES = (b"\0\0\0\5hello", b"[]", b"[" * 50_000, b"{}", b'{"entry": 1}', b'{"client": true}', ENTRY)


def write_into_sockets(output: int) -> None:
    """Send the odd message of a number to each socket of this process; the one after the last comes with pipes."""
    number = int(os.environ["NUMBER"])
    for entry in sorted(Path("/proc/self/fd").iterdir()):
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as end:
            if number < len(ODD_MESSAGES):
                end.send(ODD_MESSAGES[number])
            else:
                socket.send_fds(end, ODD_MESSAGES[-1:], [output] * 4)
    tell(output, "written")


def exit_with_7(output: int) -> None:
    sys.exit(7)


def raise_error(output: int) -> None:
    raise ValueError("raised on purpose")


def kill_itself(output: int) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def find_in_memory(output: int) -> None:
    """Tell how often a text is in the memory of this process; the variable has it in hexadecimal and reversed."""
    tell(output, occurrences(os.getpid(), bytes.fromhex(os.environ["SOUGHT_REVERSED"])[::-1]))


def occurrences(pid: int, text: bytes) -> int:
    """Count a text in the writable memory of a process, in pieces of 16 MiB."""
    count = 0
    process = Path(f"/proc/{pid}")
    with (process / "mem").open("rb", buffering=0) as memory:
        for line in (process / "maps").read_text().splitlines():
            span, rights = line.split()[:2]
            if rights[:2] != "rw":
                continue
            start, end = (int(bound, 16) for bound in span.split("-"))
            for piece in range(start, end, 1 << 24):
                try:
                    memory.seek(piece)
                    count += memory.read(min(1 << 24, end - piece)).count(text)
                except OSError:
                    continue  # a page of the kernel
    return count


def ask_model_server(output: int) -> None:
    """Tell the status with which the server of the variable SERVER lists its models."""
    config = ServerConfig(type="openai", base_url=os.environ["SERVER"], model="m")

    async def ask() -> int:
        transport = Transport(config)
        try:
            return (await transport.get_json("models"))[0]
        finally:
            await transport.close()

    tell(output, asyncio.run(ask()))


def tell(output: int, value: object) -> None:
    os.write(output, json.dumps(value).encode() + b"\n")
