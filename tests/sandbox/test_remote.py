"""Machines of hermes-agent's backends: a real sshd on loopback does what every sandbox does, as far as it can."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import inspect
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hermes_rl.errors import SandboxFailure, UserError
from hermes_rl.sandbox import remote
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import MARK, ResourceLimits, Sandbox, SandboxConfig
from hermes_rl.sandbox.helper_system import children
from hermes_rl.sandbox.remote import NAMES, RemoteSandbox, machine, missing, parts
from hermes_rl.sandbox.remote_worker import BASE, CLASSES, bound_outputs
from hermes_rl.stop_reasons import StopReason
from tests.sandbox import test_background, test_commands, test_sandbox_files
from tests.waiting import until, until_blocking

ELSEWHERE = {"test_kill_all_ends_daemons_and_keeps_files"}
"""Asks with `kill -0`, which finds a dead process that the machine's first process has not buried."""


def asked_of_every_sandbox(module: ModuleType) -> dict[str, Callable[[Sandbox], Awaitable[None]]]:
    return {
        name: test
        for name, test in vars(module).items()
        if name.startswith("test_")
        and name not in ELSEWHERE
        and list(inspect.signature(test).parameters) == ["sandbox"]
        and not name.startswith("test_closing_the_sandbox")
    }


@pytest.mark.slow
@pytest.mark.by_turns(2)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("module", [test_commands, test_background, test_sandbox_files])
async def test_what_is_asked_of_every_sandbox(module: ModuleType, ssh: SandboxConfig) -> None:
    tests = asked_of_every_sandbox(module)
    assert len(tests) > 5
    async with create_sandbox(ssh) as sandbox:
        for test in tests.values():
            await sandbox.remove(sandbox.workdir)
            await sandbox.make_dir(sandbox.workdir)
            await test(sandbox)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_files_of_the_kernel_are_refused_over_ssh(ssh: SandboxConfig) -> None:
    async with create_sandbox(ssh) as sandbox:
        few = test_sandbox_files.KERNEL_PATHS[::4]  # a call takes half a second
        await test_sandbox_files.test_files_of_the_kernel_are_refused(sandbox, few)


@pytest.mark.slow
async def test_life_over_ssh(ssh: SandboxConfig) -> None:
    async with create_sandbox(ssh) as sandbox:
        await sandbox.write_file("new\nline \udcff", b"x")
        assert [info.name for info in await sandbox.list_dir(".")] == ["new\nline \udcff"]
        await sandbox.run("setsid sh -c 'echo $$ > daemon; exec sleep 600' >/dev/null 2>&1 &")
        await sandbox.run("until [ -s daemon ]; do sleep 0.05; done", timeout=30)
        daemon = int(await sandbox.read_file("daemon"))
        await sandbox.kill_all()
        assert over(daemon)
        left = await sandbox.spawn("sleep 600")
        with pytest.raises(UserError, match="conversation"):
            await sandbox.converse(["cat"])
    assert left.poll() is not None
    assert not Path(sandbox.home).exists()
    with pytest.raises(SandboxFailure):
        await sandbox.run("true")


@pytest.mark.slow
async def test_lifetime_while_a_command_runs_is_the_agents_over_ssh(ssh: SandboxConfig) -> None:
    async with create_sandbox(replace(ssh, lifetime=2)) as sandbox:
        with pytest.raises(SandboxFailure, match=r"lifetime of 2 s is over") as caught:
            await sandbox.run(f"echo $$ > /tmp/{sandbox.id}; exec sleep 600")
        assert caught.value.stop_reason is StopReason.SANDBOX_KILLED
        assert not sandbox.alive
        with pytest.raises(SandboxFailure, match="lifetime"):
            await sandbox.read_file("anything")
    record = Path("/tmp", sandbox.id)
    assert over(int(record.read_text()))
    record.unlink()
    assert not Path(sandbox.home).exists()


@pytest.mark.slow
async def test_expired_idle_ssh_sandbox_is_an_infrastructure_failure(ssh: SandboxConfig) -> None:
    async with create_sandbox(replace(ssh, lifetime=0.1)) as sandbox:
        await until(lambda: not sandbox.alive)
        with pytest.raises(SandboxFailure, match="lifetime") as caught:
            await sandbox.run("true")
        assert caught.value.stop_reason is StopReason.SANDBOX_FAILURE


