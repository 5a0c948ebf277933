"""A copy of a sandbox has all of its files as they are, and nothing that is done in the copy comes back."""

from __future__ import annotations

import asyncio
import errno
import time
from dataclasses import replace

import pytest

from hermes_rl.errors import UserError
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import ResourceLimits, Sandbox, SandboxConfig, SandboxFile

MAKE = r"""
import os
os.makedirs("deep/er"), os.mkdir("closed"), os.mkdir("empty"), os.mkdir(b"odd\nname")
for name, text in ((b"file", b"one"), (b"deep/er/two", b"two"), (b"odd\nname/\xff", b"odd"), (b"kept.txt", b"changed"),
                   (b"closed/in", b"hidden"), (b"unreadable", b"none"), (b"program", b"#!/bin/sh\necho ran\n")):
    with open(name, "wb") as file:
        file.write(text)
os.symlink("nowhere", "link"), os.symlink("deep", "folder-link"), os.link("file", "twin"), os.mkfifo("fifo", 0o640)
os.remove("given")
with open("sparse", "wb") as file:
    file.seek(20_000_000), file.write(b"end")
os.utime("file", ns=(0, 981173106_789000000)), os.utime("deep", ns=(0, 10**18))
os.chmod("program", 0o4755), os.chmod("unreadable", 0), os.chmod("closed", 0)
"""
LOOK = r"""
import os, stat
seen = []
for folder, folders, files in os.walk(b"."):
    for path in sorted(os.path.join(folder, name) for name in folders + files):
        at = os.lstat(path)
        link = os.readlink(path) if stat.S_ISLNK(at.st_mode) else at.st_mtime_ns
        size = at.st_size if stat.S_ISREG(at.st_mode) else 0
        links = 0 if stat.S_ISDIR(at.st_mode) else at.st_nlink
        seen.append(str((path, oct(at.st_mode), links, size, link, at.st_blocks < 999)))
        os.chmod(path, at.st_mode | 0o700) if path in (b"./closed", b"./unreadable") else None
print(*sorted(seen), sep='\\n')
for name in (b"file", b"deep/er/two", b"odd\nname/\xff", b"kept.txt", b"closed/in", b"unreadable", b"made"):
    print(name, open(name, "rb").read() if os.path.exists(name) else None)
os.chmod("closed", 0), os.chmod("unreadable", 0)
"""
N = "n" * 250
FILES = (SandboxFile("given", b"given"), SandboxFile("kept.txt", b"as it was"))


def of(config: SandboxConfig) -> SandboxConfig:
    return replace(
        config, files=FILES, setup=("echo made > made",), limits=ResourceLimits(disk=1 << 27, best_effort=True)
    )


async def look(sandbox: Sandbox) -> str:
    looked = await sandbox.run(["python3", "-c", LOOK])
    assert looked.exit_code == 0, looked.output
    return looked.output


async def test_a_copy_has_the_same_files(config: SandboxConfig) -> None:
    if config.backend == "none":
        config = replace(config, limits=ResourceLimits())
    async with create_sandbox(of(config)) as one, create_sandbox(replace(of(config), setup=())) as other:
        made = await one.run(["python3", "-c", MAKE])
        assert made.exit_code == 0, made.output
        await other.run("mkdir -p deep empty/not file; echo not > deep/not; ln -s /etc closed; ln -s /tmp 'odd\nname'")
        await one.copy_files(other)
        before = await look(one)
        assert "b'two'" in before and "b'hidden'" in before
        assert await look(other) == before
        await other.run("echo grader > file; rm -r deep; echo grader > new")
        assert await look(one) == before
        await one.copy_files(other)
        assert await look(other) == before, "whatever has become of it"


SAME_TICK = """
import sys, time
for number in range(300):
    while time.time() < float(sys.argv[1]) + number / 5000: pass
    with open(f"file{number}", "w") as file: file.write(sys.argv[2])
"""


async def test_what_changed_in_both_at_the_same_time_is_copied(config: SandboxConfig) -> None:
    async with create_sandbox(config) as one, create_sandbox(config) as other:
        start = str(time.time() + 0.2)
        writing = [each.run(["python3", "-c", SAME_TICK, start, text]) for each, text in ((one, "1"), (other, "2"))]
        assert all(done.exit_code == 0 for done in await asyncio.gather(*writing))
        await one.copy_files(other)
        assert (await other.run("cat file*")).output == "1" * 300


async def test_all_that_an_agent_may_write_is_copied(config: SandboxConfig) -> None:
    async with create_sandbox(config) as one, create_sandbox(config) as other:
        folders = ["/app", "/tmp", "/dev/shm"] if config.backend != "none" else ["$HOME/app", "$TMPDIR"]
        folders += ["/etc", "/usr/bin"] if config.image else []
        for folder in folders:
            done = await one.run(f"mkdir -p {folder}; echo here > {folder}/x")
            assert done.exit_code == 0, done.output
        await one.copy_files(other)
        for folder in folders:
            assert (await other.run(f"cat {folder}/x")).output == "here\n"


async def test_files_of_an_image_that_are_gone_are_gone_in_the_copy(rootfs: object) -> None:
    config = SandboxConfig(image=str(rootfs))
    async with create_sandbox(config) as one, create_sandbox(config) as other:
        assert (await one.run("rm /usr/bin/python3; echo mine > /etc/issue; chmod 0 /etc/issue")).exit_code == 0
        await one.copy_files(other)
        assert (await other.run("ls /usr/bin/python3")).exit_code != 0
        assert (await other.run("chmod +r /etc/issue && cat /etc/issue")).output == "mine\n"


@pytest.mark.parametrize(
    ("left", "number"),
    [("head -c 40000000 /dev/urandom > big", errno.EFBIG), (f"mkdir {N}; cd {N};" * 20, errno.ENAMETOOLONG)],
    ids=["large", "deep"],
)
async def test_copy_error_is_an_os_error_and_both_sandboxes_survive(left: str, number: int) -> None:
    async with (
        create_sandbox(SandboxConfig()) as one,
        create_sandbox(SandboxConfig(limits=ResourceLimits(disk=8 << 20))) as other,
    ):
        assert (await one.run(left)).exit_code == 0
        with pytest.raises(OSError) as raised:
            await one.copy_files(other)
        assert raised.value.errno == number
        assert one.alive and other.alive


async def test_backend_that_cannot_copy_files_raises_a_user_error(ssh: SandboxConfig) -> None:
    with pytest.raises(UserError, match="sandbox backend ssh cannot copy the files"):
        await create_sandbox(ssh).copy_files(create_sandbox(ssh))
