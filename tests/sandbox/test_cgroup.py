"""ResourceLimits on a sandbox as a whole; where this machine lets us make no groups, what is promised then."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox import cgroup
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import ResourceLimits, SandboxConfig
from hermes_rl.sandbox.cgroup import (
    RESERVE,
    SOCKETS,
    ControlGroup,
    Layout,
    find_layout,
    for_sandboxes,
    free_share,
    together,
    total_memory,
)
from hermes_rl.sandbox.helper_system import children
from hermes_rl.stop_reasons import StopReason
from tests.waiting import until, until_blocking

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
            assert failure.stop_reason is StopReason.SANDBOX_KILLED
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
        "import asyncio\nfrom hermes_rl.sandbox.backends import create_sandbox\n"
        "from hermes_rl.sandbox.base import SandboxConfig\n"
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
    until_blocking(lambda: not any(one.exists() for one in (begun, *tops)))


def removed(folder: Path) -> bool:
    """Remove a group, which is possible once its processes have ended."""
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def bounded(memory: int, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of Python in a control group with so much memory."""
    assert HERE is not None
    around = HERE.parents["memory"] / f"bounded-{os.getpid()}"
    inner = around / "inner" if HERE.version == 2 else around
    inner.mkdir(parents=True)
    try:
        if HERE.version == 2:
            (around / "cgroup.subtree_control").write_text("+memory +pids")
        (around / ("memory.max" if HERE.version == 2 else "memory.limit_in_bytes")).write_text(str(memory))
        enter = f"import os\nopen({str(inner / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        program = [sys.executable, "-c", enter + code, *words]
        return subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    finally:
        for folder in dict.fromkeys((inner, around)):
            until_blocking(partial(removed, folder))


CROWD = """
import asyncio, json, sys
from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.base import ResourceLimits, SandboxConfig
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.cgroup import together, total_memory

async def one(sandbox):
    try:
        answer = await sandbox.run(["python3", "-c", sys.argv[1]], timeout=20)
        return [answer.exit_code, sandbox.killed_by_agent]
    except SandboxFailure as failure:
        return [str(failure), failure.stop_reason.value]
    finally:
        await sandbox.close()

async def main():
    config = SandboxConfig(limits=ResourceLimits(memory=200 << 20, disk=64 << 20))
    sandboxes = [create_sandbox(config) for _ in range(6)]
    await asyncio.gather(*(sandbox.start() for sandbox in sandboxes))
    found = await asyncio.gather(*map(one, sandboxes))
    print(json.dumps({"total": total_memory(), "limit": together().limit, "found": found}))

asyncio.run(main())
"""
HOGS = {
    "one process": "x = bytearray(150 << 20); x[::4096] = b'x' * len(x[::4096]); import time; time.sleep(3)",
    "small processes": (
        "import os, time\nfor _ in range(16):\n  if os.fork() == 0: x = b'x' * (9 << 20); time.sleep(3); os._exit(0)\n"
        "while True:\n  if os.wait()[1]: os._exit(1)"
    ),
    "shared memory": (
        "import time\nopen('/dev/shm/x', 'wb').write(b'x' * (60 << 20)); x = b'x' * (90 << 20); time.sleep(3)"
    ),
    "mapped memory": (
        "import mmap, time\nx = mmap.mmap(-1, 150 << 20); x[::4096] = b'x' * len(x[::4096]); time.sleep(3)"
    ),
}


@needs_groups
@pytest.mark.slow
@pytest.mark.parametrize("way", HOGS)
def test_sandboxes_together_leave_the_runner_its_memory(way: str) -> None:
    """Each is below its own limit; what the kernel ends for it is nobody's own doing, and the runner lives."""
    total = 1 << 30
    done = bounded(total, CROWD, HOGS[way])
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["total"] == total
    assert total // 2 <= found["limit"] <= total - RESERVE + (1 << 20)
    lost = [each for each in found["found"] if each[1] == StopReason.SANDBOX_FAILURE.value]
    assert lost, found["found"]
    assert all(each[1] in (StopReason.SANDBOX_FAILURE.value, False) for each in found["found"])


