"""A process that the host talks to: the same on every backend that can."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import Conversation, Sandbox, SandboxConfig
from tests.waiting import until


async def everything(conversation: Conversation) -> bytes:
    parts = []
    while part := await conversation.read():
        parts.append(part)
    return b"".join(parts)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def exit_code(conversation: Conversation) -> int:
    await until(lambda: conversation.poll() is not None)
    code = conversation.poll()
    assert code is not None
    return code


async def test_both_sides_speak_in_turn(sandbox: Sandbox) -> None:
    conversation = await sandbox.converse(["cat"])
    try:
        for word in (b"one\n", b"two\n"):
            await conversation.write(word)
            assert await conversation.read() == word
        assert conversation.poll() is None
    finally:
        await conversation.close()


async def test_its_end_is_seen_with_all_that_it_wrote(sandbox: Sandbox) -> None:
    conversation = await sandbox.converse("head -c 3000000 /dev/zero; echo bad >&2; exit 4")
    assert len(await everything(conversation)) == 3_000_000
    assert await exit_code(conversation) == 4
    assert conversation.errors() == b"bad\n"
    with pytest.raises(OSError):
        for _ in range(100):
            await conversation.write(b"x" * 100_000)
    await conversation.close()
    await conversation.close()


async def test_closing_ends_the_process_group(sandbox: Sandbox) -> None:
    conversation = await sandbox.converse("sleep 1000 & echo $!; wait")
    child = int(await conversation.read())
    await conversation.close()
    await exit_code(conversation)
    await sandbox.run(f"while kill -0 {child} 2>/dev/null; do sleep 0.01; done", timeout=5)
    assert (await sandbox.run(f"kill -0 {child} 2>/dev/null || echo gone")).output == "gone\n"


async def test_a_child_that_lives_on_does_not_hold_it_open(sandbox: Sandbox) -> None:
    conversation = await sandbox.converse("setsid sleep 1000 & head -c 1000000 /dev/zero")
    async with asyncio.timeout(30):
        assert len(await everything(conversation)) == 1_000_000
    await conversation.close()


async def test_a_program_that_is_not_there(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundError):
        await sandbox.converse(["no-such-program"])


async def test_the_end_of_the_sandbox_ends_it(backend: str) -> None:
    async with create_sandbox(SandboxConfig(backend=backend)):
        pass  # what is opened once per process is open now
    before = descriptors()
    async with create_sandbox(SandboxConfig(backend=backend)) as sandbox:
        conversation = await sandbox.converse(["cat"])
        waiting = asyncio.create_task(conversation.read())
        await asyncio.sleep(0)
    assert await waiting == b""
    with pytest.raises(OSError):
        await conversation.write(b"x")
    await asyncio.sleep(0)  # the transport closes its socket in the loop's next round
    assert descriptors() == before


async def test_cwd_and_environment(sandbox: Sandbox) -> None:
    await sandbox.make_dir("sub")
    conversation = await sandbox.converse("pwd -P; echo $WORD", cwd="sub", env={"WORD": "x"})
    assert await everything(conversation) == f"{sandbox.workdir}/sub\nx\n".encode()
    await conversation.close()
