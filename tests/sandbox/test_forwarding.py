"""Two programs in two sandboxes that speak with each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.base import Sandbox
from hermes_rl.sandbox.forwarding import connect_programs
from hermes_rl.tools.base import ToolRuntime
from tests.waiting import until


@pytest.fixture
async def two() -> AsyncIterator[tuple[Sandbox, Sandbox]]:
    async with ToolRuntime() as one, ToolRuntime() as other:
        yield await one.sandbox(), await other.sandbox()


async def test_each_reads_what_the_other_writes(two: tuple[Sandbox, Sandbox]) -> None:
    one, other = two
    asks = ["sh", "-c", 'echo hello; read answer; echo "$answer" > /tmp/answer; mv /tmp/answer /tmp/heard; sleep 60']
    async with connect_programs(one, asks, other, ["sh", "-c", 'read word; echo "you said $word"; sleep 60']):
        done = await one.run("for i in $(seq 200); do [ -e /tmp/heard ] && cat /tmp/heard && exit; sleep .05; done")
    assert done.output == "you said hello\n"

    async def ended() -> bool:
        left = await asyncio.gather(*(each.run("pgrep -x sleep || echo none") for each in two))
        return [each.output for each in left] == ["none\n", "none\n"]

    await until(ended)


async def test_the_end_of_one_is_the_end_of_both(two: tuple[Sandbox, Sandbox]) -> None:
    one, other = two
    async with connect_programs(one, ["sh", "-c", "cat > /tmp/said; touch /tmp/over; sleep 60"], other, ["true"]):
        done = await one.run("for i in $(seq 100); do pgrep -x cat >/dev/null || exit 0; sleep .05; done; exit 1")
    assert done.exit_code == 0


async def test_agent_program_that_cannot_start_leaves_the_sandbox_usable(two: tuple[Sandbox, Sandbox]) -> None:
    one, other = two
    async with connect_programs(one, ["cat"], other, ["/no/such/program"]):
        assert (await one.run("echo here")).output == "here\n"


async def test_failure_inside_the_connection_is_raised_unchanged(two: tuple[Sandbox, Sandbox]) -> None:
    with pytest.raises(SandboxFailure, match="gone"):
        async with connect_programs(two[0], ["cat"], two[1], ["cat"]):
            raise SandboxFailure("gone")