@needs_groups
async def test_exceeding_the_sandbox_memory_limit_is_caused_by_the_agent() -> None:
    config = SandboxConfig(limits=ResourceLimits(memory=80 << 20, disk=1 << 20))
    code = "import os, time\nfor _ in range(20):\n  if os.fork() == 0: x = b'x' * (9 << 20); time.sleep(1)\nos.wait()"
    async with create_sandbox(config) as sandbox:
        try:
            await sandbox.run(["python3", "-c", code], timeout=4)
        except SandboxFailure as failure:
            assert failure.stop_reason is StopReason.SANDBOX_KILLED
        group = sandbox.isolation.group  # type: ignore[attr-defined]
        assert sandbox.killed_by_agent or (group.killed_for_memory() and not group.killed_by_others())


async def test_everything_in_a_sandbox_ends_before_the_runner(config: SandboxConfig) -> None:
    async with create_sandbox(config) as sandbox:
        # A child that was left alone, and one whose program is another, have the same.
        look = "cat /proc/self/oom_score_adj"
        answer = await sandbox.run(f"{look}; ({look} &); sleep 0.1; exec sh -c 'true; {look}'")
        assert answer.output.split() == ["1000"] * 3
        if config.backend == "bubblewrap":
            taken_back = (
                "echo 0 > /proc/self/oom_score_adj; echo 0 > /proc/1/oom_score_adj; cat /proc/self/oom_score_adj"
            )
            assert (await sandbox.run(f"({taken_back}) 2>/dev/null")).output == "1000\n"
    assert Path("/proc/self/oom_score_adj").read_text() != "1000\n"


FLOOD = """
import os, socket
held = []
try:
    for _ in range(60):
        {body}
except OSError as error:
    print(error)
print(open("/proc/net/sockstat").read())
"""
UDP = """a, b = (socket.socket(socket.{family}, socket.SOCK_DGRAM) for _ in "ab")
        a.setsockopt(1, 8, 8 << 20); a.bind(("{host}", 0)); b.connect(a.getsockname()); b.setblocking(False)
        held += [a, b]
        for _ in range(200): b.send(b"x" * 60000)"""
TCP = """a = socket.create_server(("127.0.0.1", 0)); b = socket.create_connection(a.getsockname())
        held += [a, b, a.accept()[0]]; b.setblocking(False)
        try:
            while True: b.send(b"x" * 65536)
        except BlockingIOError: pass"""
SOCKET_FLOODS = {
    "UDP": UDP.format(family="AF_INET", host="127.0.0.1"),
    "UDP over IPv6": UDP.format(family="AF_INET6", host="::1"),
    "UDP to many at once": UDP.format(family="AF_INET", host="127.0.0.1").replace("range(200)", "range(20)"),
    "TCP": TCP,
    "TCP both ways": f"{TCP}\n        b = held[-1]; b.setblocking(False){TCP.partition('setblocking(False)')[2]}",
}


@needs_groups
@pytest.mark.parametrize("way", SOCKET_FLOODS)
async def test_what_sockets_hold_is_bounded(way: str) -> None:
    async with create_sandbox(SandboxConfig(limits=ResourceLimits(memory=160 << 20))) as sandbox:
        before = machine_sockets()
        code = FLOOD.format(body=SOCKET_FLOODS[way]) + "import time; time.sleep(30)"
        await sandbox.spawn(["python3", "-c", code])
        await until(lambda: machine_sockets() - before > (1 << 20))
        most = 0
        for _ in range(20):
            most = max(most, machine_sockets() - before)
            await asyncio.sleep(0.05)
    assert most < 2 * SOCKETS


def machine_sockets() -> int:
    """Bytes that sockets of UDP and TCP hold, as the kernel counts them for the machine."""
    text = Path("/proc/net/sockstat").read_text()
    return sum(int(pages) for pages in re.findall(r"^(?:UDP|TCP): .*mem (\d+)", text, re.MULTILINE)) * 4096


