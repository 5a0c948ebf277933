"""Processes that run on after `spawn` came back."""

from __future__ import annotations

import pytest

from hermes_rl.sandbox import jobs
from hermes_rl.sandbox.base import Sandbox
from tests.waiting import until


async def test_runs_on_and_ends(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("echo one; sleep 0.1; echo two; exit 5")
    assert process.poll() is None
    assert process.pid > 1
    assert await process.wait(30) == 5
    assert process.poll() == 5
    assert process.output() == b"one\ntwo\n"


async def test_output_so_far(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("echo early; sleep 30")
    await until(lambda: process.output().endswith(b"\n"))
    assert process.output() == b"early\n"
    await process.kill()
    assert await process.wait(30) == 137


async def test_wait_times_out_without_killing_the_process(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("sleep 30")
    assert await process.wait(0.05) is None
    assert process.poll() is None


async def test_talks_over_stdin(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("while read line; do echo got $line; done; echo end")
    await process.write_stdin(b"a\nb\n")
    await process.close_stdin()
    assert await process.wait(30) == 0
    assert process.output() == b"got a\ngot b\nend\n"
    with pytest.raises(BrokenPipeError):
        await process.write_stdin(b"more")


async def test_more_input_than_a_pipe_holds(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("wc -c")
    await process.write_stdin(b"x" * 500_000)
    await process.close_stdin()
    assert await process.wait(30) == 0
    assert process.output().strip() == b"500000"


async def test_head_and_tail_of_much_output(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("seq 1 50000", output_limit=1000)
    assert await process.wait(30) == 0
    assert b"bytes of output omitted" in process.output()
    assert process.output().endswith(b"50000\n")


async def test_killing_takes_the_group(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("sleep 60 & echo $! > child; wait")
    await sandbox.run("until [ -s child ]; do sleep 0.01; done", timeout=30)
    await process.kill()
    await process.wait(30)
    child = (await sandbox.read_file("child")).decode().strip()
    await sandbox.run(f"while kill -0 {child} 2>/dev/null; do sleep 0.01; done", timeout=30)
    assert (await sandbox.run(f"kill -0 {child} 2>/dev/null || echo gone")).output == "gone\n"


async def test_cannot_start(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundError):
        await sandbox.spawn(["/no/such/program"])


async def test_closing_the_sandbox_ends_it(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("sleep 60")
    await sandbox.close()
    assert process.poll() is not None


async def test_writing_to_a_process_that_does_not_read_times_out(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "READ_SECONDS", 0.2)
    process = await sandbox.spawn("sleep 60")
    with pytest.raises(OSError, match="does not read"):
        await process.write_stdin(b"x" * 500_000)
