"""What the default sandbox keeps in and out."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from pathlib import Path

import pytest

from hermes_rl.errors import UserError
from hermes_rl.sandbox import bubblewrap
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import ResourceLimits, Sandbox, SandboxConfig
from hermes_rl.sandbox.bubblewrap import ALL_USERS
from hermes_rl.sandbox.cgroup import find_layout


async def test_environment_is_not_inherited(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "hunter2")
    assert "hunter2" not in (await sandbox.run("env")).output
    assert "hunter2" not in (await sandbox.run("cat /proc/1/environ /proc/self/environ 2>/dev/null")).output


async def test_not_root_and_no_capabilities(fenced: Sandbox) -> None:
    output = (await fenced.run("id -u; grep CapEff /proc/self/status; grep NoNewPrivs /proc/self/status")).output
    assert output.split() == ["1000", "CapEff:", "0000000000000000", "NoNewPrivs:", "1"]


async def test_no_new_user_namespaces(fenced: Sandbox) -> None:
    assert (await fenced.run("unshare -U true")).exit_code != 0


async def test_files_of_the_host_are_not_there(fenced: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    for path in (str(secret), "/root", "/etc/shadow", str(Path.cwd()), str(Path.home() / ".netrc")):
        assert (await fenced.run(["ls", path])).exit_code != 0, path


async def test_system_cannot_be_changed(fenced: Sandbox) -> None:
    for command in (
        "echo x > /usr/bin/evil",
        "mv /bin /bin2",
        "ln -sf /tmp/x /bin",
        "rm -rf /lib64",
        "echo /tmp/x.so > /etc/ld.so.preload",
        "echo x > /etc/hosts",
        "mount -t tmpfs x /etc",
        "echo 1 > /proc/sys/kernel/panic",
        "mkdir /dev/x",
    ):
        assert (await fenced.run(command)).exit_code != 0, command
    assert (await fenced.run("mkdir /tests && echo fine")).output == "fine\n"


async def test_other_sandboxes_are_not_visible(fenced: Sandbox) -> None:
    async with create_sandbox(SandboxConfig()) as other:
        await other.write_file("/tmp/mine", b"x")
        await other.write_file("mine", b"x")
        await other.spawn("sleep 54321")
        assert (await fenced.run("ls /tmp/mine ~/mine")).exit_code != 0
        assert "54321" not in (await fenced.run("ps axww || cat /proc/*/cmdline")).output


async def test_processes_of_the_host_are_not_visible(fenced: Sandbox) -> None:
    pids = [int(word) for word in (await fenced.run("ls /proc | grep -E '^[0-9]+$'")).output.split()]
    assert len(pids) < 8
    assert (await fenced.run(f"kill -9 {os.getpid()}")).exit_code != 0 or os.getpid() in pids


async def test_no_network(fenced: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        result = await fenced.run(["python3", "-c", script])
        assert result.exit_code != 0
        assert "refused" in result.output or "unreachable" in result.output


async def test_network_when_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('connected')"
        async with create_sandbox(SandboxConfig(network=True)) as sandbox:
            assert (await sandbox.run(["python3", "-c", script])).output == "connected\n"
            assert (await sandbox.run("cat /etc/resolv.conf")).exit_code == 0


async def test_abstract_sockets_of_the_host_are_out_of_reach(fenced: Sandbox) -> None:
    name = f"\0hermes-rl-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        script = f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})"
        assert (await fenced.run(["python3", "-c", script])).exit_code != 0


async def test_first_process_cannot_be_killed_or_traced(fenced: Sandbox) -> None:
    await fenced.run("for s in $(seq 1 31); do kill -$s 1; done; kill -9 -1")
    assert (await fenced.run("cat /proc/1/environ; ls /proc/1/fd")).exit_code != 0
    trace = "import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"
    assert (await fenced.run(["python3", "-c", trace])).output == "-1\n"
    assert (await fenced.run("echo alive")).output == "alive\n"


async def test_fork_bomb_is_bounded() -> None:
    async with create_sandbox(SandboxConfig(limits=ResourceLimits(processes=40))) as sandbox:
        bomb = "bomb() { bomb | bomb & }; bomb; for i in $(seq 1 100); do sleep 5 & done; wait"
        await sandbox.run(bomb, timeout=0.5)
        assert await sandbox.read_file("/etc/hostname") == b"sandbox\n"
        await sandbox.kill_all()
        assert (await sandbox.run("echo recovered")).output == "recovered\n"


async def test_disk_limit() -> None:
    async with create_sandbox(SandboxConfig(limits=ResourceLimits(disk=4 << 20))) as sandbox:
        assert (await sandbox.run("head -c 8000000 /dev/zero > big")).exit_code != 0
        assert (await sandbox.run("rm big; for i in 1 2 3 4 5 6; do head -c 1000000 /dev/zero > $i; done")).exit_code
        with pytest.raises(OSError, match="No space left"):
            await sandbox.write_file("more", b"x" * 4_000_000)


async def test_memory_limit_per_process() -> None:
    async with create_sandbox(SandboxConfig(limits=ResourceLimits(memory=100 << 20))) as sandbox:
        assert (await sandbox.run(["python3", "-c", "x = b'x' * (300 << 20)"])).exit_code != 0
        assert sandbox.alive


async def test_limits_in_force_are_named(fenced: Sandbox) -> None:
    assert {"memory", "processes", "disk", "open_files"} <= set(fenced.enforced)
    async with create_sandbox(SandboxConfig(limits=ResourceLimits(open_files=64))) as sandbox:
        assert (await sandbox.run("ulimit -n")).output == "64\n"


@pytest.mark.parametrize(
    ("backend", "limits"),
    [
        ("bubblewrap", ResourceLimits(cpu=1)),
        ("none", ResourceLimits(disk=1 << 30)),
        ("none", ResourceLimits(processes=9)),
    ],
)
async def test_unenforceable_limit_is_refused_unless_best_effort(
    backend: str, limits: ResourceLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from hermes_rl.sandbox import bubblewrap

    monkeypatch.setattr(bubblewrap, "find_layout", lambda: None)
    with pytest.raises(UserError, match="best_effort"):
        create_sandbox(SandboxConfig(backend=backend, limits=limits))
    create_sandbox(SandboxConfig(backend=backend, limits=replace(limits, best_effort=True)))


async def test_limit_too_small_to_work() -> None:
    with pytest.raises(UserError, match="at least"):
        create_sandbox(SandboxConfig(limits=ResourceLimits(open_files=5)))


async def test_sandboxes_of_the_machines_root_do_not_share_what_inotify_takes() -> None:
    if os.geteuid() != 0 or ALL_USERS not in Path("/proc/self/uid_map").read_text():
        pytest.skip("elsewhere the kernel counts it for all sandboxes together")
    script = "import ctypes\nwhile ctypes.CDLL(None).inotify_init() >= 0: print('one')\nprint('all', flush=True)\n"
    waiting = f': > said; python3 -c "{script}import time; time.sleep(60)" >> said &'
    async with create_sandbox(SandboxConfig(limits=ResourceLimits(open_files=4096))) as greedy:
        taken = await greedy.run(f"{waiting} until grep -q all said; do sleep 0.05; done; wc -l < said", timeout=60)
        assert int(taken.output) > 10
        async with create_sandbox(SandboxConfig()) as other:
            assert (await other.run(f'python3 -c "{script}"')).output.startswith("one\n")


LOCKS = """
import ctypes, fcntl, os, struct, sys, time

