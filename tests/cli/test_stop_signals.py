"""SIGTERM and Ctrl-C end every command while its code, a thread or its output blocks, with one line and a status."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from tests.commands import Command, environment, hermes, program, started
from tests.http_servers import Handler, serving
from tests.runs.playing import lines
from tests.service.served import Served
from tests.waiting import BOUND, stays, until_blocking

SPEC = """
name: blocking
dataset: {generator: "rows.py:rows", eval: {split: eval}}
prompt: {user: "{{ q }}"}
rewards: {exact_match: {args: {target: "yes"}}}
solution: {turns: [{say: "yes"}]}
process: {group_size: 2, groups: 3}
evaluate: {rollouts: 1}
servers: {policy: {type: scripted}}
"""
SET = """
set: {name: small, specs: [spec.yaml], models: [{name: m, set: {servers.policy: {type: scripted}}}]}
"""
ROWS = '''
import concurrent.futures
import os
import threading


def rows(*, seed, split):
    """Yield rows; block before the one whose number is in the file `blocks`, as a request without an answer does."""
    if os.environ.get("LEAVES_A_THREAD"):
        concurrent.futures.ThreadPoolExecutor().submit(threading.Event().wait)
    for number in range(3):
        if os.path.exists("blocks") and open("blocks").read() == str(number):
            open("blocked", "w").close()
            if os.environ.get("IN_A_POOL"):
                concurrent.futures.ThreadPoolExecutor().submit(threading.Event().wait).result()
            threading.Event().wait()
        yield {"q": f"row {number}" if split == "train" else f"other row {number}"}
'''
ATIF = {
    "schema_version": "ATIF-v1.6",
    "session_id": "s",
    "agent": {"name": "a", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "row 0"},
        {"step_id": 2, "source": "agent", "message": "yes"},
    ],
}
RUN = ["run", "spec.yaml", "process", "--out", "run", "--quiet"]
SIGNALS = [signal.SIGTERM, signal.SIGINT]
IN_GENERATOR = [
    RUN,
    [*RUN, "--dry-run"],
    ["run", "spec.yaml", "evaluate", "--quiet"],
    ["run", "spec.yaml", "serve", "--quiet"],
    ["run", "set.yaml", "evaluate", "--quiet"],
    ["render", "spec.yaml"],
    ["play", "spec.yaml"],
    ["grade", "spec.yaml", "--atif", "trajectory.json"],
    ["validate", "spec.yaml", "--rows", "3"],
    ["validate", "spec.yaml", "--deep", "--rows", "3"],
    ["serve-http", "spec.yaml", "--listen", "127.0.0.1:0"],
    ["regrade", "run"],
]
IN_OUTPUT = [
    ["show", "run"],
    ["audit", "run"],
    ["compare", "run", "other", "--force"],
    ["report", "run"],
    ["export", "run", "--format", "jsonl"],
    ["push", "run", "./published"],
    ["label", "run"],
    ["validate", "spec.yaml"],
    ["migrate", "spec.yaml"],
    ["init", "fresh"],
    ["list", "rewards"],
    ["explain", "exact_match"],
    ["schema"],
]


class TrajectoryApi(Handler):
    """The start of a trainer's: it only answers."""

    def do_GET(self) -> None:  # noqa: N802 - the name is that of http.server
        self.answer({})


@pytest.fixture(scope="module")
def api() -> Iterator[str]:
    with serving(TrajectoryApi) as address:
        yield address


@pytest.fixture
def folder(tmp_path: Path, api: str) -> Path:
    (tmp_path / "spec.yaml").write_text(f"{SPEC}serve: {{api_url: {api}}}\n")
    (tmp_path / "rows.py").write_text(ROWS)
    (tmp_path / "trajectory.json").write_text(json.dumps(ATIF))
    (tmp_path / "set.yaml").write_text(SET)
    return tmp_path


