"""Files go in and out byte by byte, whatever they are called."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from hashlib import sha256

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_rl.sandbox.base import Sandbox
from tests.thorough import examples

ODD_NAMES = ["a b", "new\nline", "quo'te\"s", "größer ☕", "-rf", "$(reboot)", "back\\slash", "*", "\udcff\udc80"]


async def test_any_name(sandbox: Sandbox) -> None:
    for name in ODD_NAMES:
        await sandbox.write_file(f"folder/{name}", b"content")
        assert await sandbox.read_file(f"folder/{name}") == b"content"
        assert [info.name for info in await sandbox.list_dir("folder")] == [name]
        await sandbox.remove(f"folder/{name}")
        assert await sandbox.list_dir("folder") == []


async def test_any_size(sandbox: Sandbox) -> None:
    for size in (0, 1, 29_999, 30_000, 30_001, 60_000, 70_000, 5_000_000):
        data = os.urandom(size)
        await sandbox.write_file("data", data)
        assert await sandbox.read_file("data") == data
        assert (await sandbox.run("wc -c < data")).output.strip() == str(size)


@pytest.mark.slow
async def test_fifty_megabytes_under_an_awkward_name(sandbox: Sandbox) -> None:
    data, name = os.urandom(50 << 20), "a 'b' \"c\"\nd größer ☕.bin"
    await sandbox.write_file(name, data)
    assert (await sandbox.run(["sha256sum", name])).output.split()[0].lstrip("\\") == sha256(data).hexdigest()
    assert await sandbox.read_file(name) == data


@given(data=st.binary(max_size=300), name=st.text(min_size=1, max_size=20))
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_under_any_name(data: bytes, name: str) -> None:
    import asyncio

    from hermes_rl.sandbox.backends import create_sandbox
    from hermes_rl.sandbox.base import SandboxConfig

    async def play() -> None:
        async with create_sandbox(SandboxConfig()) as sandbox:
            path = "d/" + name.replace("/", "_").replace("\0", "_")
            if name in {".", ".."}:
                return
            await sandbox.write_file(path, data)
            assert await sandbox.read_file(path) == data

    asyncio.run(play())


async def test_overwriting_shortens(sandbox: Sandbox) -> None:
    await sandbox.write_file("f", b"long content")
    await sandbox.write_file("f", b"s")
    assert await sandbox.read_file("f") == b"s"


async def test_modes(sandbox: Sandbox) -> None:
    await sandbox.write_file("plain", b"")
    await sandbox.write_file("run", b"#!/bin/sh\necho ran\n", 0o755)
    assert (await sandbox.stat("plain")).mode == 0o644
    assert (await sandbox.run("./run")).output == "ran\n"
    await sandbox.write_file("run", b"#!/bin/sh\necho again\n")
    assert (await sandbox.stat("run")).mode == 0o755


async def test_home_and_relative_paths(sandbox: Sandbox) -> None:
    await sandbox.write_file("~/in home", b"h")
    assert await sandbox.read_file(f"{sandbox.home}/in home") == b"h"
    assert sandbox.resolve("a/../b") == f"{sandbox.workdir}/b"
    assert sandbox.resolve("x", "sub") == f"{sandbox.workdir}/sub/x"


async def test_stat_kinds(sandbox: Sandbox) -> None:
    await sandbox.run("mkdir d; echo abc > f; ln -s f l; mkfifo p; ln -s nowhere broken")
    kinds = {info.name: info.kind for info in await sandbox.list_dir(".")}
    expected = {"d": "directory", "f": "file", "l": "symlink", "p": "other", "broken": "symlink"}
    assert {name: kinds[name] for name in expected} == expected
    assert (await sandbox.stat("l")).kind == "file"
    assert (await sandbox.stat("l", follow=False)).kind == "symlink"
    assert (await sandbox.stat("f")).size == 4


async def test_large_folder(sandbox: Sandbox) -> None:
    await sandbox.run("mkdir many; cd many; for i in $(seq 1 3000); do : > file-with-a-long-name-$i; done")
    assert len(await sandbox.list_dir("many")) == 3000


async def test_file_errors_are_the_errors_of_the_system(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        await sandbox.read_file("missing")
    assert caught.value.filename == "missing"
    with pytest.raises(IsADirectoryError):
        await sandbox.read_file(".")
    with pytest.raises(FileNotFoundError):
        await sandbox.remove("missing")
    await sandbox.write_file("f", b"")
    with pytest.raises(NotADirectoryError):
        await sandbox.read_file("f/x")
    with pytest.raises(OSError, match=r"exists|Not a directory"):
        await sandbox.write_file("f/x", b"")
    with pytest.raises(ValueError, match="null byte"):
        await sandbox.read_file("a\0b")


@pytest.mark.parametrize("path", ["fifo", "/dev/zero"])
async def test_what_never_ends_is_refused(sandbox: Sandbox, path: str) -> None:
    await sandbox.run("mkfifo fifo")
    with pytest.raises(OSError, match="Not a regular file"):
        await sandbox.read_file(path)


async def test_pipe_without_a_reader_cannot_be_written(sandbox: Sandbox) -> None:
    await sandbox.run("mkfifo fifo")
    with pytest.raises(OSError, match=r"Not a regular file|No such device"):
        await asyncio.wait_for(sandbox.write_file("fifo", b"x"), 60)


async def test_read_limit(sandbox: Sandbox) -> None:
    await sandbox.run("truncate -s 900M sparse")
    with pytest.raises(OSError, match="too large") as caught:
        await sandbox.read_file("sparse", limit=1000)
    assert caught.value.errno == errno.EFBIG


async def test_remove_does_not_follow_symlinks(sandbox: Sandbox) -> None:
    await sandbox.run("mkdir keep tree tree/sub; echo x > keep/f; ln -s ../keep tree/link; ln -s keep l")
    await sandbox.remove("tree")
    await sandbox.remove("l")
    assert await sandbox.read_file("keep/f") == b"x\n"


async def test_rename(sandbox: Sandbox) -> None:
    await sandbox.write_file("a", b"1")
    await sandbox.write_file("b", b"2")
    await sandbox.rename("a", "b")
    assert await sandbox.read_file("b") == b"1"


LINKS = (
    "ln -s /proc/self/status a; ln -s a b; ln -s /proc p; ln -s /proc/self/fd f; mkdir -p d/e; "
    "ln -s ../../p/1 d/e/one; ln -s /sys s"
)
KERNEL_PATHS = (
    *("/proc", "/proc/self/status", "/proc/1/maps", "/proc/self/timerslack_ns", "/proc/../proc/self/cgroup", "a", "b"),
    *("p/self/cgroup", "p/1/oom_score_adj", "d/e/one/environ", "f/3", "f/10", "/dev/fd/3", "s/kernel", "s", "p"),
)


async def test_files_of_the_kernel_are_refused(sandbox: Sandbox, paths: Sequence[str] = KERNEL_PATHS) -> None:
    await sandbox.run(LINKS)
    for path in paths:
        for attempt in (
            sandbox.read_file(path),
            sandbox.write_file(path, b"50000000000"),
            sandbox.list_dir(path),
            sandbox.stat(path),
            sandbox.set_mode(f"{path}/comm", 0o600),
            sandbox.make_dir(f"{path}/new"),
            sandbox.remove(f"{path}/comm"),
            sandbox.rename(f"{path}/comm", "stolen"),
            sandbox.rename("/etc/hostname", f"{path}/comm"),
        ):
            with pytest.raises(OSError):
                await attempt
        if path in ("b", "p/self/cgroup", "/proc/1/maps"):
            with pytest.raises(PermissionError, match="kernel are not for this tool"):
                await sandbox.read_file(path)


async def test_no_race_leads_to_the_kernel(sandbox: Sandbox) -> None:
    await sandbox.run("echo mine > own")
    swapping = "while :; do ln -sfn /proc/self/status x; ln -sfn own x; done"
    process = await sandbox.spawn(swapping)
    read = refused = 0
    while min(read, refused) < 10:  # over ssh a call takes half a second and more
        try:
            assert await sandbox.read_file("x") == b"mine\n"
            read += 1
        except PermissionError:
            refused += 1
        except FileNotFoundError:
            pass
    await process.kill()


async def test_links_and_names_similar_to_kernel_paths_work(sandbox: Sandbox) -> None:
    await sandbox.run("mkdir proc sys; echo hi > proc/f; ln -s proc/f l; ln -s /nowhere dangling; ln -s /proc to")
    assert await sandbox.read_file("proc/f") == await sandbox.read_file("l") == b"hi\n"
    assert (
        (await sandbox.stat("dangling", follow=False)).kind
        == (await sandbox.stat("to", follow=False)).kind
        == "symlink"
    )
    await sandbox.remove("to")
    assert {info.name for info in await sandbox.list_dir(".")} >= {"proc", "sys", "l", "dangling"}
    assert (await sandbox.run("grep -c . /proc/self/status")).exit_code == 0
