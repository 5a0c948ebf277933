"""The tools terminal and process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hermes_rl.rollouts.admission import open_descriptors
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.sandbox.jobs import LEFT_PIPES
from hermes_rl.tools.base import LISTED_OUTPUT, MOST_LISTED, Toolkit, ToolRuntime
from hermes_rl.tools.catalogue import resolve_toolsets
from tests.tools.calling import Player, call
from tests.waiting import until


async def test_output_and_exit_code(play: Player) -> None:
    assert await play("terminal", command="echo hi; echo err >&2") == {
        "output": "hi\nerr",
        "exit_code": 0,
        "error": None,
    }
    assert (await play("terminal", command="exit 9"))["exit_code"] == 9


async def test_directory_and_variables_last(play: Player) -> None:
    await play("terminal", command="mkdir -p 'a b' && cd 'a b' && export WORD='x \"y\"\nz'")
    answer = await play("terminal", command='pwd; echo "$WORD"; unset WORD; cd ..; exit 3')
    assert (answer["output"], answer["exit_code"]) == ('/home/user/a b\nx "y"\nz', 3)
    assert (await play("terminal", command="pwd; echo [$WORD]"))["output"] == "/home/user\n[]"


async def test_functions_and_plain_variables_do_not_last(play: Player) -> None:
    await play("terminal", command="local_word=x; f() { echo f; }")
    assert (await play("terminal", command="echo [$local_word]; f"))["exit_code"] == 127


@pytest.mark.parametrize(
    "command",
    ["exec true", "kill -9 $$", "trap 'echo mine' EXIT", "set -e; false", 'echo "broken', "cd /nope", "exec 3>&-"],
)
async def test_any_end_leaves_a_working_terminal(play: Player, command: str) -> None:
    await play("terminal", command="export KEPT=1; mkdir d; cd d")
    await play("terminal", command=command)
    assert (await play("terminal", command="echo $KEPT; pwd"))["output"] == "1\n/home/user/d"


async def test_removed_directory_is_left(play: Player) -> None:
    await play("terminal", command="mkdir d; cd d; rmdir ../d")
    assert (await play("terminal", command="pwd"))["output"] == "/home/user"


async def test_workdir_is_for_one_command(play: Player) -> None:
    assert (await play("terminal", command="pwd", workdir="/usr"))["output"] == "/usr"
    assert (await play("terminal", command="pwd"))["output"] == "/home/user"
    answer = await play("terminal", command="pwd", workdir="/nowhere")
    assert answer["exit_code"] == 126
    assert "/nowhere" in answer["output"]


async def test_timeout(play: Player) -> None:
    answer = await play("terminal", command="echo before; sleep 30", timeout=1)
    assert answer == {"output": "before", "exit_code": 124, "error": "Command timed out after 1 seconds"}


async def test_command_ends_before_its_call_does(play: Player) -> None:
    await play("terminal", command="true")  # the start of the sandbox is none of its time
    outcome = await play.outcome("terminal", '{"command": "echo kept; sleep 30"}', timeout=2.0)
    assert outcome.error is None
    assert '"output": "kept"' in outcome.content
    assert "timed out after 1.8" in outcome.content


async def test_sandbox_bounds_what_is_asked_for() -> None:
    toolkit = Toolkit(resolve_toolsets(["terminal"]))
    async with ToolRuntime(SandboxConfig(timeout=0.3), toolkit=toolkit) as runtime:
        answer = await Player(runtime)("terminal", command="sleep 30", timeout=500)
        assert answer["exit_code"] == 124


async def test_long_output_and_control_sequences(play: Player) -> None:
    answer = await play("terminal", command="seq 1 100000")
    assert answer["output"].startswith("1\n2\n")
    assert answer["output"].endswith("\n100000")
    assert len(answer["output"]) < 51_000
    assert (await play("terminal", command="printf '\\033[31mred\\033[0m'"))["output"] == "red"


async def test_parameters_without_effect_are_said(play: Player) -> None:
    answer = await play("terminal", command="true", pty=True, notify_on_complete=True)
    assert "pty" in answer["note"]
    assert "notifications" in answer["note"]


async def test_interpreter_is_not_the_agents_to_replace_for_rewards(play: Player) -> None:
    await play("terminal", command="mkdir bin; echo 'echo fake' > bin/cat; chmod +x bin/cat; export PATH=~/bin:$PATH")
    assert (await play("terminal", command="cat"))["output"] == "fake"
    sandbox = await play.runtime.sandbox()
    assert (await sandbox.run("echo real | cat")).output == "real\n"


async def test_background_process_from_start_to_end(play: Player) -> None:
    started = await play("terminal", command="while read l; do echo got $l; done; exit 4", background=True)
    assert started["output"] == "Background process started"
    session = started["session_id"]
    assert (await play("process", action="submit", session_id=session, data="one"))["status"] == "ok"
    assert (await play("process", action="write", session_id=session, data="two\n"))["bytes_written"] == 4

    async def both() -> Any:
        polled = await play("process", action="poll", session_id=session)
        return "two" in polled["output_preview"] and polled

    polled = await until(both)
    assert (polled["status"], polled["output_preview"]) == ("running", "got one\ngot two")
    await play("process", action="close", session_id=session)
    ended = await play("process", action="wait", session_id=session)
    assert (ended["status"], ended["exit_code"], ended["output"]) == ("exited", 4, "got one\ngot two")
    assert (await play("process", action="kill", session_id=session))["status"] == "already_exited"
    assert (await play("process", action="write", session_id=session, data="x"))["status"] == "already_exited"
    listed = (await play("process", action="list"))["processes"]
    assert [(entry["session_id"], entry["status"]) for entry in listed] == [(session, "exited")]


async def test_wait_times_out_and_kill_ends_the_process(play: Player) -> None:
    session = (await play("terminal", command="sleep 60", background=True))["session_id"]
    assert (await play("process", action="wait", session_id=session, timeout=1))["status"] == "timeout"
    killed = await play("process", action="kill", session_id=session)
    assert (killed["status"], killed["completion_reason"]) == ("killed", "killed")


async def test_log_by_lines(play: Player) -> None:
    session = (await play("terminal", command="seq 1 500", background=True))["session_id"]
    await play("process", action="wait", session_id=session)
    log = await play("process", action="log", session_id=session)
    assert (log["total_lines"], log["showing"], log["output"][:3]) == (500, "200 lines", "301")
    assert (await play("process", action="log", session_id=session, offset=9, limit=2))["output"] == "10\n11"


async def test_background_starts_where_the_terminal_is(play: Player) -> None:
    await play("terminal", command="mkdir d; cd d; export WORD=x")
    session = (await play("terminal", command="pwd; echo $WORD", background=True))["session_id"]
    assert (await play("process", action="wait", session_id=session))["output"] == "/home/user/d\nx"


async def test_process_of_another_rollout_is_unknown(play: Player) -> None:
    session = (await play("terminal", command="sleep 60", background=True))["session_id"]
    toolkit = Toolkit(resolve_toolsets(["terminal"]))
    async with ToolRuntime(toolkit=toolkit) as other:
        outcome = await Player(other).outcome("process", {"action": "poll", "session_id": session})
        assert outcome.error is not None
        assert "no process" in outcome.content


async def test_process_needs_a_session(play: Player) -> None:
    outcome = await play.outcome("process", {"action": "poll"})
    assert outcome.error is not None
    assert "session_id is required" in outcome.content


async def test_three_commands_run_together(play: Player) -> None:
    all_of_them = "until [ -e 0 ] && [ -e 1 ] && [ -e 2 ]; do sleep 0.01; done"
    commands = [f"touch {i}; {all_of_them}; echo {i}" for i in range(3)]
    calls = [
        {"id": str(i), "function": {"name": "terminal", "arguments": {"command": command, "timeout": 60}}}
        for i, command in enumerate(commands)
    ]
    outcomes = await play.outcomes(*calls)
    assert [(outcome.id, outcome.content[:13]) for outcome in outcomes] == [
        (str(i), f'{{"output": "{i}') for i in range(3)
    ]


FLOOD = "head -c 3000000 /dev/zero | tr '\\0' x"


async def flood(play: Player, count: int, command: str = FLOOD) -> list[dict[str, Any]]:
    """Start so many in one turn; what the calls answered."""
    calls = [
        call("terminal", json.dumps({"command": command, "background": True}), f"c{number}") for number in range(count)
    ]
    return [json.loads(outcome.content) for outcome in await play.outcomes(*calls)]


def held(play: Player) -> int:
    """Bytes of output that the runner holds for background processes."""
    return sum(len(entry.process.output()) for entry in play.runtime.processes.all())


@pytest.mark.slow
async def test_no_number_of_background_processes_fills_the_runner(play: Player) -> None:
    for _ in range(3):
        answers = await flood(play, 40)
        assert any("session_id" in answer for answer in answers)
        await until(lambda: not any(entry.status == "running" for entry in play.runtime.processes.all()))
    assert len(play.runtime.processes.all()) <= MOST_LISTED
    assert held(play) <= MOST_LISTED * (LISTED_OUTPUT + 100)
    assert "omitted" in play.runtime.processes.all()[0].process.output().decode()
    last = play.runtime.processes.all()[-1]
    assert (await play("process", action="poll", session_id=last.id))["status"] == "exited"
    outcome = await play.outcome("process", json.dumps({"action": "poll", "session_id": "proc_1"}))
    assert "only the last of 32 remain" in outcome.content


async def test_background_processes_over_the_limit_are_refused(play: Player) -> None:
    answers = await flood(play, MOST_LISTED + 5, "sleep 60")
    refused = [answer["error"] for answer in answers if "session_id" not in answer]
    assert refused == ["32 processes run in the background already; end one of them first"] * 5
    await play("process", action="kill", session_id="proc_1")
    assert "session_id" in (await flood(play, 1, "sleep 60"))[0]


@pytest.mark.parametrize("background", [True, False])
async def test_what_commands_leave_running_takes_few_descriptors(play: Player, background: bool) -> None:
    """Each leaves a process that holds the pipe of its output."""
    await play("terminal", command="true")
    before = open_descriptors()
    for _ in range(90):
        # `$$` takes a shell of its own, and so a pipe of its own.
        await play("terminal", command="echo $$ > /dev/null; sleep 60 &", background=background)
        if background:
            await play.runtime.processes.all()[-1].process.wait(10)
    assert open_descriptors() - before <= LEFT_PIPES + 5
    assert (await play("terminal", command="echo on"))["output"] == "on"
