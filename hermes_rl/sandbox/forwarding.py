"""Connect two programs in two sandboxes that communicate only with each other.

`forwarded` starts both and copies the output of one to the other's standard input, without reading it: a chunk at a
time, so that a slow reader slows down the writer, and no more than `FORWARDED` bytes each way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.base import Conversation, Sandbox
from hermes_rl.threads import end_tasks

FORWARDED = 4 << 30


@asynccontextmanager
async def connect_programs(
    one: Sandbox, command: Sequence[str], other: Sandbox, other_command: Sequence[str]
) -> AsyncIterator[None]:
    """Connect a program in each sandbox with the one in the other, for the block; the end of one ends both."""
    conversation = await one.converse(command)
    try:
        other_conversation = await _start_or_none(other, other_command)
        if other_conversation is None:
            await conversation.close()  # the other program sees a closed connection
            yield
            return
        copies = [
            asyncio.create_task(_copy_data(a, b))
            for a, b in ((conversation, other_conversation), (other_conversation, conversation))
        ]
        try:
            yield
        finally:
            await end_tasks(copies)
            await other_conversation.close()
    finally:
        await conversation.close()


async def _start_or_none(sandbox: Sandbox, command: Sequence[str]) -> Conversation | None:
    """Start a program in the sandbox of an agent; None if it cannot start, which is then caused by the agent."""
    try:
        return await sandbox.converse(command)
    except OSError:
        return None
    except SandboxFailure as failure:
        if not failure.stop_reason.graded:
            raise
        return None


async def _copy_data(source: Conversation, target: Conversation) -> None:
    remaining = FORWARDED
    try:
        while data := await source.read():
            remaining -= len(data)
            if remaining < 0:
                break
            await target.write(data)
    except (OSError, SandboxFailure):
        pass  # one of them has ended; closing the other's input reports it
    await target.close()
    await source.close()
