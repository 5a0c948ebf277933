"""Processes start as forks of a loaded one, take over what their client says and nothing else, and end with it."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.runs.handles import PRELOAD
from hermes_rl.user_code.fork_server import ForkServer, StartedProcess
from hermes_rl.user_code.worker import MODULES
from tests.commands import ROOT
from tests.forked import ODD_MESSAGES, occurrences
from tests.http_servers import Handler, serving
from tests.runs.processes import alive, parent_of

SECONDS = 60.0


class Starter:
    """Starts functions of `tests.forked` and reads what they tell."""

    def __init__(self, server: ForkServer) -> None:
        self.server = server
        self.server_pid = 0
        """Parent of the last process that was started."""
        self.processes: list[StartedProcess] = []

    def __call__(self, function: str, *descriptors: int, **options: Any) -> tuple[StartedProcess, Callable[[], Any]]:
        reader, writer = os.pipe()
        try:
            process = self.server.start(f"tests.forked:{function}", writer, *descriptors, name="forked", **options)
        finally:
            os.close(writer)
        self.processes.append(process)
        self.server_pid = parent_of(process.pid)
        file = os.fdopen(reader, "rb")

        def told() -> Any:
            assert select.select([file], [], [], SECONDS)[0], f"{function} tells nothing"
            line = file.readline()
            return json.loads(line) if line else None

        return process, told


@pytest.fixture
def start() -> Iterator[Starter]:
    starter = Starter(ForkServer())
    yield starter
    for process in starter.processes:
        process.release()
    starter.server.close()


def wait_until_gone(*pids: int) -> None:
    """Wait until processes that are no children of this one have ended."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([descriptor], [], [], SECONDS)[0], f"process {pid} is still there"
        finally:
            os.close(descriptor)


def test_fork_server_has_no_variables_threads_or_inherited_descriptors(start: Starter) -> None:
    start("describe")[0].wait(SECONDS)
    process = Path(f"/proc/{start.server_pid}")
    assert (process / "environ").read_bytes() == b""
    assert len(list((process / "task").iterdir())) == 1
    # Its three standard streams, both ends of its own pipe, its client and the child that is not released.
    assert len(list((process / "fd").iterdir())) == 7
    start.processes.pop().release()
    start("describe")[0].wait(SECONDS)
    assert len(list((process / "fd").iterdir())) == 7


