"""The thread that starts and reaps sandboxes is everybody's: nothing that one of them does ends it."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from hermes_rl.sandbox import SandboxConfig, bubblewrap, create_sandbox
from hermes_rl.sandbox.bubblewrap import _has_users, _image_mounts, _image_users, _lays_images
from hermes_rl.sandbox.launcher import launcher


@pytest.mark.parametrize("begun", [True, False])
async def test_it_goes_on_where_whoever_asked_it_for_something_is_cancelled(begun: bool) -> None:
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


@pytest.mark.skipif(os.geteuid() != 0 or not _has_users(), reason="only root shows an image as another user's")
async def test_a_start_that_is_cancelled_while_its_image_is_laid_leaves_no_mount(
    rootfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not _lays_images():
        pytest.skip("this kernel does not show an image as another user's")
    working, go_on, lay = threading.Event(), threading.Event(), bubblewrap._lay

    def slowly(folder: Path, user: int) -> Path | None:
        working.set()
        go_on.wait(30)
        return lay(folder, user)

    config = SandboxConfig(image=str(rootfs))
    async with create_sandbox(config) as sandbox:  # unpacks what all of them need
        await sandbox.run("true")
    free = sorted(_image_users)
    monkeypatch.setattr(bubblewrap, "_lay", slowly)
    starting = asyncio.create_task(create_sandbox(config).start())
    assert await asyncio.to_thread(working.wait, 30)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    go_on.set()
    place = _image_mounts(os.getpid())._place
    laid: list[Path] | None = None
    async with asyncio.timeout(30):
        while laid != []:
            laid = await asyncio.wrap_future(launcher().call(lambda: list(place.iterdir())))
    assert sorted(_image_users) == free, "its user is there for the next one"
    async with create_sandbox(config) as sandbox:
        assert (await sandbox.run("echo works")).output == "works\n"
