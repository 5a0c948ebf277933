"""Processes of foreign code: what a call gives, what ends it, and that it costs nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import math
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from hermes_rl.errors import AgentFault, HermesRLError, JudgeFailure, RewardFailure, SandboxFailure, UserError
from hermes_rl.plugins import Code, load_object
from hermes_rl.stop_reasons import StopReason
from hermes_rl.threads import wait_for_loop
from hermes_rl.user_code import pool as code_pool
from hermes_rl.user_code.failures import EndedError, ForeignError, NotCarriedError, OvertimeError
from hermes_rl.user_code.pool import ProcessPool
from hermes_rl.user_code.process import OOM_EARLY
from hermes_rl.user_code.proxies import lives_in_runner
from hermes_rl.user_code.served import AT_ONCE
from hermes_rl.user_code.wire import LARGEST
from hermes_rl.user_code.worker import _Clock
from tests.runs.processes import alive, parent_of
from tests.thorough import THOROUGH
from tests.waiting import until, until_blocking

CODE = """
import asyncio, json, os, random, re, signal, socket, struct, subprocess, sys, threading, time
from hermes_rl.errors import AgentFault, HermesRLError, JudgeFailure, SandboxFailure, UserError
from hermes_rl.stop_reasons import StopReason

calls = 0

def add(a, b): return a + b
async def later(a): await asyncio.sleep(0.01); return [a]
loops, kept = [], []
async def loop(leave=None):
    # Leaves something in the event loop, and returns its number: each has one, as it is kept.
    loop = asyncio.get_running_loop()
    if loop not in loops: loops.append(loop)
    match leave:
        case "task": kept.append(asyncio.create_task(asyncio.Event().wait()))
        case "timer": loop.call_later(100, print)
        case "descriptor": loop.add_reader(os.pipe()[0], print)
        case "thread": await asyncio.to_thread(pid)
        case "signal": loop.add_signal_handler(signal.SIGUSR1, print)
        case "generator":
            async def numbers(): yield 1; yield 2
            kept.append(numbers())
            await anext(kept[-1])
        case "error": raise KeyError("x")
        case "exit": sys.exit(3)
    return loops.index(loop)
def pid(): return os.getpid()
def meet(folder, count):
    # Waits until so many processes are in such a call at the same time.
    open(f"{folder}/{os.getpid()}", "w").close()
    while len(os.listdir(folder)) < count: time.sleep(0.001)
    return os.getpid()
def session(): return os.getsid(0)
def order(): return int(open("/proc/self/oom_score_adj").read())
def count():
    global calls
    calls += 1
    return calls
def draw(): return random.random()
def place(): return os.getcwd()
def variable(key): return os.environ.get(key)
def sent(value): return value
def raises(): raise KeyError("column")
def leaves(): sys.exit(3)
def of_ours(which):
    raise {"user": UserError("wrong"), "agent": AgentFault("its doing"), "judge": JudgeFailure("no verdict"),
           "sandbox": SandboxFailure("killed", stop_reason=StopReason.SANDBOX_KILLED)}[which]
def spins():
    while True: pass
def sleeps(seconds=100): time.sleep(seconds); return seconds
def matches(): re.match("(a+)+$", "a" * 64 + "b")
def exits(): os._exit(7)
def killed(): os.kill(os.getpid(), signal.SIGKILL)
def eats(): return len(bytearray(1 << 33))
def prints(count): print("x" * count); return count
def floods():
    while True: print("x" * 10_000)
def logs(logger, text):
    import logging
    logging.getLogger(logger).error(text)
def logs_without_end():
    import logging
    while True: logging.error("")
def object(): return object
def nested(depth):
    value = []
    for _ in range(depth): value = [value]
    return value
def starts_a_session(double):
    code = "import subprocess; print(subprocess.Popen(['sleep', '777.25'], start_new_session=True, stdout=-3).pid)"
    if double: return int(subprocess.check_output([sys.executable, "-c", code]))
    return subprocess.Popen(["sleep", "777.5"], start_new_session=True).pid
def starts(): return subprocess.Popen(["sleep", "777.125"]).pid
def connection():
    for name in os.listdir("/proc/self/fd"):
        try:
            if "socket" in os.readlink(f"/proc/self/fd/{name}"):
                return int(name)
        except OSError:
            pass