@pytest.mark.parametrize(
    ("total", "runner", "sandboxes"),
    [(2 << 30, 100 << 20, (2 << 30) - (612 << 20)), (100 << 30, 1 << 30, 89 << 30), (600 << 20, 300 << 20, 300 << 20)],
)
def test_what_is_left_to_sandboxes(total: int, runner: int, sandboxes: int) -> None:
    assert for_sandboxes(total, runner) == sandboxes


def test_the_least_of_the_groups_around_is_what_there_is(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/pod/container\n0::/\n")
    for folder, limit in {"": 1 << 62, "pod": 3 << 20, "pod/container": 7 << 20}.items():
        files(tmp_path / "fs/memory" / folder)
        (tmp_path / "fs/memory" / folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    assert total_memory(tmp_path / "fs", own) == 3 << 20
    own.write_text("0::/a/b\n")
    files(tmp_path / "fs/a/b")
    (tmp_path / "fs/a/memory.max").write_text("5242880\n")
    (tmp_path / "fs/a/b/memory.max").write_text("max\n")
    assert total_memory(tmp_path / "fs", own) == 5 << 20
    own.write_text("0::/../unseen\n")
    (tmp_path / "fs/memory.max").write_text("1048576\n")
    assert total_memory(tmp_path / "fs", own) == 1 << 20, "a container sees only its own group"


def test_what_sandboxes_have_of_their_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_short_at", -math.inf)
    own = tmp_path / "own"
    own.write_text("0::/run\n")
    shared = tmp_path / "fs" / "hermes-rl"
    assert together(tmp_path / "fs", own) is None
    files(shared)
    (shared / "memory.max").write_text("1000\n")
    (shared / "memory.current").write_text("900\n")
    (shared / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    found = together(tmp_path / "fs", own)
    assert found is not None
    assert (found.limit, found.used, found.free) == (1000, 600, 0.4)
    assert free_share(tmp_path / "fs", own) == 0.4
    monkeypatch.setattr(cgroup, "_short_at", time.monotonic())
    assert free_share(tmp_path / "fs", own) == 0, "it was used up a short while ago"


def files(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
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
    folder, shared = layout.top("memory") / "one", layout.shared("memory")
    group.enter(os.getpid(), 1 << 30, 50, 1.5)
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written == {
        "memory.max": "1073741824",
        "pids.max": "50",
        "cpu.max": "150000 100000",
        "cgroup.procs": str(os.getpid()),
    }
    for above in (shared, layout.top("memory")):
        assert set((above / "cgroup.subtree_control").read_text().split()) == {"+memory", "+pids", "+cpu"}
    assert 0 < int((shared / "memory.max").read_text()) < total_memory()
    (folder / "memory.events").write_text("oom 1\noom_kill 0\n")
    assert not group.killed_for_memory()
    (folder / "memory.events").write_text("oom 1\noom_kill 2\n")
    assert group.killed_for_memory() and not group.killed_by_others()
    (folder / "memory.events").write_text("oom 0\noom_kill 2\n")
    assert group.killed_by_others()


@pytest.mark.parametrize(("most", "others"), [(1 << 29, True), (1 << 30, False), ((1 << 30) - 4096, False)])
def test_cgroup_v1_distinguishes_internal_from_external_kills(tmp_path: Path, most: int, others: bool) -> None:
    layout = Layout(1, {"memory": tmp_path})
    group, folder = ControlGroup(layout, "one"), layout.top("memory") / "one"
    group.enter(os.getpid(), 1 << 30, 50, None)
    (folder / "memory.max_usage_in_bytes").write_text(f"{most}\n")
    assert not group.killed_by_others()
    (folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert group.killed_by_others() is others


def test_a_group_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    group = ControlGroup(Layout(1, {"memory": tmp_path}), "one")
    group.remove()
    group.enter(os.getpid(), 1 << 30, 50, None)
    assert list(tmp_path.iterdir()) == []
