"""Sandboxes that wait: taken as if they were new, and none is left in the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from hermes_rl.sandbox.backends import MOST, SPARES, Pool, create_sandbox
from hermes_rl.sandbox.base import ResourceLimits, Sandbox, SandboxConfig, SandboxFile
from hermes_rl.sandbox.helper_sandbox import HelperSandbox


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    made = Pool()
    yield made
    await made.close()


async def settled(pool: Pool) -> None:
    """Wait until the pool has made what it wants to have."""
    while pool._tasks:
        await asyncio.gather(*pool._tasks, return_exceptions=True)


def waiting(pool: Pool) -> list[HelperSandbox]:
    return [spare for spares in pool._spares.values() for spare in spares]


async def play(pool: Pool, config: SandboxConfig) -> Sandbox:
    async with pool.create(config) as sandbox:
        await sandbox.run("touch used")
        return sandbox


async def test_the_second_finds_one_waiting(pool: Pool) -> None:
    await play(pool, SandboxConfig())
    await settled(pool)
    assert (pool.reused, len(waiting(pool))) == (0, SPARES)
    config = SandboxConfig(files=(SandboxFile("f", b"mine"),), setup=("cat f > g",), env={"A": "1"}, timeout=9)
    async with pool.create(config) as sandbox:
        assert pool.reused == 1
        assert (await sandbox.run("ls; cat g; echo $A")).output == "f\ng\nmine1\n"
        assert sandbox.config.timeout == 9


async def test_a_burst_makes_no_more_than_it_needs(pool: Pool) -> None:
    made = [pool.create(SandboxConfig()) for _ in range(20)]
    assert len(pool._tasks) == 1
    await settled(pool)
    assert len(waiting(pool)) == SPARES
    for sandbox in made:
        await sandbox.close()


async def test_one_that_died_meanwhile_is_not_given(pool: Pool) -> None:
    await play(pool, SandboxConfig())
    await settled(pool)
    for spare in waiting(pool):
        await spare.close()
    await play(pool, SandboxConfig())
    assert pool.reused == 0


async def test_what_differs_has_spares_of_its_own_and_there_are_few_in_all(pool: Pool) -> None:
    for number in range(MOST):
        await play(pool, SandboxConfig(limits=ResourceLimits(processes=100 + number)))
        await settled(pool)
    assert len(waiting(pool)) <= MOST
    async with pool.create(SandboxConfig(limits=ResourceLimits(processes=100 + MOST - 1))) as sandbox:
        assert pool.reused == 1
        assert (await sandbox.run("ulimit -u")).output == f"{100 + MOST - 1}\n"


async def test_closing_ends_all_that_wait() -> None:
    pool = Pool()
    await play(pool, SandboxConfig())
    await settled(pool)
    spares = waiting(pool)
    await play(pool, SandboxConfig())  # and while more are being made
    await pool.close()
    assert not any(spare.alive for spare in spares)
    assert not pool._tasks and not waiting(pool)


async def test_no_sandbox_has_no_spares(pool: Pool) -> None:
    await play(pool, SandboxConfig(backend="none"))
    assert not pool._tasks


async def test_an_image_that_is_not_there_is_told_to_who_asks(pool: Pool) -> None:
    from hermes_rl.errors import UserError

    with pytest.raises(UserError, match="No such file"):
        await play(pool, SandboxConfig(image="/nowhere"))
    await settled(pool)
    assert waiting(pool) == []


STEERING = {
    "BASH_ENV": "/home/user/rc",
    "ENV": "/home/user/rc",
    "SHELLOPTS": "braceexpand:xtrace",
    "BASHOPTS": "nullglob",
    "POSIXLY_CORRECT": "1",
    "PROMPT_COMMAND": "echo prompt",
    "PS4": "> ",
    "TMOUT": "1",
    "IFS": ":",
    "GLOBIGNORE": "rc",
    "BASH_FUNC_echo%%": '() { builtin echo mine "$@"; }',
    "PLAIN": "1",
}
"""Variables that mean something to a shell, each with a value that shows."""


@pytest.mark.parametrize("name", STEERING)
async def test_a_command_prints_the_same_in_one_that_waited_and_in_a_new_one(pool: Pool, name: str) -> None:
    await play(pool, SandboxConfig())
    await settled(pool)
    config = SandboxConfig(files=(SandboxFile("rc", b"echo sourced\n"),), env={name: STEERING[name]})
    async with pool.create(config) as waited, create_sandbox(config) as new:
        assert pool.reused == 1
        told = []
        for sandbox in (waited, new):
            commands = ("echo one; set -- a:b; echo $1 *", "shopt -po posix; echo two", "true; echo three")
            told.append([(await sandbox.run_reporting(command, "")).output for command in commands])
        anew = [(await Sandbox.run_reporting(new, command, "")).output for command in commands]
    assert told[0] == told[1] == anew
