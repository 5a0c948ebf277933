"""The thread that starts and reaps sandboxes is everybody's: nothing that one of them does ends it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import Sandbox, SandboxConfig
from hermes_rl.sandbox.bubblewrap import _has_users, _lays_images
from hermes_rl.sandbox.helper_sandbox import HelperSandbox
from hermes_rl.sandbox.image_mounts import ImageMounts
from hermes_rl.sandbox.images import cache_folder
from hermes_rl.sandbox.launcher import Launcher, Program, launcher


@pytest.mark.parametrize("begun", [True, False])
async def test_launcher_continues_after_a_caller_is_cancelled(begun: bool) -> None:
    working, go_on, done = threading.Event(), threading.Event(), list[str]()

    def work(name: str) -> None:
        working.set()
        go_on.wait(30)
        done.append(name)

    async def ask(name: str) -> None:
        await asyncio.wrap_future(launcher().call(lambda: work(name)))

    first = asyncio.create_task(ask("first"))
    assert await asyncio.to_thread(working.wait, 30)
    second = asyncio.create_task(ask("second"))
    await asyncio.sleep(0)
    cancelled, other = (first, second) if begun else (second, first)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    go_on.set()
    await asyncio.wait_for(other, 30)
    assert await asyncio.wait_for(asyncio.wrap_future(launcher().call(lambda: "lives")), 30) == "lives"
    assert done == (["first", "second"] if begun else ["first"]), "what had not begun is not done"


def program(*argv: str) -> Program:
    return Program(argv, argv[0], (), subprocess.DEVNULL)


def test_launcher_continues_after_an_invalid_path() -> None:
    own = Launcher()
    with pytest.raises(ValueError, match="null byte"):
        own.launch(program("/bin/true", "/w\0b")).result(5)
    assert own.launch(program("/bin/true")).result(5).wait(5) == 0


def test_launcher_continues_if_sandbox_processes_cannot_be_listed(caplog: pytest.LogCaptureFixture) -> None:
    class Unreadable:
        def processes(self) -> list[int]:
            raise PermissionError("cgroup.procs")

        def kill(self) -> None: ...

    own = Launcher()
    with pytest.raises(SandboxFailure, match=r"cgroup\.procs"):
        own.reap(own.launch(program("/bin/true")), Unreadable()).result(5)
    assert own.reap(own.launch(program("/bin/true"))).result(5) == 0
    assert "cgroup.procs" in caplog.text


def test_it_reaps_under_a_stream_of_starts() -> None:
    own, over = Launcher(), threading.Event()

    def again() -> None:
        time.sleep(0.0005)
        if not over.is_set():
            own.call(again)

    for _ in range(4):  # there is always one in the queue
        own.call(again)
    try:
        assert own.reap(own.launch(program("/bin/true"))).result(2) == 0
    finally:
        over.set()


@pytest.mark.skipif(os.geteuid() != 0 or not _has_users(), reason="only root shows an image as another user's")
async def test_cancelled_start_leaves_no_image_mount(rootfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not _lays_images():
        pytest.skip("this kernel does not show an image as another user's")
    working, go_on, lay = threading.Event(), threading.Event(), ImageMounts.lay

    def slowly(self: ImageMounts, folder: Path, uid: int) -> Path:
        working.set()
        go_on.wait(30)
        return lay(self, folder, uid)

    config = SandboxConfig(image=str(rootfs))
    async with create_sandbox(config) as sandbox:  # unpacks what all of them need
        user = user_of(sandbox)
    monkeypatch.setattr(ImageMounts, "lay", slowly)
    starting = asyncio.create_task(create_sandbox(config).start())
    assert await asyncio.to_thread(working.wait, 30)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    go_on.set()
    laid: list[Path] | None = None
    async with asyncio.timeout(30):
        while laid != []:
            laid = await asyncio.wrap_future(launcher().call(lambda: list((cache_folder() / "mounts").iterdir())))
    async with create_sandbox(config) as sandbox:
        assert (await sandbox.run("echo works")).output == "works\n"
        assert user_of(sandbox) == user, "its user is there for the next one"


def user_of(sandbox: Sandbox) -> int:
    """The user of a sandbox's first process on this machine."""
    assert isinstance(sandbox, HelperSandbox)
    status = Path(f"/proc/{sandbox.pid}/status").read_text()
    return int(status.partition("Uid:")[2].split()[0])