def says(data): os.write(connection(), data); time.sleep(100)
def lengths(): os.write(connection(), struct.pack("!I", 1 << 31)); time.sleep(100)
def of_call():
    frame = sys._getframe()
    while "secret" not in frame.f_locals: frame = frame.f_back
    return {"call": frame.f_locals["number"], "secret": frame.f_locals["secret"].hex()}
def writes(data, genuine, waits, stays):
    if genuine:
        data = json.dumps({**of_call(), **json.loads(data)}).encode()
        data = struct.pack("!I", len(data)) + data
    writer = lambda: os.write(connection(), data)
    if waits:
        threading.Timer(0.01, writer).start()
    else:
        writer()
    if stays: time.sleep(100)
    return "its own"
def twice():
    return ["fork", os.fork()]
def fork_that_raises():
    if os.fork() == 0: raise ValueError("in the fork")
    return "the parent"
def fork_that_asks():
    import logging
    if os.fork() == 0:
        logging.getLogger("fork").warning("of the fork")
        raise KeyError("x")
    return "the parent"
class Stubborn:
    def __reduce__(self): return Stubborn.made, ()
    @staticmethod
    def made(): raise ValueError("only here")
"""


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool()
    yield pool
    pool.close()


class Caller:
    """Calls functions of one file."""

    def __init__(self, pool: ProcessPool, path: Path, source: str = CODE) -> None:
        path.write_text(source)
        self.pool, self.path = pool, path

    def code(self, name: str) -> Code:
        return Code.from_ref(f"{self.path}:{name}")

    def __call__(self, name: str, *, timeout: float = 60.0, **arguments: Any) -> Any:
        return play(self.pool, self.code(name), arguments, timeout)


def play(pool: ProcessPool, code: Code, arguments: dict[str, Any], timeout: float = 60.0) -> Any:
    """Call code from an event loop of its own."""
    return asyncio.run(pool.call(code, arguments, "hermes_rl.plugins:identity", timeout))


@pytest.fixture
def call(pool: ProcessPool, tmp_path: Path) -> Caller:
    return Caller(pool, tmp_path / "code.py")


# ------------------------------------------------------------------------------------------------ What a call gives


async def require_all_slots_free(call: Caller) -> None:
    """Require that this event loop runs `FREE` calls at once: more only if none ends in time, and none less."""
    for patience, count in ((0.001, 2 * code_pool.FREE), (600.0, code_pool.FREE)):
        with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
            patch.setattr(code_pool, "MOMENT", patience)
            patch.setattr(code_pool, "PATIENCE", patience)
            given = {"folder": folder, "count": count}
            meets = [call.code("meet")] * (2 * code_pool.FREE)
            calls = [call.pool.call(code, given, "hermes_rl.plugins:identity", 60) for code in meets]
            assert len(set(await asyncio.gather(*calls))) == count


def test_call_returns_the_value_of_the_function(call: Caller) -> None:
    assert call("add", a=1, b=2) == 3
    assert call("later", a="x") == ["x"]
    assert call("sent", value={"text": "\ud800 ü", "data": b"\0\xff", "none": None}) == {
        "text": "\ud800 ü",
        "data": b"\0\xff",
        "none": None,
    }


def test_one_process_does_call_after_call(call: Caller) -> None:
    assert len({call("pid") for _ in range(5)}) == 1
    assert call("pid") != os.getpid()
    assert [call("count") for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("leave", [None, "task", "timer", "descriptor", "thread", "signal", "generator"])
def test_call_gets_the_event_loop_of_another_unless_something_is_left(call: Caller, leave: str | None) -> None:
    assert call("loop") == call("loop") == call("loop", leave=leave) == 0
    assert call("loop") == (0 if leave is None else 1)


def test_event_loop_serves_calls_after_one_that_raises(call: Caller) -> None:
    for leave, then in (("error", 0), ("exit", 1)):
        with pytest.raises(ForeignError):
            call("loop", leave=leave)
        assert call("loop") == then


async def test_short_calls_at_once_wait_for_a_few_processes(
    call: Caller, pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_pool, "PATIENCE", 30.0)
    calls = [pool.call(call.code("pid"), {}, "hermes_rl.plugins:identity", 60) for _ in range(10 * code_pool.FREE)]
    used = await asyncio.gather(*calls)
    assert len(set(used)) <= code_pool.FREE


def test_process_is_killed_before_the_runner_when_memory_is_exhausted(call: Caller) -> None:
    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert own < call("order") == OOM_EARLY < 1000


def test_all_processes_are_in_one_session_which_is_not_the_runners(call: Caller) -> None:
    with ThreadPoolExecutor(4) as threads:
        sessions = set(threads.map(lambda _: call("session"), range(8)))
    assert len(sessions) == 1 and os.getsid(0) not in sessions


def test_processes_have_distinct_random_numbers(call: Caller) -> None:
    with ThreadPoolExecutor(4) as threads:
        drawn = list(threads.map(lambda _: call("draw"), range(8)))
    assert len(set(drawn)) == 8


def test_it_is_where_the_runner_is(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "of the runner")
    assert call("place") == str(Path.cwd())
    monkeypatch.chdir(tmp_path)
    assert call("place") == str(tmp_path)
    assert call("variable", key="HF_HOME") == "of the runner"


def test_calls_work_after_the_initial_directory_is_removed(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    assert call("add", a=1, b=1) == 2
    (tmp_path / "gone").rmdir()
    assert call("add", a=1, b=2) == 3


def test_exception_is_reported_with_its_location(call: Caller) -> None:
    with pytest.raises(ForeignError, match=r"KeyError: 'column' at .*code.py:\d+"):
        call("raises")
    with pytest.raises(ForeignError, match="SystemExit: 3"):
        call("leaves")
    assert call("add", a=1, b=1) == 2


@pytest.mark.parametrize(
    ("which", "kind"),
    [("user", UserError), ("judge", JudgeFailure), ("sandbox", SandboxFailure)],
)
def test_infrastructure_exception_raised_by_user_code_is_only_a_claim(
    call: Caller, which: str, kind: type[Exception]
) -> None:
    with pytest.raises(ForeignError) as caught:
        call("of_ours", which=which)
    assert type(caught.value.claimed) is kind
    if isinstance(caught.value.claimed, SandboxFailure):
        assert caught.value.claimed.stop_reason is StopReason.SANDBOX_KILLED


def test_agent_fault_is_raised_unchanged(call: Caller) -> None:
    with pytest.raises(AgentFault, match="its doing"):
        call("of_ours", which="agent")


def test_what_cannot_be_carried_is_said_and_nothing_is_lost(call: Caller) -> None:
    with pytest.raises(NotCarriedError):
        call("sent", value=threading.Lock())
    with pytest.raises(ForeignError, match="TypeError"):
        call("object")
    with pytest.raises(EndedError, match="nests"):
        call("sent", value=load_object(f"{call.path}:nested")(100_000))
    with pytest.raises((ForeignError, EndedError)):
        call("nested", depth=100_000)
    assert call("add", a=1, b=1) == 2


def test_a_file_that_changes_stays_what_it_was(call: Caller, pool: ProcessPool, tmp_path: Path) -> None:
    first = call.code("add")
    assert play(pool, first, {"a": 2, "b": 3}) == 5
    call.path.write_text(CODE.replace("return a + b", "return a * b"))
    assert play(pool, first, {"a": 2, "b": 3}) == 5
    assert call("add", a=2, b=3) == 6
    late = Code.from_ref(f"{call.path}:sent")
    call.path.write_text(CODE + "\n# other")
    other = ProcessPool()
    with pytest.raises(UserError, match="was changed after the run had loaded it"):
        play(other, late, {"value": 1})
    other.close()


# ------------------------------------------------------------------------------------------------ What ends a call


@pytest.mark.parametrize("name", ["spins", "sleeps", "matches"])
def test_call_that_times_out_is_ended_and_the_next_one_works(call: Caller, name: str) -> None:
    call("pid")
    began = time.monotonic()
    with pytest.raises(OvertimeError, match=r"did not return within 0\.3 s"):
        call(name, timeout=0.3)
    assert time.monotonic() - began < 20
    assert call("add", a=1, b=1) == 2


def test_one_that_ends_its_process_costs_itself_alone(call: Caller) -> None:
    with pytest.raises(EndedError, match="ended its process with status 7"):
        call("exits")
    with pytest.raises(EndedError, match="signal 9"):
        call("killed")
    with pytest.raises(ForeignError, match="MemoryError"):
        call("eats")
    assert call("add", a=1, b=1) == 2


def test_what_it_prints_is_logged_in_part_and_a_flood_ends_it(call: Caller, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hermes_rl.user_code")
    assert call("prints", count=100_000) == 100_000
    assert "(100001 bytes in all)" in caplog.text
    assert len(caplog.text) < 10_000
    for name in ("floods", "logs_without_end"):
        with pytest.raises(EndedError, match="printed more than 16 MiB"):
            call(name)
    assert call("add", a=1, b=1) == 2


def test_log_line_of_a_call_has_one_logger_and_shows_control_characters(
    call: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    call("logs", logger="of.a.call\x1b[2J", text="\x1b]0;title\a")
    assert caplog.record_tuples == [
        ("hermes_rl.user_code.worker", logging.ERROR, r"of.a.call\u001b[2J: \u001b]0;title\u0007")
    ]
    assert "of.a" not in logging.root.manager.loggerDict


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\2{}",
        b"\0\0\0\3{x}",
        b"\0\0\0\2[]",
        b"\0\0\0\5false",
        b"\0\0\0\4\xff\xfe\xff\xfe",
        b'\0\0\0\x0f{"ask": "x\\ud8',
    ],
)
def test_whatever_it_says_is_its_own_failure(call: Caller, data: bytes) -> None:
    with pytest.raises(EndedError):
        call("says", data=data, timeout=1)
    with pytest.raises(EndedError, match="cannot be read"):
        call("lengths")
    assert call("add", a=1, b=1) == 2


def framed(content: Any) -> bytes:
    data = json.dumps(content).encode()
    return struct.pack("!I", len(data)) + data


def odd_values(random: random.Random, depth: int = 3) -> Any:
    """Return a JSON value of any kind."""
    leaves = [None, True, -1, 0, 1, 1 << 70, 1.5, math.inf, math.nan, "", "x" * 5_000, "\0bytes", "Ending"]
    kind = random.choice(("leaf", "leaf", "list", "object"))
    if not depth or kind == "leaf":
        return random.choice(leaves)
    values = [odd_values(random, depth - 1) for _ in range(random.randrange(4))]
    if kind == "list":
        return values
    keys = ("ask", "of", "method", "args", "kwargs", "log", "returned", "raised", "call", "secret", "not_carried",
            "ours", "text", "kinds", "errno", "stop_reason", "type", "value", "reason", "metrics", "overrides",
            "\0bytes",
            )  # fmt: skip
    return {random.choice(keys): value for value in values}


def odd_message(random: random.Random) -> dict[str, Any]:
    """Return the arguments of `writes` for a message, or a part of one, that no honest process sends."""
    value, number = odd_values(random), random.choice((0, 1, 7, -1, 1 << 40))
    reply = {"call": number, "secret": random.choice(("", "00" * 16, "ü"))}
    contents: list[Any] = [
        value, {"not_carried": "x"}, {"returned": {}}, {"returned": value}, {"raised": value}, {"log": value},
        {"log": ["x", number, "x"]}, {**reply, "returned": value}, {**reply, "raised": value},
        {"ask": number, "of": number, "method": "call", "args": [], "kwargs": {}},
        {"ask": value, "of": value, "method": value, "args": value, "kwargs": value},
    ]  # fmt: skip
    content, genuine = random.choice(contents), False
    raised = {"text": "x", "ours": ["SandboxFailure"], "stop_reason": value}
    if random.random() < 0.25:  # it has found the secret, and sends a second reply
        content, genuine = random.choice(({"returned": value}, {"raised": value}, {"raised": raised})), True
    data = json.dumps(content).encode() if genuine else framed(content)
    if not genuine and random.random() < 0.3:
        data = random.choice(
            (data[: random.randrange(len(data))], data * 3, b"\xff" * 9, data + b"\0\0\0\x05{", b"\0" * 4)
        )
    return {"data": data, "genuine": genuine, "waits": random.random() < 0.3, "stays": random.random() < 0.3}


@pytest.mark.generated
@pytest.mark.parametrize("own", [False, True])
def test_no_message_of_a_process_reaches_another_call_or_moves_code(
    call: Caller, pool: ProcessPool, own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)

    async def played() -> None:
        writes, add, pid = (call.code(name) for name in ("writes", "add", "pid"))
        first = random.SystemRandom().randrange(1 << 30)
        for seed in range(first, first + (250 if THOROUGH else 30)):
            arguments = odd_message(random.Random(seed))
            arguments["waits"] &= own  # else a thread of one call may write into that of another seed
            process: Any = await pool.hold(writes, add) if own else pool
            with contextlib.suppress(EndedError, ForeignError, HermesRLError):
                await process.call(writes, arguments, "hermes_rl.plugins:identity", 0.5)
            for number in range(2):
                # A call that knows the secret may reply and work on, or send a second reply, which is refused as late.
                late = own or (arguments["genuine"] and number == 0)
                with contextlib.suppress(*([EndedError] if late else [])):
                    sums = await process.call(
                        add, {"a": seed, "b": number}, "hermes_rl.plugins:identity", 1 if late else 60
                    )
                    assert sums == seed + number, (seed, arguments)
            if own:
                await process.close()
        assert await pool.call(pid, {}, "hermes_rl.plugins:identity", 60) != os.getpid()
        await require_all_slots_free(call)

    asyncio.run(played())


def test_only_the_process_itself_replies_where_a_call_has_forked(call: Caller) -> None:
    for _ in range(5):
        word, child = call("twice")
        assert (word, child > 0) == ("fork", True)
        until_gone(child)
        assert call("fork_that_raises") == "the parent"
        assert call("fork_that_asks") == "the parent"
        assert call("add", a=1, b=1) == 2


def test_argument_that_cannot_be_unpickled_is_an_error_of_its_call(call: Caller) -> None:
    stubborn = load_object(f"{call.path}:Stubborn")()
    with pytest.raises(ForeignError, match=r"cannot be unpickled in another process .*only here.*isolate: none"):
        call("sent", value=stubborn)
    assert call("add", a=1, b=1) == 2


async def test_a_class_of_one_file_is_known_to_code_of_another(pool: ProcessPool, tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text("class World:\n    n = 7\n")
    other = Caller(pool, tmp_path / "rewards.py", "def counted(world): return world.n\ndef first(): return 1\n")
    await pool.call(other.code("first"), {}, "hermes_rl.plugins:identity", 60)
    world = load_object(f"{tmp_path}/world.py:World")()
    assert await pool.call(other.code("counted"), {"world": world}, "hermes_rl.plugins:identity", 60) == 7


async def test_cancelled_call_is_ended(call: Caller, pool: ProcessPool) -> None:
    async def begun(name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(pool.call(call.code(name), {}, "hermes_rl.plugins:identity", 60))
        await asyncio.sleep(0.5)
        return task

    pid = await pool.call(call.code("pid"), {}, "hermes_rl.plugins:identity", 60)
    task = await begun("sleeps")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(until_gone, pid)
    assert await pool.call(call.code("add"), {"a": 1, "b": 1}, "hermes_rl.plugins:identity", 60) == 2
    await require_all_slots_free(call)


def test_what_a_call_has_started_ends_with_its_process(call: Caller, pool: ProcessPool) -> None:
    child = call("starts")
    os.kill(child, 0)
    pool.close()
    until_gone(child)


@pytest.mark.parametrize("double", [False, True])
async def test_a_session_that_a_call_has_started_ends_with_its_process(
    call: Caller, pool: ProcessPool, double: bool
) -> None:
    code = call.code("starts_a_session")
    other = await pool.hold(code)
    kept = await other.call(code, {"double": double}, "hermes_rl.plugins:identity", 60)
    process = await pool.hold(code)
    child = await process.call(code, {"double": double}, "hermes_rl.plugins:identity", 60)
    os.kill(child, 0)
    await process.close()
    await asyncio.to_thread(until_gone, child)
    os.kill(kept, 0)  # that of another process, which is at work
    await other.close()
    await asyncio.to_thread(until_gone, kept)


async def test_session_ends_if_its_process_died_while_other_code_loaded(
    call: Caller, pool: ProcessPool, tmp_path: Path
) -> None:
    code = call.code("starts_a_session")
    process = await pool.hold(code)
    child = await process.call(code, {"double": False}, "hermes_rl.plugins:identity", 60)
    slow = Caller(
        pool,
        tmp_path / "slow.py",
        "from pathlib import Path\nfrom time import sleep\ndef first(): return 1\n"
        "def wait():\n here = Path(__file__).parent\n (here / 'loading').touch()\n"
        " while not (here / 'ended').exists(): sleep(0.01)\nfirst.prepare = wait\n",
    )
    loads = asyncio.create_task(pool.call(slow.code("first"), {}, "hermes_rl.plugins:identity", 60))
    await until((tmp_path / "loading").exists)
    worker = parent_of(child)
    os.kill(worker, signal.SIGKILL)
    await until(lambda: parent_of(child) != worker)
    (tmp_path / "ended").touch()
    assert await loads == 1
    await process.close()
    await asyncio.to_thread(until_gone, child)


DAEMON = """
import os, signal, subprocess, sys
CODE = "import subprocess; print(subprocess.Popen(['sleep', '777.0625'], stdout=-3).pid, flush=True); input()"
between = subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
daemon = int(between.stdout.readline())

