"""Running commands: the same on every backend."""

from __future__ import annotations

import asyncio
import time

import pytest

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import Sandbox, SandboxConfig, SandboxFile
from hermes_rl.stop_reasons import StopReason
from tests.waiting import until


async def test_output_and_exit_code(sandbox: Sandbox) -> None:
    result = await sandbox.run("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\nerr\n", b"")
    assert result.duration > 0
    assert not result.timed_out


async def test_stderr_is_separate_without_merging(sandbox: Sandbox) -> None:
    result = await sandbox.run("echo out; echo err >&2", merge_stderr=False)
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


async def test_argument_list_needs_no_quoting(sandbox: Sandbox) -> None:
    result = await sandbox.run(["printf", "%s|", "a b", "$HOME", "'\"\n"])
    assert result.stdout == b"a b|$HOME|'\"\n|"


async def test_stdin_cwd_and_environment(sandbox: Sandbox) -> None:
    await sandbox.make_dir("sub dir")
    result = await sandbox.run("cat; pwd -P; echo $WORD", stdin=b"in\n", cwd="sub dir", env={"WORD": "x"})
    assert result.output == f"in\n{sandbox.workdir}/sub dir\nx\n"


async def test_stdin_is_empty_by_default(sandbox: Sandbox) -> None:
    assert (await sandbox.run("cat; echo end")).output == "end\n"


async def test_large_stdin(sandbox: Sandbox) -> None:
    assert (await sandbox.run("wc -c", stdin=b"x" * 3_000_000)).output.strip() == "3000000"


async def test_script_beyond_one_argument(sandbox: Sandbox) -> None:
    script = "cat <<'END' | wc -c\n" + "x" * 400_000 + "\nEND\n"
    assert (await sandbox.run(script)).output.strip() == "400001"


async def test_configured_environment() -> None:
    config = SandboxConfig(env={"LEVEL": "7", "PATH": "/usr/bin:/bin"})
    async with create_sandbox(config) as sandbox:
        assert (await sandbox.run("echo $LEVEL $PATH")).output == "7 /usr/bin:/bin\n"


@pytest.mark.parametrize(("command", "code"), [(["/no/such"], 127), (["/etc"], 126)])
async def test_command_that_cannot_start(sandbox: Sandbox, command: list[str], code: int) -> None:
    result = await sandbox.run(command)
    assert result.exit_code == code
    assert "cannot start the command" in result.output


async def test_working_directory_that_is_not_there(sandbox: Sandbox) -> None:
    result = await sandbox.run("true", cwd="nowhere")
    assert result.exit_code != 0
    assert "working directory" in result.output


async def test_null_byte_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="null byte"):
        await sandbox.run("echo a\0b")
    assert (await sandbox.run("echo still here")).output == "still here\n"


async def test_killed_by_signal(sandbox: Sandbox) -> None:
    assert (await sandbox.run("kill -TERM $$")).exit_code == 143


async def test_timeout_kills_the_process_group(sandbox: Sandbox) -> None:
    began = time.perf_counter()
    result = await sandbox.run("(sleep 50 & echo $! > child; wait) | cat", timeout=1)
    assert result.timed_out
    assert result.exit_code == 124
    assert time.perf_counter() - began < 20
    child = (await sandbox.read_file("child")).decode().strip()
    # Killed at once, but it stays visible until its parent has taken note of it.
    look = f"kill -0 {child} 2>/dev/null"
    reaped = f"for _ in $(seq 100); do {look} || break; sleep 0.05; done; {look} || echo gone"
    assert (await sandbox.run(reaped)).output.endswith("gone\n")


async def test_default_timeout_is_the_configurations(backend: str) -> None:
    async with create_sandbox(SandboxConfig(backend=backend, timeout=0.2)) as sandbox:
        assert (await sandbox.run("sleep 30")).timed_out


async def test_output_keeps_head_and_tail(sandbox: Sandbox) -> None:
    result = await sandbox.run("seq 1 100000", output_limit=1000)
    assert result.truncated
    assert result.output.startswith("1\n2\n")
    assert result.output.endswith("99999\n100000\n")
    assert "bytes of output omitted" in result.output
    assert len(result.stdout) < 1100