@pytest.mark.parametrize(("shared", "blamed"), [(False, StopReason.SANDBOX_KILLED), (True, StopReason.SANDBOX_FAILURE)])
@pytest.mark.parametrize("answered", ["command not found", "MARK(!4711 x)MARK", "MARK(nonsense)MARK"])
async def test_missing_response_is_caused_by_the_agent_on_an_unshared_account(
    answered: str, shared: bool, blamed: StopReason
) -> None:
    class Answers:
        """A link to a machine whose programs say something of their own once they are not `honest`."""

        open = True
        honest = False

        async def start(self, *_: object) -> None: ...

        async def execute(self, asked: str, *_: object) -> str:
            return ("MARK(L2hvbWU=)MARK" if self.honest else answered).replace("MARK", mark_of(asked))

        async def close(self) -> None: ...

    for exposed, stop_reason in ((False, StopReason.SANDBOX_FAILURE), (True, blamed)):
        link = Answers()
        sandbox, link.honest = sandbox_of(link), exposed
        sandbox.machine = replace(sandbox.machine, shared=shared)
        with pytest.raises(SandboxFailure, match="answer") as caught:
            await sandbox.start()
            link.honest = False
            await sandbox.stat("file")
        assert not link.honest, "it has started where agents may have been"
        assert (caught.value.stop_reason, sandbox.killed_by_agent) == (
            stop_reason,
            stop_reason is StopReason.SANDBOX_KILLED,
        )


def mark_of(asked: str) -> str:
    """The mark that a script is to put around its answer."""
    return base64.b64decode(asked.split()[3]).decode().partition("mark=")[2].partition("\n")[0]


def sandbox_of(link: object, **settings: Any) -> RemoteSandbox:
    """A sandbox that is not started, with this link."""
    address = {"TERMINAL_SSH_HOST": "host", "TERMINAL_SSH_USER": "user"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "Link", lambda: link)
        return RemoteSandbox(SandboxConfig(backend="ssh", network=True, environ=address, **settings))


@pytest.mark.slow
async def test_closing_ends_what_still_runs_there(ssh: SandboxConfig) -> None:
    async with create_sandbox(ssh) as sandbox:
        running = asyncio.create_task(sandbox.run("echo $$ > pid; exec sleep 600"))
        await until(lambda: Path(sandbox.home, "pid").exists() and Path(sandbox.home, "pid").read_text())
        pid = int(Path(sandbox.home, "pid").read_text())
    assert over(pid)
    assert not Path(sandbox.home).exists()
    with pytest.raises(SandboxFailure):
        await running


