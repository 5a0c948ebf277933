"""ResourceLimits on a sandbox as a whole; where this machine lets us make no groups, what is promised then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hermes_rl.endings import Ending
from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox import ResourceLimits, SandboxConfig, create_sandbox
from hermes_rl.sandbox.cgroup import ControlGroup, Layout, find_layout
from hermes_rl.sandbox.helper_system import children

HERE = find_layout()
needs_groups = pytest.mark.skipif(HERE is None, reason="this user may make no control groups here")


def folders() -> set[Path]:
    """Groups of this very process."""
    assert HERE is not None
    return {path for top in HERE.tops() if top.exists() for path in top.iterdir() if path.is_dir()}


@needs_groups
async def test_many_processes_together_are_held_to_the_memory_of_one() -> None:
    hog = "x = bytearray(50 << 20); x[::4096] = b'x' * len(x[::4096]); import time; time.sleep(2)"
    config = SandboxConfig(limits=ResourceLimits(memory=80 << 20, disk=1 << 20))
    async with create_sandbox(config) as sandbox:
        assert "per sandbox" in sandbox.enforced["memory"]
        try:
            await sandbox.run(f'for i in 1 2 3 4 5 6; do python3 -c "{hog}" & done; wait', timeout=20)
            survived = await sandbox.run("grep -c . /proc/self/status")
            assert survived.exit_code == 0
        except SandboxFailure as failure:  # the kernel chose the helper
            assert failure.ending is Ending.SANDBOX_KILLED
        assert sandbox.killed_by_agent or sandbox.isolation.group.killed_for_memory()  # type: ignore[attr-defined]
    assert folders() == set()


@needs_groups
async def test_share_of_the_processor() -> None:
    assert HERE is not None
    if "cpu" not in HERE.parents:
        pytest.skip("the controller cpu is not handed to this user")
    async with create_sandbox(SandboxConfig(limits=ResourceLimits(cpu=0.2))) as sandbox:
        assert sandbox.enforced["cpu"] == "per sandbox"
        used = await sandbox.run(["timeout", "1", "python3", "-c", "while True: pass"])
        assert used.exit_code == 124
        spent = "import resource, time\nend = time.monotonic() + 1\nwhile time.monotonic() < end: pass\n"
        spent += "print(resource.getrusage(0).ru_utime)"
        assert float((await sandbox.run(["python3", "-c", spent])).output) < 0.6


@needs_groups
@pytest.mark.parametrize("how", ["alone", "with its children"])
def test_killed_runner_leaves_no_group_and_nothing_that_it_has_marked(how: str) -> None:
    """Ray kills the children of a worker before it ends the worker itself."""
    code = (
        "import asyncio\nfrom hermes_rl.sandbox import SandboxConfig, create_sandbox\n"
        "import subprocess\nfrom hermes_rl.sandbox.cgroup import find_layout, runner_mark\n"
        "async def main():\n    async with create_sandbox(SandboxConfig()):\n"
        "        begun = subprocess.Popen(['/bin/sleep', '60'], env=runner_mark(), start_new_session=True)\n"
        "        print(f'/proc/{begun.pid}', *find_layout().tops(), flush=True)\n        await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    runner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    begun, *tops = [Path(word) for word in runner.stdout.readline().split()]
    assert begun.exists() and tops and all(any(top.iterdir()) for top in tops)
    if how == "with its children":
        for child in children(runner.pid):
            os.kill(child, signal.SIGKILL)
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    runner.stdout.close()
    end = time.monotonic() + 10
    while any(one.exists() for one in (begun, *tops)) and time.monotonic() < end:
        time.sleep(0.05)
    assert [one for one in (begun, *tops) if one.exists()] == []


def files(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("")


def test_version_2_takes_the_group_that_hands_its_controllers_down(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/user.slice/run.scope\n")
    above = tmp_path / "fs" / "user.slice"
    files(above, "cgroup.procs", "cgroup.subtree_control")
    (above / "cgroup.subtree_control").write_text("memory pids")
    files(above / "run.scope", "cgroup.procs")
    # Where a trial group has no cgroup.procs this is no control-group file system.
    assert find_layout(tmp_path / "fs", own) is None


def test_limits_of_version_2(tmp_path: Path) -> None:
    layout = Layout(2, dict.fromkeys(("memory", "pids", "cpu"), tmp_path))
    group = ControlGroup(layout, "one")
    folder = layout.top("memory") / "one"
    group.enter(os.getpid(), 1 << 30, 50, 1.5)
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written == {
        "memory.max": "1073741824",
        "pids.max": "50",
        "cpu.max": "150000 100000",
        "cgroup.procs": str(os.getpid()),
    }
    (folder / "memory.events").write_text("oom 1\noom_kill 0\n")
    assert not group.killed_for_memory()
    (folder / "memory.events").write_text("oom 1\noom_kill 2\n")
    assert group.killed_for_memory()


def test_a_group_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    group = ControlGroup(Layout(1, {"memory": tmp_path}), "one")
    group.remove()
    group.enter(os.getpid(), 1 << 30, 50, None)
    assert list(tmp_path.iterdir()) == []
