"""hermes-agent's own local backend as a measure of comparison, where it is installed (the extra `hermes`)."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

TEXT = "x" * 4096
Step = Callable[[int], Awaitable[object]]


@dataclass(frozen=True)
class Contender:
    """One call of each kind; None, and why, where it is not installed."""

    terminal: Callable[[str], Step] | None = None
    """Of a command."""
    write: Step | None = None
    read: Step | None = None
    why: str = ""


@asynccontextmanager
async def hermes_local(count: int) -> AsyncIterator[Contender]:
    """`count` of its environments, each called in a thread of its own, as it is made for."""
    try:
        from tools.environments.local import LocalEnvironment
        from tools.file_operations import ShellFileOperations
    except ImportError:
        yield Contender(why="hermes-agent is not installed")
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as pool:
        homes = [os.path.join(folder, str(n)) for n in range(count)]  # noqa: PTH118
        for home in homes:
            os.mkdir(home)  # noqa: PTH102
        machines = [LocalEnvironment(cwd=home, timeout=60) for home in homes]
        files = [ShellFileOperations(environment) for environment in machines]
        loop = asyncio.get_running_loop()
        try:
            yield Contender(
                lambda command: lambda n: loop.run_in_executor(pool, machines[n].execute, command),
                lambda n: loop.run_in_executor(pool, files[n].write_file, f"{homes[n]}/f", TEXT),
                lambda n: loop.run_in_executor(pool, files[n].read_file, f"{homes[n]}/f"),
            )
        finally:
            for environment in machines:
                environment.cleanup()