def pids(): return [between.pid, daemon]
def orphans():
    os.kill(between.pid, signal.SIGKILL)
    return daemon
"""


async def test_what_a_module_has_started_while_it_was_loaded_outlives_a_call(pool: ProcessPool, tmp_path: Path) -> None:
    """Its parent may end later, and the template process is its parent from then on."""
    call = Caller(pool, tmp_path / "code.py", DAEMON)
    process = await pool.hold(call.code("pids"))
    between, daemon = await process.call(call.code("pids"), {}, "hermes_rl.plugins:identity", 60)
    try:
        assert await process.call(call.code("orphans"), {}, "hermes_rl.plugins:identity", 60) == daemon
        await process.close()  # by then the template has looked for what the process has left behind
        await asyncio.to_thread(until_gone, between)
        assert alive(daemon)
    finally:
        os.kill(daemon, signal.SIGKILL)


TEMPLATE = """
import os, sys
from hermes_rl.user_code import process
process.REAP_SECONDS = 0.01
process.main(int(sys.argv[1]), lambda *_: os.posix_spawnp("sleep", ["sleep", "777.375"], os.environ))
"""


def test_child_that_does_not_end_blocks_its_parent_only_briefly() -> None:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-c", TEMPLATE, str(theirs.fileno())]
        template = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def ask(**request: Any) -> Any:
        control.send(json.dumps(request).encode())
        return json.loads(control.recv(1 << 16))

    with template, control:
        stays, ends = (ask(do="fork")["pid"] for _ in range(2))
        assert ask(do="bury", pid=stays) == {"status": signal.SIGKILL}
        os.kill(ends, signal.SIGTERM)
        until_gone(ends)
        assert ask(do="bury", pid=ends) == {"status": signal.SIGTERM}
        assert ask(do="bury", pid=ends) == {"status": signal.SIGKILL}, "nobody is there"
        control.close()
        assert template.wait(60) == 0
    assert alive(stays), "the template no longer waited for it"
    os.kill(stays, signal.SIGKILL)


def until_gone(pid: int) -> None:
    until_blocking(lambda: not alive(pid))


def test_many_at_once_wait_for_each_other_or_get_processes(call: Caller) -> None:
    with ThreadPoolExecutor(32) as threads:
        assert list(threads.map(lambda n: call("sleeps", seconds=n / 1000), range(32))) == [n / 1000 for n in range(32)]


def test_cancelled_calls_lose_no_pool_slots(call: Caller, pool: ProcessPool) -> None:
    async def some(seed: int) -> None:
        chance = random.Random(seed)
        given = {"seconds": 0.002}
        tasks = [
            asyncio.create_task(pool.call(call.code("sleeps"), given, "hermes_rl.plugins:identity", 60))
            for _ in range(100)
        ]
        for task in chance.sample(tasks, 50):
            await asyncio.sleep(chance.random() / 500)
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(value == 0.002 or isinstance(value, asyncio.CancelledError) for value in ended), ended

    with contextlib.ExitStack() as stack:
        loops = [stack.enter_context(asyncio.Runner()) for _ in range(6)]
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda loop, seed: loop.run(some(seed)), loops, range(6)))
        for loop in loops:
            loop.run(require_all_slots_free(call))
    assert call("add", a=1, b=1) == 2


def test_processes_end_with_the_runner_even_if_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    program = f"""
    import asyncio
    from hermes_rl.user_code.pool import POOL
    from hermes_rl.plugins import Code
    code = Code.from_ref({str(tmp_path / "code.py")!r} + ":pid")
    def call(code):
        return asyncio.run(POOL.call(code, {{}}, "hermes_rl.plugins:identity", 60))
    print(call(code), flush=True)
    call(Code.from_ref({str(tmp_path / "code.py")!r} + ":spins"))
    """
    runner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    worker = int(runner.stdout.readline())
    warm = parent_of(worker)
    runner.send_signal(signal.SIGKILL)
    runner.communicate()
    until_gone(worker)
    until_gone(warm)


def test_lost_warm_process_is_replaced(call: Caller) -> None:
    warm = parent_of(call("pid"))
    os.kill(warm, signal.SIGKILL)
    until_gone(warm)
    try:
        assert call("add", a=1, b=1) == 2
    except RewardFailure:  # it was seen by this call, and the next one begins anew
        assert call("add", a=1, b=1) == 2


@pytest.mark.parametrize("lost", [False, True])
def test_nothing_stays_open(call: Caller, pool: ProcessPool, tmp_path: Path, lost: bool) -> None:
    (tmp_path / "met").mkdir()
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with ThreadPoolExecutor(4) as threads:
        pids = list(threads.map(lambda _: call("meet", folder=str(tmp_path / "met"), count=4), range(4)))
    assert len(set(pids)) == 4 and all(map(alive, pids))
    assert len(list(Path("/proc/self/fd").iterdir())) > before
    if lost:
        os.kill(parent_of(pids[0]), signal.SIGKILL)
    pool.close()
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.slow
def test_time_in_which_others_compute_is_not_a_calls_own() -> None:
    commands = ["sleep 60", *("while :; do :; done" for _ in range(6 * len(os.sched_getaffinity(0))))]
    started = [subprocess.Popen(["sh", "-c", command]) for command in commands]
    try:
        sleeping, computing = (_Clock(process.pid) for process in started[:2])
        for clock in (sleeping, computing):
            clock.used()
            clock.start()
        until_blocking(lambda: sleeping.used() > 1.5)
        # The first look is late, as that of a runner without a core is.
        assert computing.used() < 0.7 * sleeping.used()
    finally:
        for process in started:
            process.kill()
            process.wait()


# -------------------------------------------------------------------------------- What lives in the runner is asked for


@lives_in_runner("hermes_rl.user_code.proxies:ObjectProxy")
class Shelf:
    """Has books."""

    def __init__(self) -> None:
        self.books: list[str] = []
        self.waiting = threading.Event()
        self.loop: Any = None
        self.most, self._now, self._lock = 0, 0, threading.Lock()

    def stand_in_fields(self) -> dict[str, Any]:
        return {}

    def put(self, book: str) -> int:
        self.books.append(book)
        return len(self.books)

    def slow(self) -> int:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.2)
        with self._lock:
            self._now -= 1
        return 1

    @contextmanager
    def opened(self) -> Iterator[Shelf]:
        self.books.append("opened")
        yield self
        self.books.append("closed")

    async def thread(self, seconds: float) -> int:
        if seconds < 0:
            raise FileNotFoundError(2, "No such time", "x")
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(seconds)
        self._now -= 1
        return threading.get_ident()

    def missing(self) -> None:
        raise FileNotFoundError(2, "No such file", "x")

    def large(self, size: int) -> bytes:
        return bytes(size)

    def odd(self) -> Any:
        return (book for book in self.books)

    def until_it_waits(self) -> None:
        self.waiting.wait()

    def waits(self) -> None:
        self.waiting.set()
        try:
            wait_for_loop(asyncio.sleep(1000), self.loop)
        finally:
            self.books.append("given up")

    def lost(self) -> None:
        raise SandboxFailure("the shelf is lost")


ASKING = """
import concurrent.futures
def puts(shelf): return [shelf.put("a"), shelf.put("b")]
def parallel(shelf):
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        return sum(threads.map(lambda _: shelf.slow(), range(4)))
def leaves_it_open(shelf):
    shelf._ask("opened")
    return 1