async def test_flood_leaves_the_loop_alone(sandbox: Sandbox) -> None:
    flood = asyncio.create_task(sandbox.run("yes", timeout=1.0, output_limit=10_000))
    computed, last = [0.0], time.thread_time()
    while not flood.done():
        await asyncio.sleep(0.005)
        now = time.thread_time()
        computed.append(now - last)
        last = now
    assert flood.result().timed_out
    assert len(computed) > 10
    assert max(computed) < 0.25


async def test_background_child_does_not_block_the_command(sandbox: Sandbox) -> None:
    began = time.perf_counter()
    result = await sandbox.run("sleep 30 & echo started")
    assert result.output == "started\n"
    assert time.perf_counter() - began < 20


async def test_background_child_may_continue_to_write(sandbox: Sandbox) -> None:
    await sandbox.run("(for i in 1 2 3 4 5; do sleep 0.05; echo $i; done; echo done > finished) &")

    async def finished() -> bool:
        return "finished" in {info.name for info in await sandbox.list_dir(".")}

    await until(finished)  # it is not stopped when nobody reads its output any more


async def test_many_at_once(sandbox: Sandbox) -> None:
    results = await asyncio.gather(*(sandbox.run(f"echo {i}") for i in range(40)))
    assert [result.output for result in results] == [f"{i}\n" for i in range(40)]


async def test_kill_all_ends_daemons_and_keeps_files(sandbox: Sandbox) -> None:
    await sandbox.run("echo x > kept; setsid sh -c 'echo $$ > daemon; sleep 60' >/dev/null 2>&1 &")
    await sandbox.run("until [ -s daemon ]; do sleep 0.01; done", timeout=30)
    daemon = (await sandbox.read_file("daemon")).decode().strip()
    await sandbox.kill_all()
    assert (await sandbox.run(f"kill -0 {daemon} 2>/dev/null || echo gone")).output == "gone\n"
    assert await sandbox.read_file("kept") == b"x\n"


async def test_files_are_written_before_setup_runs(backend: str) -> None:
    config = SandboxConfig(
        backend=backend,
        files=(SandboxFile("in/run.sh", b"#!/bin/sh\necho ran > done\n", 0o755),),
        setup=("./in/run.sh", "test -s done"),
    )
    async with create_sandbox(config) as sandbox:
        assert await sandbox.read_file("done") == b"ran\n"


async def test_failing_setup_is_our_failure(backend: str) -> None:
    sandbox = create_sandbox(SandboxConfig(backend=backend, setup=("echo why; false",)))
    with pytest.raises(SandboxFailure, match="why") as caught:
        await sandbox.start()
    assert caught.value.stop_reason is StopReason.SANDBOX_FAILURE
    assert not sandbox.alive


async def test_workdir_is_made(backend: str) -> None:
    async with create_sandbox(SandboxConfig(backend=backend, workdir="a/b")) as sandbox:
        assert (await sandbox.run("pwd -P")).output == f"{sandbox.home}/a/b\n"


async def test_use_after_close_is_a_failure(backend: str) -> None:
    sandbox = create_sandbox(SandboxConfig(backend=backend))
    with pytest.raises(SandboxFailure, match="not started"):
        await sandbox.run("true")
    await sandbox.start()
    await sandbox.close()
    await sandbox.close()
    with pytest.raises(SandboxFailure, match="closed"):
        await sandbox.run("true")


async def test_lifetime_while_a_command_runs_is_the_agents(backend: str) -> None:
    async with create_sandbox(SandboxConfig(backend=backend, lifetime=1)) as sandbox:
        with pytest.raises(SandboxFailure, match="lifetime") as caught:
            await sandbox.run("sleep 20")
        assert caught.value.stop_reason is StopReason.SANDBOX_KILLED
        assert sandbox.killed_by_agent


async def test_expired_lifetime_of_an_idle_sandbox_is_an_infrastructure_failure(backend: str) -> None:
    async with create_sandbox(SandboxConfig(backend=backend, lifetime=0.1)) as sandbox:
        await until(lambda: not sandbox.alive)
        with pytest.raises(SandboxFailure, match="lifetime") as caught:
            await sandbox.run("true")
        assert caught.value.stop_reason is StopReason.SANDBOX_FAILURE
