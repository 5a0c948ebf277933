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

    terminal: Step | None = None
    """Its tool for a command, as a model calls it."""
    execute: Step | None = None
    """What that tool runs a command with, without the tool around it."""
    write: Step | None = None
    read: Step | None = None
    why: str = ""


@asynccontextmanager
async def hermes_local(count: int, command: str) -> AsyncIterator[Contender]:
    """`count` of its environments, each called in a thread of its own, as it is made for."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as pool:
        os.environ["HERMES_HOME"] = folder  # else it would read the user's own settings
        try:
            from tools.environments.local import LocalEnvironment
            from tools.file_operations import ShellFileOperations
            from tools.terminal_tool import cleanup_all_environments, register_task_env_overrides, terminal_tool
        except ImportError:
            yield Contender(why="hermes-agent is not installed")
            return
        homes = [os.path.join(folder, str(n)) for n in range(count)]  # noqa: PTH118
        for home in homes:
            os.mkdir(home)  # noqa: PTH102
            register_task_env_overrides(home, {"env_type": "local", "cwd": home})
        machines = [LocalEnvironment(cwd=home, timeout=60) for home in homes]
        files = [ShellFileOperations(environment) for environment in machines]
        loop = asyncio.get_running_loop()
        try:
            yield Contender(
                lambda n: loop.run_in_executor(pool, lambda: terminal_tool(command, task_id=homes[n])),
                lambda n: loop.run_in_executor(pool, machines[n].execute, command),
                lambda n: loop.run_in_executor(pool, files[n].write_file, f"{homes[n]}/f", TEXT),
                lambda n: loop.run_in_executor(pool, files[n].read_file, f"{homes[n]}/f"),
            )
        finally:
            for environment in machines:
                environment.cleanup()
            cleanup_all_environments()