@pytest.mark.parametrize("modules", [("hermes_rl.user_code.process", *MODULES), ("hermes_rl.runs.worker", *PRELOAD)])
def test_preloaded_modules_read_no_variables_and_start_no_threads(modules: tuple[str, ...]) -> None:
    """A child would keep what was read in the empty environment of the server, not what its client has."""
    code = f"""
import importlib, json, os
class Recorded(dict):
    read = set()
    def __getitem__(self, key): self.read.add(key); return super().__getitem__(key)
    def get(self, key, default=None): self.read.add(key); return super().get(key, default)
    def __contains__(self, key): self.read.add(key); return super().__contains__(key)
os.environ = Recorded(os.environ)
os.getenv = os.environ.get
for name in {modules!r}: importlib.import_module(name)
print(json.dumps([sorted(Recorded.read), len(os.listdir("/proc/self/task"))]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    read, threads = json.loads(done.stdout)
    assert read == sorted(HARMLESS & set(read))
    assert threads == 1


HARMLESS = {
    # Whether packages use their compiled parts, and where Python itself lies.
    *(f"{package}_NO_EXTENSIONS" for package in ("AIOHTTP", "FROZENLIST", "MULTIDICT", "PROPCACHE", "YARL")),
    *("HOME", "PYTHONTZPATH", "PYTHONUSERBASE", "_PYTHON_PROJECT_BASE", "_PYTHON_SYSCONFIGDATA_NAME"),
    *("AIOHTTP_NOSENDFILE", "PYTHONASYNCIODEBUG"),
    "SSLKEYLOGFILE",  # of a TLS context that is not used: see the test below
}
"""Variables that a preloaded module may read when it is imported."""


class Models(Handler):
    def do_GET(self) -> None:  # noqa: N802 - the name is that of http.server
        self.answer({})


def test_child_trusts_the_ssl_certificates_named_by_its_variables(start: Starter, tmp_path: Path) -> None:
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *files, *names]
    subprocess.run(make, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    server = ThreadingHTTPServer(("localhost", 0), Models)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with serving(server):
        environ = {"SERVER": f"https://localhost:{server.server_port}/v1"}
        assert start("ask_model_server", environ=environ)[1]() == 0
        trusting = {**environ, "SSL_CERT_FILE": str(tmp_path / "cert.pem")}
        assert start("ask_model_server", environ=trusting)[1]() == 200


def test_child_takes_over_variables_directory_path_and_limits(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("describe")[0].wait(SECONDS)  # all that follows is changed after the server has started
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHANGED_LATER", "surrogate \udcff")
    monkeypatch.syspath_prepend(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        process, told = start("describe")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    child = told()
    assert child["variables"] == dict(os.environ)
    assert child["directory"] == str(tmp_path)
    assert child["path"] == sys.path
    assert child["files"] == [soft - 1, hard]
    assert child["cores"] == sorted(os.sched_getaffinity(0))
    assert child["name"] == "forked"
    assert parent_of(child["parent"]) == os.getpid(), "its parent is the server, which is a child of this process"
    assert child["session"] == process.pid
    assert child["threads"] == 1
    assert len(child["descriptors"]) == 6, "streams, the given one, the closed connection, and the listing itself"
    assert process.wait(SECONDS) == 0


def test_child_has_only_the_variables_that_it_is_given(start: Starter) -> None:
    assert start("describe", environ={"ONLY": "this"})[1]()["variables"] == {"ONLY": "this"}


def test_child_starts_in_root_when_directory_is_removed(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    assert start("describe")[1]()["directory"] == "/"


def test_secrets_reach_neither_the_server_nor_children_without_them(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = f"secret-{os.urandom(20).hex()}"
    monkeypatch.setenv("API_KEY", secret)
    with_secret, told = start("wait")
    told()
    assert occurrences(with_secret.pid, secret.encode()) > 0
    # The text that is sought must not lie in memory because it is sought.
    sought = {"SOUGHT_REVERSED": secret.encode()[::-1].hex()}
    assert start("find_in_memory", environ=sought)[1]() <= 2, "what it builds to compare with"
    assert occurrences(start.server_pid, secret.encode()) == 0
    for pid in (start.server_pid, with_secret.pid):
        assert secret.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


def test_children_draw_different_random_numbers(start: Starter) -> None:
    children = [start("draw", preload=("numpy.random",)) for _ in range(3)]
    drawn = [number for _, told in children for number in told()]
    assert len(set(drawn)) == 6


@pytest.mark.parametrize(
    ("function", "status"), [("exit_with_7", 7), ("raise_error", 1), ("kill_itself", -signal.SIGTERM), ("describe", 0)]
)
def test_exit_status_reaches_client(start: Starter, function: str, status: int) -> None:
    process, _ = start(function)
    assert process.wait(SECONDS) == status
    assert process.poll() == status


async def test_end_is_awaited_on_event_loop(start: Starter) -> None:
    process, told = start("wait")
    assert told() == process.pid
    assert process.poll() is None
    with pytest.raises(TimeoutError):
        process.wait(0.0)
    process.kill()
    assert await process.ended() == -signal.SIGKILL


def test_released_child_is_ended(start: Starter) -> None:
    process, told = start("wait")
    told()
    process.release()
    wait_until_gone(process.pid)


def test_killed_child_leaves_the_others_and_nothing_of_itself(start: Starter) -> None:
    (killed, told), (other, other_told) = start("wait"), start("wait")
    assert (told(), other_told()) == (killed.pid, other.pid)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait(SECONDS) == -signal.SIGKILL
    killed.release()
    start("describe")[0].wait(SECONDS)  # the server has looked at the release before
    assert not Path(f"/proc/{killed.pid}").exists()
    assert other.poll() is None
    assert alive(other.pid)


@pytest.mark.parametrize("number", range(len(ODD_MESSAGES) + 1))
def test_code_that_writes_into_its_sockets_ends_no_other_process(start: Starter, number: int) -> None:
    waits, told = start("wait")
    told()
    server = start.server_pid
    environ = {"NUMBER": str(number), "PATH": os.environ["PATH"]}
    assert start("write_into_sockets", may_start=True, environ=environ)[1]() == "written"
    assert start("describe")[1]()["parent"] == server
    assert waits.poll() is None


def test_killed_server_takes_its_children_along_and_is_replaced(start: Starter) -> None:
    children = [start("wait") for _ in range(3)]
    for _, told in children:
        told()
    killed = start.server_pid
    os.kill(killed, signal.SIGKILL)
    wait_until_gone(*(process.pid for process, _ in children))
    assert [process.wait(SECONDS) for process, _ in children] == [-signal.SIGKILL] * 3
    assert start("describe")[1]()["parent"] not in (killed, os.getpid())


CLIENT = """
import os, sys
from hermes_rl.user_code.fork_server import FORK_SERVER
reader, writer = os.pipe()
kept, given = os.pipe()
started = [FORK_SERVER.start("tests.forked:wait", writer, name="forked"),
           FORK_SERVER.start("tests.forked:clean_up", int(sys.argv[1]), kept, name="forked", linger=float(sys.argv[2]))]