shared = [path for path in sys.argv[1:] if os.path.exists(path)]
libc, watch = ctypes.CDLL(None), ctypes.CDLL(None).inotify_init1(os.O_NONBLOCK)
files = [open(path, "rb") for path in shared if os.path.isfile(path)]
for path in shared:
    assert libc.inotify_add_watch(watch, path.encode(), 0xFFF) > 0
for file in files:
    fcntl.flock(file, fcntl.LOCK_EX)
print(len(files), "locked", flush=True)
while not os.path.exists("stop"):
    time.sleep(0.02)
print("seen", os.read(watch, 1 << 20))
"""
SHARED = "/usr/bin/env /usr/bin /usr/lib/os-release /etc/passwd /etc"


async def test_sandboxes_cannot_lock_or_watch_shared_files() -> None:
    if not bubblewrap.has_overlays():
        pytest.skip("this machine has no overlays for users")
    async with create_sandbox(SandboxConfig()) as holding, create_sandbox(SandboxConfig()) as other:
        await holding.write_file("locks.py", LOCKS.encode())
        began = f"python3 locks.py {SHARED} > said 2>&1 & until grep -qs locked said; do sleep 0.02; done; cat said"
        assert (await holding.run(began)).output == "3 locked\n"
        # flock opens what it locks; env and passwd are read, and a folder is listed.
        uses = "flock -n $file true && cat $file > /dev/null && ls ${file%/*} > /dev/null || echo $file"
        taken = await other.run(f"for file in {SHARED}; do [ -d $file ] || {{ {uses}; }}; done")
        assert (taken.exit_code, taken.output) == (0, "")
        assert (await other.run("for n in $(seq 9); do tac /etc/passwd > /dev/null; done")).exit_code == 0
        ended = await holding.run("touch stop; until grep -q seen said; do sleep 0.02; done; tail -1 said")
        assert "grep" in ended.output, "it sees its own programs"
        assert "tac" not in ended.output, "and nobody else's"


@pytest.mark.skipif(not Path("/sys/fs/cgroup").is_mount(), reason="nothing is mounted below /sys")
async def test_what_is_mounted_below_a_folder_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "SYSTEM", (*bubblewrap.SYSTEM, "/sys"))
    async with create_sandbox(SandboxConfig()) as sandbox:
        listed = await sandbox.run("ls /sys/fs/cgroup")
    assert listed.exit_code == 0 and listed.output


async def test_sandbox_starts_without_a_folder_that_an_update_has_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setattr(bubblewrap, "SYSTEM", (*bubblewrap.SYSTEM, folder))
        async with create_sandbox(SandboxConfig()) as sandbox:
            assert (await sandbox.stat(folder)).kind == "directory"
    async with create_sandbox(SandboxConfig()) as sandbox:
        with pytest.raises(FileNotFoundError):
            await sandbox.stat(folder)


async def test_two_sandboxes_side_by_side(backend: str) -> None:
    config = SandboxConfig(backend=backend)
    async with create_sandbox(config) as one, create_sandbox(config) as two:
        await asyncio.gather(one.write_file("f", b"one"), two.write_file("f", b"two"))
        assert (await one.read_file("f"), await two.read_file("f")) == (b"one", b"two")
        assert one.id != two.id


@pytest.mark.parametrize("grouped", [True, False])
async def test_reserved_addresses_do_not_end_a_program(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not grouped:
        monkeypatch.setattr(bubblewrap, "find_layout", lambda: None)
    elif find_layout() is None:
        pytest.skip("there is no place for control groups")
    # As V8 does for six WebAssembly memories: nothing of it can be used.
    flags = "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000"  # MAP_NORESERVE
    reserve = f"import mmap; print(len([mmap.mmap(-1, 10 << 30, {flags}, prot=0) for _ in range(6)]))"
    async with create_sandbox(SandboxConfig(limits=ResourceLimits(memory=1 << 30))) as sandbox:
        assert (await sandbox.run(["python3", "-c", reserve])).output == "6\n"
        assert (await sandbox.run(["python3", "-c", "x = b'x' * (2 << 30)"])).exit_code != 0