def ends_within(shelf):
    import os
    shelf._ask("opened").put("a")
    os._exit(3)
async def awaits(shelf):
    import asyncio
    threads = await asyncio.gather(*(shelf._ask_here("thread", 0.1) for _ in range(20)))
    try:
        await shelf._ask_here("thread", -1)
    except FileNotFoundError as error:
        return [*set(threads), error.strerror]
def asks_later(shelf):
    import os, threading
    threading.Timer(0.2, lambda: shelf.put("late")).start()
    return os.getpid()
def works(seconds):
    import os, time
    time.sleep(seconds)
    return os.getpid()
def many(shelf, count):
    from hermes_rl.user_code.process import current_runner
    open = [current_runner().ask(shelf._object_id, "slow") for _ in range(count)]
    return sum(each.result() for each in open)
def large(shelf, size): return len(shelf.large(size))
def fails(shelf):
    try:
        shelf.missing()
    except FileNotFoundError as error:
        return [error.errno, error.strerror]
def returns_while_it_asks(shelf, how):
    from hermes_rl.user_code.process import current_runner
    open = [current_runner().ask(shelf._object_id, "waits"), current_runner().ask(shelf._object_id, "thread", 1000)]
    current_runner().ask(shelf._object_id, "until_it_waits").result()
    if how == "ends": os._exit(3)
    return 1
