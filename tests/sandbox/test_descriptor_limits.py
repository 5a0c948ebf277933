"""The kernel counts descriptors in transit per user: a sandbox with too many stops no other."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path

import pytest

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import Sandbox, SandboxConfig
from hermes_rl.sandbox.channel import Connection, ConnectionLoss, Diagnosis
from hermes_rl.sandbox.launcher import launcher, memory_file, socket_pair
from hermes_rl.sandbox.wire import IN_FILE, LAST_PIECE, PIECE, encode_number, pack, unpack
from hermes_rl.stop_reasons import StopReason
from tests.sandbox.test_launcher import user_of
from tests.waiting import until

FLOOD = """
import array, os, socket, time
fd = os.open('/dev/null', os.O_RDONLY)
held = []
sent = 0
try:
    while sent < 6000:
        a, b = socket.socketpair()
        held.append((a, b))
        for _ in range(4):
            a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [fd] * 250))])
            sent += 250
except OSError as error:
    print(error.errno)
print('sent', sent, flush=True)
time.sleep(600)
"""
PASSES = """
import array, socket
a, b = socket.socketpair()
a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
print("passed")
"""
"""What fails with ETOOMANYREFS where the user has too many on their way."""


async def crowd(sandbox: Sandbox) -> None:
    """Have the sandbox send descriptors that nobody takes, until its user may send no more."""
    flood = await sandbox.spawn(["python3", "-c", FLOOD])
    await until(lambda: flood.poll() is not None or b"sent" in flood.output())
    assert flood.poll() is None
    assert str(errno.ETOOMANYREFS).encode() in flood.output()


async def works(sandbox: Sandbox) -> None:
    """Large files and long answers come whole."""
    data = os.urandom(1_000_000)
    await sandbox.write_file("big", data)
    assert await sandbox.read_file("big") == data
    with pytest.raises(OSError, match="too large"):
        await sandbox.read_file("big", limit=999_999)
    await sandbox.run("mkdir many && cd many && seq 1 5000 | xargs touch")
    assert len(await sandbox.list_dir("many")) == 5000
    assert (await sandbox.run("echo on")).output == "on\n"


async def test_too_many_descriptors_in_flight_are_sent_in_chunks() -> None:
    async with create_sandbox(SandboxConfig()) as sandbox:
        await crowd(sandbox)
        await works(sandbox)


async def test_other_sandboxes_do_not_notice_it() -> None:
    async with create_sandbox(SandboxConfig()) as other, create_sandbox(SandboxConfig()) as sandbox:
        await crowd(sandbox)
        await works(other)
        async with create_sandbox(SandboxConfig()) as later:
            await works(later)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give each sandbox a user of its own")
@pytest.mark.parametrize("on_image", [False, True])
async def test_sandboxes_of_root_are_different_users_outside(on_image: bool, rootfs: Path) -> None:
    from hermes_rl.sandbox.bubblewrap import _has_users
    from hermes_rl.sandbox.helper_sandbox import HelperSandbox
    from hermes_rl.sandbox.image_mounts import recent_kernel

    config = SandboxConfig(image=str(rootfs)) if on_image else SandboxConfig()
    async with create_sandbox(config) as one, create_sandbox(config) as two:
        assert isinstance(one, HelperSandbox) and isinstance(two, HelperSandbox)
        users = {Path(f"/proc/{sandbox.pid}").stat().st_uid for sandbox in (one, two)} - {0}
        inside = [(await sandbox.run("id -u; touch x; stat -c %u x")).output for sandbox in (one, two)]
        if on_image:
            assert (await one.run("stat -c %u /etc/issue")).output == "1000\n"
            assert (await one.run("rm /etc/issue; ls /etc/issue")).exit_code != 0
            assert (await two.run("ls /etc/issue")).exit_code == 0
        if len(users) == 2:
            await crowd(one)
            assert (await two.run(f"python3 -c '{PASSES}'")).output == "passed\n"
    assert inside == ["1000\n1000\n"] * 2
    assert len(users) in (0, 2 if _has_users() and (recent_kernel() or not on_image) else 1)
    assert "hermes-rl" not in Path("/proc/self/mounts").read_text(), "mounts for sandboxes are nobody else's"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root shows the files of an image as another user's")
async def test_users_of_images_are_used_again_and_mounts_do_not_add_up(rootfs: Path) -> None:
    users = set()
    for _ in range(6):
        async with create_sandbox(SandboxConfig(image=str(rootfs))) as sandbox:
            users.add(user_of(sandbox))
    assert len(users) == 1

    def mounts() -> int:
        return Path("/proc/thread-self/mounts").read_text().count("/mounts/")

    assert launcher().call(mounts).result() == 0


@pytest.mark.parametrize("code", [errno.ETOOMANYREFS, errno.ENFILE])
async def test_host_resource_shortage_is_a_sandbox_failure(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with create_sandbox(SandboxConfig()) as sandbox:

        def refused(frame: bytes) -> tuple[list[bytes], bytes]:
            fields, payload = unpack(frame)
            return fields if fields[0] == b"exit" else [fields[0], b"error", encode_number(code), b"refused"], payload

        monkeypatch.setattr("hermes_rl.sandbox.channel.unpack", refused)
        for asking in (sandbox.read_file("x"), sandbox.list_dir("."), sandbox.run("true"), sandbox.spawn("true")):
            with pytest.raises(SandboxFailure) as caught:
                await asking
            assert caught.value.stop_reason is StopReason.SANDBOX_FAILURE


async def test_pieces_are_one_answer_and_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket_pair(5)  # SOCK_SEQPACKET
    connection = Connection(lambda _: asyncio.sleep(0, Diagnosis()), lambda *_: None, lambda: None)
    connection.open(ours)
    asked = asyncio.ensure_future(connection.ask("read"))
    await asyncio.sleep(0)
    whole = pack([encode_number(1), b"ok"], b"x" * 100_000)
    for at in range(0, len(whole), 30_000):
        mark = PIECE if at + 30_000 < len(whole) else LAST_PIECE
        theirs.send(mark + whole[at : at + 30_000])
    assert (await asked).payload == b"x" * 100_000
    monkeypatch.setattr("hermes_rl.sandbox.channel.PIECES_LIMIT", 50_000)
    theirs.send(PIECE + b"x" * 30_000)
    theirs.send(PIECE + b"x" * 30_000)
    await until(lambda: not connection.alive)
    assert (await connection.failure()).detail == ConnectionLoss.ENDED.value
    theirs.close()


@pytest.mark.parametrize("size", [100, 8 << 20])
async def test_messages_in_files_arrive_in_order_and_one_with_holes_ends_the_connection(size: int) -> None:
    ours, theirs = socket_pair(5)
    connection = Connection(lambda _: asyncio.sleep(0, Diagnosis()), lambda *_: None, lambda: None)
    connection.open(ours)
    asked = [asyncio.ensure_future(connection.ask("read")) for _ in range(2)]
    await asyncio.sleep(0)
    whole = memory_file(pack([encode_number(1), b"ok"], b"x" * size), "answer")
    socket.send_fds(theirs, [IN_FILE], [whole])
    theirs.send(pack([encode_number(2), b"ok"], b"y"))
    ended: list[bytes] = []
    for each in asked:
        each.add_done_callback(lambda done: ended.append(done.result().payload[:1]))
    await asyncio.gather(*asked)
    assert ended == [b"x", b"y"] and len(asked[0].result().payload) == size
    os.ftruncate(sparse := os.memfd_create("holes"), 8 << 20)
    socket.send_fds(theirs, [IN_FILE], [sparse])
    await until(lambda: not connection.alive)
    for fd in (whole, sparse):
        os.close(fd)
    theirs.close()


async def test_helper_that_never_stops_sending_leaves_others_their_turn() -> None:
    """An image may bring its own helper: a volume of an image is mounted over our files."""
    ours, theirs = socket_pair(5)  # SOCK_SEQPACKET
    ends: list[int] = []
    turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_exit(number: int, _: int) -> None:
        ends.append(number)
        if len(ends) == 1:
            asyncio.get_running_loop().call_soon(lambda: turn.set_result(len(ends)))

    connection = Connection(lambda _: asyncio.sleep(0, Diagnosis()), on_exit, lambda: None)
    for number in range(150):
        theirs.send(pack([b"exit", encode_number(number), b"0"]))
    connection.open(ours)
    assert await turn < 150
    await until(lambda: len(ends) == 150)
    connection.end("the test is over")
    theirs.close()