def end_blocked(command: Command, folder: Path, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
    """Signal a command whose generator blocks, once; return its exit status and what it wrote to stderr."""
    try:
        until_blocking(lambda: (folder / "blocked").exists() or command.poll() is not None)
        command.send_signal(number)
        status = command.wait(BOUND)
    finally:
        command.kill()
    return status, command.said()[1]


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("arguments", IN_GENERATOR, ids=lambda words: "-".join(words[:3]))
def test_signal_ends_command_whose_generator_blocks(folder: Path, arguments: list[str], number: signal.Signals) -> None:
    if arguments[0] == "regrade":
        assert hermes(*RUN, cwd=folder).returncode == 0
    (folder / "blocks").write_text("0")
    status, said = end_blocked(started(*arguments, cwd=folder), folder, number)
    assert (status, said.count("interrupted"), "Traceback" in said) == (130, 1, False), said


@pytest.mark.parametrize("pool", ["", "yes"])
def test_run_whose_generator_blocked_continues(folder: Path, pool: str) -> None:
    (folder / "blocks").write_text("2")
    status, said = end_blocked(started(*RUN, cwd=folder, env={"IN_A_POOL": pool}), folder)
    assert (status, said) == (130, "interrupted; complete results are saved; the same command resumes the run\n")
    (folder / "blocks").unlink()
    done = hermes(*RUN, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert len(lines(folder / "run" / "groups.jsonl")) == 3


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signal_ends_service_in_which_a_thread_blocks(folder: Path, number: signal.Signals, expected: int) -> None:
    with Served(folder / "spec.yaml", environ={"LEAVES_A_THREAD": "yes"}) as service:
        service.process.send_signal(number)
        assert service.process.wait(BOUND) == expected
    assert "Traceback" not in service.said


def test_sigterm_ends_process_that_user_code_forks(folder: Path) -> None:
    fork = """
import os, signal, time
def rows(*, seed, split):
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writer, b"1")
        while True:
            time.sleep(1)
    os.read(reader, 1)
    os.kill(pid, signal.SIGTERM)
    yield {"q": f"{split} {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}"}
"""
    (folder / "rows.py").write_text(fork)
    done = hermes("render", "spec.yaml", "--json", cwd=folder)
    assert json.loads(done.stdout)["messages"][-1]["content"] == "train -15", done


@pytest.mark.parametrize("command", [RUN, ["render", "spec.yaml"]], ids=lambda words: words[0])
def test_sigterm_ends_command_whose_user_code_blocks_the_event_loop(folder: Path, command: list[str]) -> None:
    code = "import threading, pathlib\npathlib.Path('blocked').touch()\nthreading.Event().wait()\ndef look(): ..."
    (folder / "tools.py").write_text(code)
    with (folder / "spec.yaml").open("a") as spec:
        spec.write("tools: [{python: 'tools.py:look', isolate: none}]\n")
    status, said = end_blocked(started(*command, cwd=folder), folder)
    assert (status, said.count("interrupted"), "Traceback" in said) == (130, 1, False), said


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "spec.yaml").write_text(SPEC)
    (folder / "rows.py").write_text(ROWS)
    assert hermes("run", "spec.yaml", "evaluate", "--out", "run", "--quiet", cwd=folder).returncode == 0
    shutil.copytree(folder / "run", folder / "other")
    return folder


@pytest.mark.parametrize("arguments", IN_OUTPUT, ids=lambda words: words[0])
def test_sigterm_ends_command_whose_output_blocks(recorded: Path, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with os.fdopen(reader), os.fdopen(writer, "w") as output, TemporaryFile("w+") as errors, TemporaryFile() as nothing:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        os.set_blocking(writer, True)
        command = Command(*arguments, cwd=recorded, env=environment(), streams=(nothing, output, errors))
        try:
            until_blocking(stays(lambda: processor_time(command)))
            command.send_signal(signal.SIGTERM)
            status = command.wait(BOUND)
        finally:
            command.kill()
        errors.seek(0)
        said = errors.read()
    assert (status, said.count("interrupted"), "Traceback" in said) == (130, 1, False), said


def processor_time(command: Command) -> object:
    """Return the state of a process and what it has used: both stay while it blocks."""
    return Path(f"/proc/{command.pid}/stat").read_text().rpartition(")")[2].split()[:13]


UNNOTICED = """
import asyncio, signal, threading, time
from hermes_rl.cli.run import run_interruptible

def elsewhere():
    time.sleep(0.2)  # until the loop waits
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

async def work():
    threading.Thread(target=elsewhere).start()
    await asyncio.Event().wait()

try:
    run_interruptible(work())
except KeyboardInterrupt:
    print("interrupted")
"""


def test_signal_that_does_not_end_the_wait_of_the_loop_is_heard(tmp_path: Path) -> None:
    """One that arrives just before the loop begins to wait does not; neither does one to another thread."""
    assert program(UNNOTICED, cwd=tmp_path).stdout == "interrupted\n"