print(*(process.pid for process in started), flush=True)
os.close(kept)
sys.stdin.read()
"""


@pytest.mark.parametrize("linger", [1.0, 0.0])
def test_killed_client_leaves_nothing(linger: float) -> None:
    reader, writer = os.pipe()
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(writer), str(linger)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[writer], cwd=ROOT,
    )  # fmt: skip
    os.close(writer)
    with client, os.fdopen(reader) as told:
        assert client.stdout is not None
        waits, cleans_up = map(int, client.stdout.readline().split())
        server = parent_of(waits)
        assert told.readline().strip() == str(cleans_up)
        client.kill()
        wait_until_gone(server, waits, cleans_up)
        if linger:
            assert told.read().strip() == '"cleaned up"'


@pytest.mark.slow
def test_200_children_run_at_once(start: Starter) -> None:
    children = [start("wait") for _ in range(200)]
    assert [told() for _, told in children] == [process.pid for process, _ in children]
    server = start.server_pid
    for process, _ in children[::2]:
        process.kill()
    for process, _ in children[1::2]:
        assert process.poll() is None
        process.release()
    assert {process.wait(SECONDS) for process, _ in children[::2]} == {-signal.SIGKILL}
    wait_until_gone(*(process.pid for process, _ in children[1::2]))
    assert start("describe")[1]()["parent"] == server


def test_server_without_descriptors_refuses_and_keeps_its_children(start: Starter) -> None:
    process, told = start("wait")
    told()
    server = start.server_pid
    resource.prlimit(server, resource.RLIMIT_NOFILE, (3, 3))
    assert start("describe")[1]()["parent"] != server
    assert process.poll() is None
    assert alive(process.pid)
    process.release()
    wait_until_gone(process.pid, server)


def test_fork_of_client_shares_the_server_and_leaves_its_processes_alone(start: Starter) -> None:
    process, told = start("wait")
    told()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            start.server.forget()
            told_in_fork = start("describe")[1]()
            os.write(writer, json.dumps(told_in_fork["parent"]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read() == str(start.server_pid)
    os.waitpid(pid, 0)
    assert process.poll() is None
    assert alive(process.pid)


def test_child_is_a_new_interpreter_on_platforms_without_a_fork_server(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    process, told = start("describe", environ={**os.environ, "GIVEN": "yes"})
    monkeypatch.undo()
    child = told()
    assert child["variables"]["GIVEN"] == "yes"
    assert child["parent"] == os.getpid()
    assert process.wait(SECONDS) == 0
    process, told = start("exit_with_7")
    assert process.wait(SECONDS) == 7


def test_fresh_interpreter_starts_when_server_cannot(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that only a variable finds cannot be imported in the empty environment of the server."""
    (tmp_path / "needs_variable.py").write_text(
        "import os; os.environ['LIBRARY']\ndef run(output): os.write(output, b'1')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LIBRARY", "here")
    reader, writer = os.pipe()
    process = start.server.start("needs_variable:run", writer, name="forked")
    start.processes.append(process)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert file.read() == b"1"
    assert process.wait(SECONDS) == 0


def test_no_descriptor_stays_open(start: Starter) -> None:
    start("describe")[0].wait(SECONDS)
    start.processes.pop().release()
    before = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (os.getpid(), start.server_pid)]
    for _ in range(20):
        process, told = start("exit_with_7")
        assert told() is None
        process.wait(SECONDS)
        start.processes.pop().release()
        told.__closure__[0].cell_contents.close()  # type: ignore[index]
    start("describe")[0].wait(SECONDS)  # the server has looked at all releases before
    start.processes.pop().release()
    after = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (os.getpid(), start.server_pid)]
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 1