import os
def loses(shelf, text):
    from hermes_rl.errors import SandboxFailure
    try:
        shelf.lost()
    except SandboxFailure as error:
        raise SandboxFailure(text or str(error))
def forbidden(shelf):
    said = []
    for name in ("_lock", "books", "nothing", "odd"):
        try:
            shelf._ask(name)
        except Exception as error:
            said.append(type(error).__name__)
    return said
"""


def test_objects_of_the_runner_are_asked_by_their_public_methods(pool: ProcessPool, tmp_path: Path) -> None:
    call, shelf = Caller(pool, tmp_path / "asking.py", ASKING), Shelf()
    assert call("puts", shelf=shelf) == [1, 2]
    assert shelf.books == ["a", "b"]
    assert call("parallel", shelf=shelf) == 4
    assert shelf.most > 1, "questions are answered side by side"
    assert call("fails", shelf=shelf) == [2, "No such file"]
    assert call("forbidden", shelf=shelf) == [*["AttributeError"] * 3, "NotCarriedError"]


def test_questions_have_places_and_answers_a_largest_size(pool: ProcessPool, tmp_path: Path) -> None:
    call, shelf = Caller(pool, tmp_path / "asking.py", ASKING), Shelf()
    assert call("many", shelf=shelf, count=AT_ONCE + 4) == AT_ONCE + 4
    assert shelf.most <= AT_ONCE, "each answer may take as much memory as a file"
    assert call("large", shelf=shelf, size=LARGEST - 1000) == LARGEST - 1000
    with pytest.raises(ForeignError, match="an answer of 64 MiB; at most 64 are carried"):
        call("large", shelf=shelf, size=LARGEST)


def test_failure_that_the_runner_has_sent_passes_and_another_is_a_claim(pool: ProcessPool, tmp_path: Path) -> None:
    call, shelf = Caller(pool, tmp_path / "asking.py", ASKING), Shelf()
    with pytest.raises(SandboxFailure, match="the shelf is lost"):
        call("loses", shelf=shelf, text="")
    with pytest.raises(ForeignError, match="SandboxFailure: another one"):
        call("loses", shelf=shelf, text="another one")


def test_a_coroutine_is_awaited_on_the_loop_of_the_call(pool: ProcessPool, tmp_path: Path) -> None:
    call, shelf = Caller(pool, tmp_path / "asking.py", ASKING), Shelf()
    assert call("awaits", shelf=shelf) == [threading.get_ident(), "No such time"]
    assert shelf.most > 1, "they were awaited side by side"


def test_what_a_call_has_entered_is_left_when_it_ends(pool: ProcessPool, tmp_path: Path) -> None:
    call, shelf = Caller(pool, tmp_path / "asking.py", ASKING), Shelf()
    assert call("leaves_it_open", shelf=shelf) == 1
    assert shelf.books == ["opened", "closed"]
    with pytest.raises(EndedError, match="ended its process with status 3"):
        call("ends_within", shelf=shelf)
    assert shelf.books[2:] == ["opened", "a", "closed"]


@pytest.mark.parametrize("how", ["returns", "ends"])
async def test_open_question_is_cancelled_when_its_call_ends(pool: ProcessPool, tmp_path: Path, how: str) -> None:
    """The call says how long a question may take, so it must not hold up the runner after its end."""
    call, shelf = Caller(pool, tmp_path / "asking.py", ASKING), Shelf()
    shelf.loop = asyncio.get_running_loop()
    code = call.code("returns_while_it_asks")
    with contextlib.suppress(EndedError):
        await pool.call(code, {"shelf": shelf, "how": how}, "hermes_rl.plugins:identity", 60)
    assert shelf.books == ["given up"]


def test_thread_left_by_a_call_may_ask_during_the_next_one(pool: ProcessPool, tmp_path: Path) -> None:
    call, shelf = Caller(pool, tmp_path / "asking.py", ASKING), Shelf()
    for name in ("asks_later", "works"):
        pool.load(call.code(name))
    pids = [call("asks_later", shelf=shelf), call("works", seconds=0.6), call("works", seconds=0)]
    assert len(set(pids)) == 1, "one process did them all"
    assert call("puts", shelf=shelf) == [1, 2], "the late question was not about this call's objects"
