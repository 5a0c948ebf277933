"""A released sandbox leaves no processes, descriptors or directories."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import Sandbox, SandboxConfig
from hermes_rl.sandbox.helper_sandbox import HelperSandbox
from tests.waiting import stays, until


def marked(mark: str) -> list[int]:
    """Process ids of this machine whose command line holds `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


async def gone(mark: str) -> bool:
    """Wait until no process has `mark` in its command line."""
    return bool(await until(lambda: not marked(mark)))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


async def no_more_than(number: int) -> bool:
    """Wait until there are at most so many descriptors: a connection to an engine is closed a little later."""
    return bool(await until(lambda: descriptors() <= number))


async def steady_descriptors() -> int:
    """Their number once it stays the same for a while."""
    await until(stays(descriptors, looks=10))
    return descriptors()


async def there(mark: str, count: int = 1) -> list[int]:
    """Wait until so many processes have `mark` in their command line."""
    await until(lambda: len(marked(mark)) >= count)
    return marked(mark)


def ended(pid: int) -> bool:
    """True for a zombie too: burying it is the business of whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def exists(path: str) -> bool:
    return Path(path).exists()


def leftovers() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("hermes-rl-*"))


def unique(number: int) -> str:
    """A number of seconds that no other process sleeps."""
    return f"{os.getpid()}{number}"


async def test_orphans_end_with_the_sandbox(backend: str) -> None:
    seconds = unique(1)
    async with create_sandbox(SandboxConfig(backend=backend)) as sandbox:
        await sandbox.run(f"setsid nohup sleep {seconds} >/dev/null 2>&1 &")
        await sandbox.run(f"(setsid sh -c 'sleep {seconds} & sleep {seconds}' &)")
        await there(seconds, 3)
    assert marked(seconds) == []


async def test_cancelled_command_is_killed(sandbox: Sandbox) -> None:
    seconds = unique(2)
    task = asyncio.create_task(sandbox.run(f"sleep {seconds}"))
    await there(seconds)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await gone(seconds)
    assert (await sandbox.run("echo usable")).output == "usable\n"


@pytest.mark.parametrize("delay", [0, 0.001, 0.004, 0.008, 0.015, 0.05])
async def test_cancelled_start_leaves_nothing(backend: str, delay: float) -> None:
    await start_and_close(backend)
    before = await steady_descriptors()
    sandbox = create_sandbox(SandboxConfig(backend=backend, setup=(f"sleep {unique(3)}",)))
    task = asyncio.create_task(sandbox.start())
    await asyncio.sleep(delay)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not sandbox.alive
    assert await gone(unique(3))
    assert await no_more_than(before), f"{descriptors()} descriptors, and {before} before"


async def test_close_that_is_cancelled_still_releases(backend: str) -> None:
    seconds = unique(4)
    sandbox = create_sandbox(SandboxConfig(backend=backend))
    await sandbox.start()
    await sandbox.spawn(f"sleep {seconds}")
    task = asyncio.create_task(sandbox.close())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await gone(seconds)
    await sandbox.close()  # a container is removed a little later; the end of this loop would be before that


async def start_and_close(backend: str) -> None:
    async with create_sandbox(SandboxConfig(backend=backend)) as sandbox:
        await sandbox.run("echo x; sleep 20 &")
        await sandbox.write_file("big", b"x" * 200_000)
        await sandbox.read_file("big")
        await sandbox.spawn("sleep 30")


@pytest.mark.slow
async def test_no_descriptor_thread_or_folder_is_left(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests make folders in the common one
    await start_and_close(backend)
    folders = leftovers()
    before, threads = descriptors(), threading.active_count()
    for _ in range(10):
        await asyncio.gather(*(start_and_close(backend) for _ in range(5)))
    assert await no_more_than(before)
    assert threading.active_count() <= threads + 6  # the event loop's own pool may have grown
    assert leftovers() <= folders


RUNNER = """
import asyncio, sys
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.sandbox.backends import create_sandbox

async def main():
    sandbox = create_sandbox(SandboxConfig(backend=sys.argv[1]))
    await sandbox.start()
    await sandbox.run("setsid sleep %s >/dev/null 2>&1 &" % sys.argv[2])
    await sandbox.spawn("sleep %s" % sys.argv[2])
    print(sandbox.pid, sandbox.home, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_killed_runner_leaves_nothing(backend: str) -> None:
    seconds = unique(5)
    runner = subprocess.Popen(  # noqa: ASYNC220 - a runner of its own, to be killed
        [sys.executable, "-c", RUNNER, backend, seconds], stdout=subprocess.PIPE, text=True
    )
    assert runner.stdout is not None
    pid, home = (await asyncio.to_thread(runner.stdout.readline)).split()
    runner.stdout.close()
    runner.send_signal(signal.SIGKILL)
    await asyncio.to_thread(runner.wait)
    assert await gone(seconds)
    await until(lambda: ended(int(pid)) and (backend != "none" or not exists(home)))


async def test_a_start_that_is_cancelled_twice_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time while it is being closed, at whatever moment of bubblewrap's own start."""
    tmp_path.chmod(0o755)
    for folder in (tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # named in the command line of bubblewrap
    async with create_sandbox(SandboxConfig()) as sandbox:
        await sandbox.run("true")
    for number in range(60):
        starting = asyncio.create_task(create_sandbox(SandboxConfig()).start())
        await asyncio.sleep(number % 20 * 0.0005)
        starting.cancel()
        await asyncio.sleep(number % 3 * 0.001)
        starting.cancel()
        await asyncio.wait([starting])
    assert await gone(str(tmp_path))


KILLED_IN_ITS_START = """
import asyncio, os, signal, sys
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.helper_sandbox import HelperSandbox

setattr(HelperSandbox, sys.argv[1], lambda *given, **more: os.kill(os.getpid(), signal.SIGKILL))
asyncio.run(create_sandbox(SandboxConfig(backend="none")).start())
"""


@pytest.mark.parametrize("moment", ["connect", "prepare"])
async def test_a_runner_that_is_killed_while_it_starts_one_leaves_no_folder(moment: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_IN_ITS_START, moment]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    runner = await asyncio.create_subprocess_exec(*command, env=env, stderr=asyncio.subprocess.DEVNULL)
    assert await runner.wait() == -signal.SIGKILL
    await until(lambda: not list(tmp_path.glob("hermes-rl-*")))


async def test_lost_by_us_is_our_failure(fenced: Sandbox) -> None:
    from hermes_rl.errors import SandboxFailure
    from hermes_rl.stop_reasons import StopReason

    assert isinstance(fenced, HelperSandbox)
    running = asyncio.create_task(fenced.run("sleep 30"))
    await asyncio.sleep(0.05)
    os.kill(fenced.pid, signal.SIGKILL)
    with pytest.raises(SandboxFailure) as caught:
        await running
    assert caught.value.stop_reason is StopReason.SANDBOX_FAILURE
    assert not fenced.alive


async def test_killed_by_the_agent_is_the_agents() -> None:
    from hermes_rl.errors import SandboxFailure
    from hermes_rl.stop_reasons import StopReason

    async with create_sandbox(SandboxConfig(backend="none")) as sandbox:
        with pytest.raises(SandboxFailure) as caught:
            await sandbox.run("kill -9 $PPID; sleep 30")
        assert caught.value.stop_reason is StopReason.SANDBOX_KILLED
        assert sandbox.killed_by_agent
        home = sandbox.home
    assert not exists(home)