@pytest.mark.slow
async def test_a_machine_that_floods_fills_no_memory(ssh: SandboxConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the way of an answer is the machine's, and so the agent's: it may send anything."""
    link = remote.Link()
    monkeypatch.setattr(remote, "Link", lambda: link)
    async with create_sandbox(ssh) as sandbox:
        before = peak(worker()), peak(os.getpid())
        with pytest.raises(SandboxFailure, match="more than the 1000 characters"):
            await link.execute("head -c 300000000 /dev/zero | tr '\\0' y", None, 60, 1000)
        after = peak(worker()), peak(os.getpid())
        assert max(late - early for early, late in zip(before, after, strict=True)) < 50 << 20
        assert await link.execute("printf %800s", None, 60, 1000) == " " * 800
        assert (await sandbox.run("echo on")).output == "on\n"


BAD = {"no code": [], "words": ["x", "1", "+YQ==", "-", "0", "+", "-"], "less": ["0", "1", "+YQ=="]}


@pytest.mark.parametrize("words", BAD.values(), ids=BAD)
async def test_a_machine_that_answers_nonsense_is_lost(
    words: list[str], ssh: SandboxConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs may be the agent's: what they say must not look like a mistake of ours."""

    async def execute(self: remote.Link, command: str, *_: object) -> str:
        mark = mark_of(command)
        return f"{mark}({' '.join(words)}){mark}"

    monkeypatch.setattr(remote.Link, "execute", execute)
    sandbox = create_sandbox(ssh)
    for asked in (sandbox.run("true"), sandbox.spawn("true"), sandbox.stat("x")):
        with pytest.raises(SandboxFailure, match="cannot be read"):
            await asked


def worker() -> int:
    """The process of the one machine that is open."""
    (pid,) = (pid for pid in children(os.getpid()) if b"remote_worker" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return pid


def peak(pid: int) -> int:
    """The most memory that a process has had, in bytes."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def over(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
async def test_ssh_commands_neither_read_nor_write_files_of_the_account(
    ssh: SandboxConfig, sshd: dict[str, str]
) -> None:
    """hermes-agent saves the login shell's variables to such a file, and reads it before each command."""
    async with create_sandbox(ssh) as sandbox:
        await sandbox.run("true")
    asked = Path(sshd["asked"]).read_text()
    assert sandbox.id in base64.b64decode(asked.split("echo ")[-1].split()[0]).decode()
    assert "hermes-snap" not in asked


@pytest.mark.slow
async def test_unknown_host_key_is_refused_unless_the_settings_accept_it(
    ssh: SandboxConfig, sshd: dict[str, str], tmp_path: Path
) -> None:
    own = tmp_path / "known hosts 100%"
    own.touch()
    unknown = replace(ssh, known_hosts=str(own))
    with pytest.raises(UserError, match=r"(?s)verification failed.*sandbox\.ssh\.accept_unknown_host: true"):
        await create_sandbox(unknown).start()
    assert own.read_text() == ""
    async with create_sandbox(replace(unknown, accept_unknown_host=True)) as sandbox:
        assert (await sandbox.run("echo on")).output == "on\n"
    assert own.read_text()
    changed = Path(sshd["TERMINAL_SSH_KEY"]).with_suffix(".pub").read_text()
    own.write_text(f"[127.0.0.1]:{sshd['TERMINAL_SSH_PORT']} {changed}")
    with pytest.raises(UserError, match="verification failed"):
        await create_sandbox(replace(unknown, accept_unknown_host=True)).start()


@pytest.mark.slow
async def test_a_machine_that_is_not_there(ssh: SandboxConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_SSH_PORT", "1")
    with pytest.raises(SandboxFailure, match="SSH connection failed"):
        await create_sandbox(ssh).start()


def test_what_such_a_machine_cannot_do_is_said(ssh: SandboxConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"network: true"):
        create_sandbox(SandboxConfig(backend="ssh"))
    with pytest.raises(UserError, match=r"limits\.memory cannot be enforced"):
        create_sandbox(SandboxConfig(backend="ssh", network=True, limits=ResourceLimits(memory=1 << 30)))
    with pytest.raises(UserError, match="no images"):
        create_sandbox(SandboxConfig(backend="ssh", network=True, image="debian"))
    monkeypatch.delenv("TERMINAL_SSH_HOST")
    assert "TERMINAL_SSH_HOST" in (missing("ssh") or "")


def test_addresses_and_keys_may_come_from_elsewhere_than_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TERMINAL_SSH_HOST", "TERMINAL_SSH_USER", "TERMINAL_SSH_PORT", "TERMINAL_SSH_KEY"):
        monkeypatch.delenv(name, raising=False)
    given = {"TERMINAL_SSH_HOST": "box", "TERMINAL_SSH_USER": "me", "TERMINAL_SSH_PORT": "2222", "KEY": "sk-4711"}
    assert "TERMINAL_SSH_HOST" in (missing("ssh") or "")
    assert "TERMINAL_SSH_HOST" not in (missing("ssh", given) or "")
    config = SandboxConfig(backend="ssh", network=True, environ=given)
    asked = machine(config).arguments
    assert (asked["host"], asked["user"], asked["port"]) == ("box", "me", 2222)
    assert "sk-4711" not in repr(config)
    with pytest.raises(UserError, match=r"sandbox\.ssh\.known_hosts: there is no file /not/there"):
        machine(replace(config, known_hosts="/not/there"))


@pytest.mark.slow
async def test_ssh_sandbox_reads_its_address_from_the_given_variables(
    ssh: SandboxConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dict(os.environ)
    monkeypatch.setenv("TERMINAL_SSH_PORT", "1")
    async with create_sandbox(replace(ssh, environ=given)) as sandbox:
        assert (await sandbox.run("echo there")).output == "there\n"


@pytest.mark.skipif("DAYTONA_API_KEY" in os.environ, reason="there is a key")
@pytest.mark.parametrize("backend", ["modal", "daytona", "singularity"])
def test_what_is_missing_is_said(backend: str) -> None:
    if missing(backend) is not None:
        with pytest.raises(UserError, match=r"cannot be used: (set|pip install|install)"):
            create_sandbox(SandboxConfig(backend=backend, network=True))


TAKES = {
    "ssh": {"host", "user", "port", "key_path", "timeout"},  # and what `remote_worker.connected` adds
    "modal": {"image", "timeout", "persistent_filesystem", "modal_sandbox_kwargs"},
    "daytona": {"image", "timeout", "persistent_filesystem", "cpu", "memory", "disk"},
    "singularity": {"image", "timeout", "persistent_filesystem", "cpu", "memory"},
}


@pytest.mark.parametrize("backend", NAMES)
def test_the_symbols_of_hermes_agent(backend: str) -> None:
    module, name = CLASSES[backend]
    pytest.importorskip("tools.environments.base", reason="the extra hermes is not installed")
    found = getattr(importlib.import_module(module), name)
    assert set(inspect.signature(found).parameters) >= TAKES[backend]
    assert set(inspect.signature(found.execute).parameters) >= {"command", "cwd", "timeout", "stdin_data"}
    assert list(inspect.signature(found.cleanup).parameters) == ["self"]
    if backend == "ssh":
        for replaced in ("init_session", "_establish_connection", "_detect_remote_home", "_ensure_remote_dirs"):
            assert list(inspect.signature(getattr(found, replaced)).parameters) == ["self"]
    kept = importlib.import_module(BASE)._BoundedOutputCollector
    assert list(inspect.signature(kept).parameters) == ["max_chars"]
    assert kept(5).total_chars == 0


def asked(script: bytes, **values: str | list[str]) -> list[str]:
    """What a script answers on this machine."""
    text, mark = remote.program(script, **values)
    return remote.answer(subprocess.run(remote.command(text), shell=True, capture_output=True, text=True).stdout, mark)


def test_a_process_whose_working_directory_is_removed_is_seen_to_end(tmp_path: Path) -> None:
    place = {"box": str(tmp_path / "box"), "job": "1", "limit": "100", "head": "40", "tail": "60"}
    (tmp_path / "gone").mkdir()
    program = ["bash", "-c", 'rmdir "$PWD"; echo said; exit 3']
    asked(remote.SPAWN, **place, cwd=str(tmp_path / "gone"), argv=program, vars=["A=1"])
    until_blocking(lambda: asked(remote.POLL, **place)[0] != "-")
    code, *output = asked(remote.POLL, **place)
    assert not (tmp_path / "gone").exists()
    assert (code, parts(output)) == ("3", (b"said\n", False))


class LocalLink:
    """A link to this machine, which answers neither the scripts of `silent` nor anything while it is not `up`."""

    open = True

    def __init__(self, *silent: bytes) -> None:
        self.silent, self.up = silent, True
        self.running = self.most = 0

    async def start(self, *_: object) -> None: ...

    async def execute(self, asked: str, stdin: str | None, _: float, characters: int = remote.SMALL) -> str:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            text = base64.b64decode(asked.split()[3])
            if not self.up or any(script in text for script in self.silent):
                return ""
            done = await asyncio.to_thread(
                subprocess.run, asked, shell=True, capture_output=True, text=True, input=stdin or ""
            )
        finally:
            self.running -= 1
        if len(done.stdout) > characters:
            raise SandboxFailure("it answered with more than was asked for")
        return done.stdout

    async def close(self) -> None: ...


@asynccontextmanager
async def sandbox_here(link: LocalLink, **settings: Any) -> AsyncIterator[RemoteSandbox]:
    """A started sandbox on this machine."""
    sandbox = sandbox_of(link, **settings)
    try:
        async with sandbox:
            yield sandbox
    finally:
        shutil.rmtree(box_of(sandbox), ignore_errors=True)


def box_of(sandbox: Sandbox) -> Path:
    """The directory of all files of a sandbox on an account that others use too."""
    return Path(sandbox.home).parent


needs_extra = pytest.mark.skipif(
    missing("ssh", {"TERMINAL_SSH_HOST": "h", "TERMINAL_SSH_USER": "u"}) is not None,
    reason="the extra hermes is not installed",
)


@needs_extra
async def test_output_stays_when_the_command_removes_the_files_of_its_sandbox() -> None:
    async with sandbox_here(LocalLink()) as sandbox:
        remove = f"echo said; rm -rf {box_of(sandbox)}; echo wrong >&2; exit 3"
        done = await sandbox.run(remove, merge_stderr=False)
        assert not box_of(sandbox).exists()
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"said\n", b"wrong\n")


@needs_extra
@pytest.mark.parametrize("up", [True, False])
async def test_command_that_hangs_is_lost_only_if_the_machine_does_not_respond(
    up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SPARE_SECONDS", 0)
    monkeypatch.setattr(remote, "transfer_seconds", lambda size: 0.0)
    link = LocalLink(remote.RUN, remote.READ)
    async with sandbox_here(link) as sandbox:
        link.up = up
        if up:
            assert (await sandbox.run("true", timeout=0)).timed_out
            with pytest.raises(TimeoutError):
                await sandbox.read_file("file")
        else:
            for call in (sandbox.run("true", timeout=0), sandbox.read_file("file")):
                with pytest.raises(SandboxFailure, match="did not answer"):
                    await call


@needs_extra
@pytest.mark.parametrize(("up", "blamed"), [(True, StopReason.SANDBOX_KILLED), (False, StopReason.SANDBOX_FAILURE)])
async def test_lifetime_that_ends_while_the_machine_is_silent_is_not_the_agents(up: bool, blamed: StopReason) -> None:
    class Hanging(LocalLink):
        """Its commands run until it is closed."""

        async def execute(self, asked: str, *arguments: Any) -> str:
            if remote.RUN in base64.b64decode(asked.split()[3]):
                await closed.wait()
                raise SandboxFailure("it is closed")
            return await super().execute(asked, *arguments)

        async def close(self) -> None:
            closed.set()

    link, closed = Hanging(), asyncio.Event()
    async with sandbox_here(link, lifetime=0.1) as sandbox:
        link.up = up
        with pytest.raises(SandboxFailure, match="lifetime") as caught:
            await sandbox.run("sleep 600")
    assert (caught.value.stop_reason, sandbox.killed_by_agent, sandbox.expired) == (blamed, up, False)


@needs_extra
async def test_commands_of_a_sandbox_wait_for_their_turn() -> None:
    link = LocalLink()
    async with sandbox_here(link) as sandbox:
        await asyncio.gather(*(sandbox.make_dir("folder") for _ in range(3 * remote.SANDBOX_COMMANDS_AT_ONCE)))
    assert link.most == remote.SANDBOX_COMMANDS_AT_ONCE


@needs_extra
async def test_path_that_is_too_long_is_refused_as_by_the_kernel() -> None:
    path = "a/" * 50_000
    async with sandbox_here(LocalLink()) as sandbox:
        for call in (sandbox.read_file(path), sandbox.rename("a", path)):
            with pytest.raises(OSError, match="File name too long"):
                await call
        assert (await sandbox.run("true", cwd=path)).exit_code == 126


@needs_extra
async def test_directory_with_too_many_entries_is_refused_however_long_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "LISTING", 2000)
    async with sandbox_here(LocalLink()) as sandbox:
        many = Path(sandbox.home, "many")
        many.mkdir()
        for name in range(100):
            (many / f"{name:0100}").touch()
        with pytest.raises(OSError, match="More than 3 entries"):
            await sandbox.list_dir("many", limit=3)


@needs_extra
async def test_error_number_instead_of_the_end_of_processes_is_an_invalid_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "KILL", b"fail 5\n")
    async with sandbox_here(LocalLink()) as sandbox:
        with pytest.raises(SandboxFailure, match="cannot be read: Input/output error"):
            await sandbox.kill_all()


@pytest.fixture
def account() -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """A directory of an ordinary user, and the arguments of `subprocess` that run a program as this user."""
    folder = Path(tempfile.mkdtemp())
    user = 47113 if os.geteuid() == 0 else os.geteuid()
    os.chown(folder, user, -1)
    yield folder, {"user": user, "extra_groups": []} if os.geteuid() == 0 else {}
    shutil.rmtree(folder, ignore_errors=True)


def test_directories_that_their_owner_cannot_write_are_removed(account: tuple[Path, Mapping[str, Any]]) -> None:
    folder, user = account
    box = folder / "box"
    make = f"mkdir -p {box}/a/b && touch {box}/a/b/c && chmod 500 {box}/a/b && chmod 0 {box}/a"
    subprocess.run(make, shell=True, check=True, **user)
    text, _ = remote.program(remote.KILL, named="A=1", signal="9", folder=str(box))
    subprocess.run(remote.command(text), shell=True, check=True, capture_output=True, **user)
    assert not box.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "startup", ["echo Host key verification failed >&2; exit 255", r"printf '\xff\xfe'; exit 1"], ids=["key", "bytes"]
)
async def test_startup_files_of_the_account_cannot_end_a_run(
    startup: str, ssh: SandboxConfig, sshd: dict[str, str], startup_file: Path
) -> None:
    startup_file.write_text(startup)
    with pytest.raises(SandboxFailure, match="did not answer"):
        await create_sandbox(ssh).start()


@pytest.fixture
def startup_file(sshd: dict[str, str]) -> Iterator[Path]:
    """A file that the account's shell reads before each command."""
    file = Path(sshd["rc"])
    yield file
    file.write_text("")


@pytest.mark.slow
async def test_startup_files_that_flood_fill_no_memory(ssh: SandboxConfig, startup_file: Path) -> None:
    startup_file.write_text("head -c 300000000 /dev/zero")
    link = remote.Link()
    await link.start("ssh", machine(ssh).arguments, "true")
    assert peak(worker()) < 150 << 20
    await link.close()


def test_output_of_the_last_command_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    base = pytest.importorskip(BASE, reason="the extra hermes is not installed")
    monkeypatch.setattr(base, "_BoundedOutputCollector", base._BoundedOutputCollector)
    bound_outputs()
    assert base._BoundedOutputCollector(1 << 60).max_chars < 10_000


@needs_extra
async def test_connection_forwards_nothing_and_notices_a_silent_network(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("ForwardAgent yes\nForwardX11 yes\nRemoteForward 1234 localhost:80\n")
    program = tmp_path / "ssh"
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/config -G "$@" >>{tmp_path}/settings\n')
    program.chmod(0o755)
    address = {"TERMINAL_SSH_HOST": "host", "TERMINAL_SSH_USER": "user"}
    environ = {**os.environ, **address, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    link = remote.Link()
    await link.start("ssh", machine(SandboxConfig(backend="ssh", network=True, environ=environ)).arguments, "", environ)
    await link.close()
    settings = (tmp_path / "settings").read_text().splitlines()
    assert {"forwardagent no", "forwardx11 no", "serveraliveinterval 15"} <= set(settings)
    assert not {"forwardagent yes", "forwardx11 yes", "serveraliveinterval 0"} & set(settings)
    assert not any(setting.startswith("remoteforward") for setting in settings)


@pytest.mark.slow
async def test_start_without_its_directories_is_an_infrastructure_failure(ssh: SandboxConfig) -> None:
    with pytest.raises(SandboxFailure, match="cannot make its directories"):
        await create_sandbox(replace(ssh, workdir="/proc/none")).start()


@pytest.mark.slow
async def test_agent_cannot_make_its_next_command_hang_or_too_large(ssh: SandboxConfig) -> None:
    async with create_sandbox(ssh) as sandbox:
        mode = await sandbox.run("stat -c %a ..; cd ..; for i in $(seq 30); do mkfifo $i.o; done")
        assert mode.output == "700\n"
        assert (await sandbox.run("echo on", timeout=1)).output == "on\n"
        assert (await sandbox.run("echo on", env={"A": "'" * 30_000})).output == "on\n"


@pytest.mark.slow
async def test_closing_ends_the_clients_of_a_worker_that_does_not_end(
    ssh: SandboxConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RELEASE_SECONDS", 0.1)
    async with create_sandbox(ssh) as sandbox:
        running = asyncio.create_task(sandbox.run("touch started; exec sleep 600"))
        await until(Path(sandbox.home, "started").exists)
        holder = worker()
        variables = Path(f"/proc/{holder}/environ").read_bytes().split(b"\0")
        (connections,) = (value for name, _, value in (each.partition(b"=") for each in variables) if name == b"TMPDIR")
        clients = children(holder)
        assert clients
        os.kill(holder, signal.SIGSTOP)
    await until(lambda: all(map(over, clients)))
    with pytest.raises(SandboxFailure):
        await running
    asked(remote.KILL, named=f"{MARK}={sandbox.id}", signal="9", folder=str(box_of(sandbox)))
    for process in Path("/proc").glob("[0-9]*"):  # its connection, which ssh would keep for five minutes
        with contextlib.suppress(OSError):
            if connections in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
