"""Sandboxes on machines of hermes-agent's backends: ssh, modal, daytona, singularity.

This module owns the `Sandbox` over a machine that only runs commands. Each operation is a script for the machine's bash
and coreutils, and its result is read from the script's output. `Link` is the runner's end of the connection to a
process that holds the machine (`remote_worker`); `machine` converts a configuration to the arguments of its backend.
Unsupported features are refused before the start: conversations with a process, limits that the backend does not have,
and a closed network.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import itertools
import json
import os
import posixpath
import secrets
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from signal import SIGKILL
from typing import Any

from hermes_rl.errors import SandboxFailure, UserError, install_command
from hermes_rl.sandbox.base import (
    DEFAULT_IMAGE,
    KILLED_EXIT_CODE,
    LIST_LIMIT,
    MARK,
    OUTPUT_LIMIT,
    READ_LIMIT,
    TIMEOUT_EXIT_CODE,
    BackgroundProcess,
    CommandResult,
    FileInfo,
    Kind,
    Sandbox,
    SandboxConfig,
    sandbox_gone,
)
from hermes_rl.sandbox.helper_files import KERNEL_FILE_ERROR
from hermes_rl.threads import end_tasks
from hermes_rl.values import system_bytes

# -------------------------------------------------------------------------------- scripts
# Bytes are transferred as base64, so that neither names nor contents are affected by a shell's quoting or a text
# encoding. A result is between two marks; `!N` in it is an error number.

MOST_ERROR = 4096
"""Upper bound of the kernel's error numbers."""
COMMON = rb"""exec 2>/dev/null  # bash tells there of what was killed
say() { printf '\n%s(' "$mark"; "$@"; printf ')%s\n' "$mark"; exit 0; }
fail() { say printf '!%s' "$1"; }
missing() {
  d=$1
  while [ ! -e "$d" ] && [ ! -L "$d" ] && [ "$d" != / ]; do d=$(dirname -- "$d"; echo .); d=${d%??}; done
  [ -d "$d" ] && fail 2
  fail 20
}
there() { [ -e "$1" ] || [ -L "$1" ] || missing "$1"; }
folders() { mkdir -p -- "$1" 2>/dev/null || { [ -e "$1" ] && [ ! -d "$1" ] && fail 17; fail 20; }; }
parent() { d=$(dirname -- "$1"; echo .); d=${d%??}; }
kernels() { case $1/ in /proc/* | /sys/*) say printf '!13 kernel' ;; esac; }
behind() { kernels "$(realpath -m -- "$1")"; }  # what a name leads to is not the kernel's
beside() { parent "$1"; behind "$d"; }
look() { find "$@" -printf '%f\0%y\0%s\0%m\0%T@\0' | head -zn "${fields:-5}" | base64 -w0; }
"""

READ = rb"""there "$p"; behind "$p"; [ -d "$p" ] && fail 21; [ -e "$p" ] || fail 2; [ -f "$p" ] || fail 22
{ exec 8<"$p"; } || fail 13  # and what it leads to may have changed since
kernels "$(readlink "/proc/$$/fd/8")"
[ "$(stat -Lc %s "/proc/$$/fd/8")" -gt "$limit" ] && fail 27
say base64 -w0 <&8
"""
WRITE = rb"""behind "$p"; parent "$p"; folders "$d"; [ -d "$p" ] && fail 21
[ -p "$p" ] && fail 22  # it would wait for a reader
[ -e "$p" ] && [ -z "$mode" ] && keep=1
if [ "$more" = 1 ]; then base64 -d >>"$p" || fail 13; else base64 -d >"$p" || fail 13; fi
[ -n "$mode" ] && chmod "$mode" -- "$p"; [ -z "$mode$keep" ] && chmod 644 -- "$p"
say true
"""
STAT = rb"""if [ "$follow" = 1 ]; then behind "$p"; [ -e "$p" ] || missing "$p"; say look -L "$p" -maxdepth 0; fi
beside "$p"; there "$p"; say look "$p" -maxdepth 0
"""
LIST = rb"""there "$p"; behind "$p"; [ -d "$p" ] || fail 20; [ -r "$p" ] || fail 13
say look "$p/" -mindepth 1 -maxdepth 1
"""
CHMOD = rb"""behind "$p"; there "$p"; chmod "$mode" -- "$p" 2>/dev/null || fail 1; say true
"""
MKDIR = rb"""behind "$p"; folders "$p"; say true
"""
REMOVE = rb"""beside "$p"; there "$p"; rm -rf -- "$p" 2>/dev/null || fail 13; say true
"""
RENAME = rb"""beside "$p"; beside "$q"; there "$p"
[ -d "$q" ] && fail 21; mv -fT -- "$p" "$q" 2>/dev/null || missing "$q"; say true
"""
PLACE = rb"""mkdir -pm 700 -- "$box"  # other users of the machine cannot enter it
folders "${home:=$HOME}"
case $workdir in /*) ;; *) workdir=$home/$workdir ;; esac
folders "$workdir"
here() { printf %s "$home" | base64 -w0; }
say here
"""
OUTPUT = rb"""o=$box/$job
part() {
  n=$(stat -Lc %s -- "$1" || echo 0); printf ' %s +' "$n"
  if [ "$n" -le "$limit" ]; then base64 -w0 -- "$1"; printf ' -'
  else head -c "$head" -- "$1" | base64 -w0; printf ' +'; tail -c "$tail" -- "$1" | base64 -w0; fi
}
"""
COMMAND = (
    OUTPUT
    + rb"""mkdir -pm 700 -- "$box"; cd -- "$cwd" 2>/dev/null || { [ -d "$cwd" ] && fail 13; missing "$cwd"; }
"""
)
RUN = (
    COMMAND
    + rb"""
{ exec 7<>"$o.o" 8<>"$o.e"; } || fail 28
rm -f -- "$o.o" "$o.e"  # the output stays, whatever the command removes
if [ -n "$apart" ]; then timeout -s KILL "$seconds" env "${vars[@]}" "${argv[@]}" <"$input" >&7 2>&8 7>&- 8>&-
else timeout -s KILL "$seconds" env "${vars[@]}" "${argv[@]}" <"$input" >&7 2>&1 7>&- 8>&-; fi
code=$?
result() { printf %s "$code"; part "/proc/$$/fd/7"; part "/proc/$$/fd/8"; rm -f -- "$o".*; }
say result
"""
)
SPAWN = (
    COMMAND
    + rb"""command -v -- "${argv[0]}" >/dev/null || fail 2
mkfifo "$o.i" && : >"$o.o" || fail 28
sleep 1000000000 >"$o.i" 2>/dev/null </dev/null & echo $! >"$o.k"
{ setsid env "${vars[@]}" "${argv[@]}" <"$o.i" >"$o.o" 2>&1 & echo $! >"$o.p"; wait $!; echo $? >"$o.d"
  mv "$o.d" "$o.c"; kill $(cat "$o.k"); } </dev/null >/dev/null 2>&1 &
until [ -s "$o.p" ]; do sleep 0.01; done
say cat "$o.p"
"""
)
# A process may remove its working directory, so it is not entered to look at the process.
POLL = (
    OUTPUT
    + rb"""result() { cat "$o.c" 2>/dev/null || printf -- -; part "$o.o"; }
say result
"""
)
FEED = rb"""o=$box/$job; [ -e "$o.c" ] && fail 32; base64 -d >"$o.i" || fail 32; say true
"""
HANG_UP = rb"""kill "$(cat "$box/$job.k")" 2>/dev/null; say true
"""
KILL = rb"""
for round in 1 2 3 4 5; do
  left=
  for f in /proc/[0-9]*; do
    if grep -qszxF -- "$named" "$f/environ"; then kill "-$signal" "${f#/proc/}" 2>/dev/null && left=1; fi
  done
  { [ -z "$left" ] || [ "$signal" != 9 ]; } && break
  sleep 0.05
done
if [ -n "$folder" ]; then
  find "$folder" -type d ! -perm -700 -exec chmod u+rwx -- {} \;
  rm -rf -- "$folder"
fi
say true
"""


def quoted(value: str | bytes) -> bytes:
    """Return a value quoted as one word of the shell."""
    data = system_bytes(value) if isinstance(value, str) else value
    return b"'" + data.replace(b"'", b"'\\''") + b"'"


def program(script: bytes, **values: str | bytes | list[str]) -> tuple[bytes, str]:
    """Return the program that runs a script with these variables, and the mark around its result."""
    marker = secrets.token_hex(8)
    lines = [f"mark={marker}".encode()]
    for name, value in values.items():
        word = b"(" + b" ".join(map(quoted, value)) + b")" if isinstance(value, list) else quoted(value)
        lines.append(name.encode() + b"=" + word)
    return b"\n".join([*lines, COMMON, script]), marker


def command(text: bytes) -> str:
    """Return the shell command that runs a program."""
    return f'bash -c "$(echo {base64.b64encode(text).decode()} | base64 -d)"'


def answer(output: str, marker: str) -> list[str]:
    """Return the words of an answer.

    Raises the `OSError` that it contains, `SandboxFailure` if there is none, and `ValueError` if it is invalid.
    """
    start, end = output.rfind(f"{marker}("), output.rfind(f"){marker}")
    if start < 0 or end < start:
        raise SandboxFailure(f"the sandbox did not answer: {output[-500:]}")
    fields = output[start + len(marker) + 1 : end].split()
    if fields and fields[0].startswith("!"):
        error_number = int(fields[0][1:])
        if not 0 < error_number < MOST_ERROR:
            raise ValueError(f"error number {error_number}")
        reason = KERNEL_FILE_ERROR if fields[1:] == ["kernel"] else os.strerror(error_number)
        raise OSError(error_number, "Not a regular file" if error_number == 22 else reason)
    return fields


# -------------------------------------------------------------------------------- background processes

POLL_SECONDS = 0.2
Ask = Callable[..., Awaitable[list[str]]]


class RemoteProcess(BackgroundProcess):
    """See `BackgroundProcess`. Its output is in files on the machine, which are read every `POLL_SECONDS`."""

    def __init__(self, pid: int, job: str, ask: Ask, kill: Callable[[str, int], Awaitable[None]]) -> None:
        self.pid = pid
        self.job = job
        self._ask, self._kill = ask, kill
        self._output = b""
        self.ended = asyncio.get_running_loop().create_future()
        self._following = asyncio.create_task(self._follow())

    def output(self) -> bytes:
        return self._output

    async def write_stdin(self, data: bytes) -> None:
        if self.poll() is not None:
            raise BrokenPipeError("the process has ended")
        await self._ask(FEED, data, job=self.job)

    async def close_stdin(self) -> None:
        await self._ask(HANG_UP, job=self.job)

    async def kill(self, signal: int = 9) -> None:
        if self.poll() is None:
            await self._kill(self.job, signal)

    def end(self) -> None:
        """Record that the sandbox is gone."""
        self._following.cancel()
        if not self.ended.done():
            self.ended.set_result(KILLED_EXIT_CODE)

    async def _follow(self) -> None:
        # An `OSError` means that its files are gone, and so its end cannot be observed; a `ValueError` that the machine
        # returns an invalid result, which its next command will report.
        with contextlib.suppress(SandboxFailure, OSError, ValueError):
            while True:
                fields = await self._ask(POLL, job=self.job)
                self._output = parts(fields[1:])[0]
                if fields[0] != "-":
                    self.ended.set_result(int(fields[0]))
                    return
                await asyncio.sleep(POLL_SECONDS)
        self.end()


def parts(fields: list[str]) -> tuple[bytes, bool]:
    """Return an output, and True if it was cut, from its size, head (`+` and base64) and tail (or `-`).

    Raises `ValueError` for other words.
    """
    size, head, tail = fields
    first, last = base64.b64decode(head[1:]), base64.b64decode(tail[1:])
    dropped = int(size) - len(first) - len(last)
    if tail == "-" or dropped <= 0:
        return first + last, False
    return first + f"\n[... {dropped} bytes of output omitted ...]\n".encode() + last, True


# -------------------------------------------------------------------------------- link

UNKNOWN_HOST = "Host key verification failed"
"""Message of ssh about a host whose key is not known, or has changed."""
LINE_LIMIT = 1 << 31
START_SECONDS = 900.0
"""Maximum seconds until the machine exists: a service may have to get a large image first."""
RELEASE_SECONDS = 20.0
"""Maximum seconds for releasing a machine."""
SPARE_SECONDS = 30.0
"""Additional seconds for a command, for its transfer in both directions."""
SMALL = 1 << 20
"""Characters of a short result, with the messages that a machine's shell may print before it."""


class Link:
    """One machine and the process that holds it. A machine that stops responding is lost. Belongs to one event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._closing: asyncio.Future[None] | None = None
        self._numbers = itertools.count(1)
        self._home = ""

    @property
    def open(self) -> bool:
        return self._closing is None and self._reader is not None and not self._reader.done()

    async def start(
        self, backend: str, arguments: Mapping[str, Any], cleanup: str, environ: Mapping[str, str] | None = None
    ) -> None:
        """Start the machine, with the variables of `environ` (None: the process's environment) for its program.

        Raises `SandboxFailure` if it is not available, `UserError` if its host key must not be trusted.
        """
        self._home = tempfile.mkdtemp(prefix="hermes-rl-")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "hermes_rl.sandbox.remote_worker", backend, json.dumps(arguments), cleanup),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # Its connections are in TMPDIR; two machines must not share one.
            env={**(os.environ if environ is None else environ), "HERMES_HOME": self._home, "TMPDIR": self._home},
            limit=LINE_LIMIT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise SandboxFailure(f"the {backend} sandbox did not start within {START_SECONDS:.0f} s") from None
        ended = {"error": f"hermes-agent ended; is the extra installed? {install_command('hermes')}"}
        ready = json.loads(line) if line else ended
        if UNKNOWN_HOST in ready.get("error", ""):
            raise UserError(
                f"the sandbox backend ssh cannot be used: {ready['error'].strip()}\nCompare the key with one that you "
                "have from its machine and add it to the file of known hosts (sandbox.ssh.known_hosts, or "
                "~/.ssh/known_hosts); sandbox.ssh.accept_unknown_host: true trusts a new one"
            )
        if "error" in ready:
            raise SandboxFailure(f"the {backend} sandbox did not start: {ready['error']}")
        self._reader = asyncio.create_task(self._read_answers(self._process.stdout))

    async def execute(self, command: str, stdin: str | None, timeout: float, max_characters: int = SMALL) -> str:
        """Return the output of a command.

        Raises `SandboxFailure` for more than `max_characters` characters, and for no response.
        """
        if not self.open or self._process is None or self._process.stdin is None:
            raise SandboxFailure("the sandbox is gone")
        request_id, seconds = next(self._numbers), int(timeout + SPARE_SECONDS)
        request = {"id": request_id, "command": command, "stdin": stdin, "timeout": seconds, "most": max_characters}
        future = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            async with asyncio.timeout(seconds + SPARE_SECONDS):
                await self._process.stdin.drain()
                answer = await future
        except ConnectionError as error:
            raise SandboxFailure("the sandbox was lost") from error
        except TimeoutError:
            raise SandboxFailure("the sandbox was lost: hermes-agent does not answer") from None
        finally:
            self._waiting.pop(request_id, None)
        if "error" in answer:
            raise SandboxFailure(f"the sandbox was lost: {answer['error']}")
        return str(answer["output"])

    async def close(self) -> None:
        """Release the machine, and end all waiting callers at once; may be called twice, and while cancelled."""
        if self._process is None:
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._release(self._process))
            self._answer_all("it is closed")
        await asyncio.shield(self._closing)

    async def _release(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await process.wait()
        except TimeoutError:
            _kill_group(process)
            await process.wait()
        finally:
            if process.returncode is None:
                _kill_group(process)
            if self._reader is not None:
                await end_tasks([self._reader])
            shutil.rmtree(self._home, ignore_errors=True)

    async def _read_answers(self, lines: asyncio.StreamReader) -> None:
        try:
            while line := await lines.readline():
                answer = json.loads(line)
                future = self._waiting.get(answer["id"])
                if future is not None and not future.done():
                    future.set_result(answer)
        finally:
            self._answer_all("hermes-agent ended")

    def _answer_all(self, error: str) -> None:
        for future in self._waiting.values():
            with contextlib.suppress(asyncio.InvalidStateError):
                future.set_result({"error": error})


def _kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill a worker and its clients of ssh, which would wait for a silent machine without end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, SIGKILL)


# -------------------------------------------------------------------------------- backends
# Addresses and keys come from the environment, under the names that hermes-agent and the services use, so that no spec
# holds them.

NAMES = ("ssh", "modal", "daytona", "singularity")
MEBI = 1 << 20
CHUNK_BYTES = 12 << 20
"""Bytes of a file that are sent together, if the backend accepts as many."""
ABLE: Mapping[str, tuple[str, ...]] = {
    "ssh": (),
    "modal": ("memory", "cpu"),
    "daytona": ("memory", "cpu", "disk"),
    "singularity": ("memory", "cpu"),
}
"""Backend → the limits that it supports."""
BACKEND_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "ssh": ("TERMINAL_SSH_HOST", "TERMINAL_SSH_USER", "TERMINAL_SSH_PORT", "TERMINAL_SSH_KEY"),
    "modal": ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "MODAL_ENVIRONMENT"),
    "daytona": ("DAYTONA_API_KEY", "DAYTONA_API_URL", "DAYTONA_TARGET"),
}
"""Backend → the environment variables with its address and its keys."""


@dataclass(frozen=True)
class Machine:
    """One machine to create."""

    arguments: Mapping[str, Any]
    shared: bool = False
    """True if other rollouts use the same account, so that each has a directory as its home, and none can be blamed."""
    chunk_size: int = CHUNK_BYTES
    """Bytes of a file that one command can take."""


def missing(backend: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the missing requirement of this backend, with a fix, or None if nothing is known to be missing."""
    environ = os.environ if environ is None else environ
    if find_spec("tools") is None or find_spec("model_tools") is None:
        return f"the backend {backend} is hermes-agent's: {install_command('hermes')}"
    if backend == "ssh":
        absent = [name for name in ("TERMINAL_SSH_HOST", "TERMINAL_SSH_USER") if not environ.get(name)]
        if absent:
            return f"set {' and '.join(absent)} (and TERMINAL_SSH_PORT, TERMINAL_SSH_KEY where they differ)"
        return (
            None if shutil.which("ssh") and shutil.which("scp") else "install the programs ssh and scp (openssh-client)"
        )
    if backend in ("modal", "daytona") and find_spec(backend) is None:
        return f"pip install {backend}"
    if backend == "modal":
        keys = environ.get("MODAL_TOKEN_ID") and environ.get("MODAL_TOKEN_SECRET")
        return None if keys or Path("~/.modal.toml").expanduser().exists() else "set MODAL_TOKEN_ID, MODAL_TOKEN_SECRET"
    if backend == "daytona":
        return None if environ.get("DAYTONA_API_KEY") else "set DAYTONA_API_KEY"
    return None if shutil.which("apptainer") or shutil.which("singularity") else "install apptainer or singularity"


def machine(config: SandboxConfig) -> Machine:
    """Return the machine for a configuration; raises `UserError` for impossible or missing features."""
    backend, limits = config.backend, config.limits
    if config.network is not True:
        raise UserError(
            f"the sandbox backend {backend} cannot close its network: set sandbox.network: true, or use another"
        )
    limits.require_at_most(ABLE[backend], f"by the backend {backend}")
    lacking = missing(backend, config.environ)
    if lacking is not None:
        raise UserError(f"the sandbox backend {backend} cannot be used: {lacking}")
    if backend == "ssh":
        return _ssh_machine(config)
    sizes = {name: getattr(limits, name) for name in ABLE[backend] if getattr(limits, name) is not None}
    sizes |= {name: sizes[name] // MEBI for name in ("memory", "disk") if name in sizes}
    if backend == "daytona" and "cpu" in sizes:
        sizes["cpu"] = int(sizes["cpu"])
    arguments: dict[str, Any] = {
        "image": config.image or DEFAULT_IMAGE,
        "timeout": int(config.timeout),
        "persistent_filesystem": False,
        **({"modal_sandbox_kwargs": sizes} if backend == "modal" else sizes),
    }
    return Machine(arguments, chunk_size=CHUNK_BYTES if backend == "singularity" else 48_000)


def _ssh_machine(config: SandboxConfig) -> Machine:
    if config.image is not None:
        raise UserError("sandbox.image: the backend ssh has no images; the machine is the one that it connects to")
    environ = os.environ if config.environ is None else config.environ
    port = environ.get("TERMINAL_SSH_PORT") or "22"
    if not port.isdigit():
        raise UserError(f"TERMINAL_SSH_PORT is {port!r}, which is not a port")
    if config.known_hosts is not None and not Path(config.known_hosts).is_file():
        raise UserError(f"sandbox.ssh.known_hosts: there is no file {config.known_hosts}")
    arguments = {
        "host": environ["TERMINAL_SSH_HOST"],
        "user": environ["TERMINAL_SSH_USER"],
        "port": int(port),
        "key_path": environ.get("TERMINAL_SSH_KEY", ""),
        "timeout": int(config.timeout),
        "known_hosts": config.known_hosts,
        "accept_unknown_host": config.accept_unknown_host,
    }
    return Machine(arguments, shared=True)


# -------------------------------------------------------------------------------- sandbox

JOB = "HERMES_RL_JOB"
INLINE_COMMAND_BYTES = 20_000
"""Maximum bytes of a command that are passed as an argument; a longer one is passed as a file."""
PROGRAM_ARGUMENT_BYTES = 60_000
"""Maximum bytes of a program that is passed as an argument (128 KiB for Linux, encoded and quoted); a longer one is
passed as a file.
"""
PATH_LIMIT = 4095
SANDBOX_COMMANDS_AT_ONCE = 8
"""Concurrent commands of one sandbox."""
FILE_SECONDS = 600.0
"""Seconds for a change to many files."""
RESPONSE_SECONDS = 10.0
"""Seconds for a machine to show that it still runs commands."""
LISTING = 64 << 20
"""Maximum characters of a directory listing."""


class RemoteSandbox(Sandbox):
    """See `Sandbox`. One object belongs to one event loop."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self.id = uuid.uuid4().hex[:12]
        self.machine: Machine = machine(config)
        self._box = f"/tmp/hermes-rl-{self.id}"
        self.home = self.workdir = f"{self._box}/home"
        self._link = Link()
        self._end_reason = ""
        """Reason why it is gone, if the runner ended it."""
        self._turns = asyncio.Semaphore(SANDBOX_COMMANDS_AT_ONCE)
        """A command that waits for others of its sandbox is not late yet."""
        self._processes: list[RemoteProcess] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = 0
        self._killed_by_agent = False
        self._exposed = False
        """True once commands of the agent may have run."""
        self._expiry: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ life

    @property
    def enforced(self) -> Mapping[str, str]:
        requested = self.config.limits.requested()
        return {name: "by the machine" for name in requested if name in ABLE[self.config.backend]}

    @property
    def alive(self) -> bool:
        return self._link.open and not self._end_reason

    @property
    def killed_by_agent(self) -> bool:
        return self._killed_by_agent

    async def start(self) -> None:
        try:
            cleanup, _ = program(KILL, named=f"{MARK}={self.id}", signal="9", folder=self._box)
            await self._link.start(self.config.backend, self.machine.arguments, command(cleanup), self.config.environ)
            home, workdir = self.home if self.machine.shared else "", self.config.workdir or ""
            # One round trip for all: each takes a quarter of a second.
            try:
                encoded_home = await self._ask(PLACE, box=self._box, home=home, workdir=workdir)
            except OSError as error:
                raise SandboxFailure(f"the sandbox cannot make its directories: {error.strerror}") from error
            with self._reading():
                self.home = base64.b64decode("".join(encoded_home)).decode()
            self.workdir = posixpath.normpath(posixpath.join(self.home, workdir))
            await self.prepare()
        except BaseException:  # on cancellation too: a machine that is not closed costs money
            await self.close()
            raise
        self._exposed = True
        if self.config.lifetime is not None:
            self._expiry = asyncio.get_running_loop().call_later(
                self.config.lifetime, lambda: self._run_later(self._expire())
            )

    async def _expire(self) -> None:
        busy = self._running > 0 or any(process.poll() is None for process in self._processes)
        # As in every sandbox, the agent causes a command that runs past the end, unless the machine has stopped.
        self._killed_by_agent = busy and await self._is_responding()
        self.expired = not busy
        self._end_reason = f"the sandbox's lifetime of {self.config.lifetime} s is over"
        await self.close()

    def blame_agent(self) -> None:
        self._killed_by_agent = True

    async def kill_all(self, *, agent_done: bool = True) -> None:
        if agent_done and self._expiry is not None:
            self._expiry.cancel()
        await self._kill(f"{MARK}={self.id}", 9)

    async def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        for process in self._processes:
            process.end()
        self._processes.clear()
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        await self._link.close()

    # ------------------------------------------------------------------ commands

    async def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        output_limit: int = OUTPUT_LIMIT,
        merge_stderr: bool = True,
    ) -> CommandResult:
        started_at, seconds = time.perf_counter(), self.config.timeout if timeout is None else timeout
        job = secrets.token_hex(8)  # what the agent can foresee, it can make a FIFO
        stdin_path = "/dev/null"
        self._running += 1
        try:
            if stdin is not None:
                stdin_path = f"{self._box}/{job}.i"
                await self.write_file(stdin_path, stdin)
            fields = await self._ask(
                RUN,
                None,
                seconds,
                2 * encoded(output_limit),
                **await self._values(job, command, cwd, env, output_limit),
                input=stdin_path,
                seconds=str(seconds),
                apart="" if merge_stderr else "1",
            )
        except asyncio.CancelledError:
            self._run_later(self._kill_job(job, 9))
            raise
        except TimeoutError:  # the agent has stopped what ends it
            return CommandResult(TIMEOUT_EXIT_CODE, b"", timed_out=True, duration=time.perf_counter() - started_at)
        except OSError as error:
            message = f"cannot start the command: working directory: {error.strerror}\n".encode()
            return CommandResult(127 if error.errno == errno.ENOENT else 126, message, message)
        finally:
            self._running -= 1
        with self._reading():
            code, (stdout, truncated), (stderr, _) = int("".join(fields[:1])), parts(fields[1:4]), parts(fields[4:])
        duration = time.perf_counter() - started_at
        timed_out = code == KILLED_EXIT_CODE and duration >= seconds
        exit_code = TIMEOUT_EXIT_CODE if timed_out else code
        return CommandResult(exit_code, stdout, stderr, timed_out, truncated, duration)

    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> BackgroundProcess:
        job = secrets.token_hex(8)
        values = await self._values(job, command, None, env, output_limit)
        fields = await self._ask(SPAWN, **values)
        with self._reading():
            pid = int("".join(fields))

        async def ask(script: bytes, data: bytes | None = None, **more: str) -> list[str]:
            shared = {name: values[name] for name in ("box", "limit", "head", "tail")}
            return await self._ask(script, data, 60.0, encoded(output_limit), **{**shared, **more})

        process = RemoteProcess(pid, job, ask, self._kill_job)
        self._processes.append(process)
        return process

    async def _values(
        self,
        job: str,
        command: str | Sequence[str],
        cwd: str | None,
        env: Mapping[str, str] | None,
        limit: int,
    ) -> dict[str, str | list[str]]:
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        if isinstance(command, str) and len(command) > INLINE_COMMAND_BYTES:
            argv = ["bash", f"{self._box}/{job}.s"]
            await self.write_file(argv[1], os.fsencode(command))
        base_variables = {"HOME": self.home, "TERM": "dumb", MARK: self.id, JOB: f"{self.id}-{job}"}
        variables = [f"{name}={value}" for name, value in {**base_variables, **self.config.env, **(env or {})}.items()]
        head = limit * 2 // 5
        limits = {"limit": str(limit), "head": str(head), "tail": str(limit - head)}
        job_location = {"box": self._box, "job": job, "cwd": self._short(cwd or ".")}
        return {**job_location, **limits, "argv": argv, "vars": variables}

    async def _kill_job(self, job: str, signal: int) -> None:
        await self._kill(f"{JOB}={self.id}-{job}", signal)

    async def _kill(self, named: str, signal: int) -> None:
        with self._reading():
            try:
                await self._ask(KILL, named=named, signal=str(signal), folder="")
            except OSError as error:  # the script has none to report
                raise ValueError(error.strerror) from error

    def _run_later(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------ files

    async def read_file(self, path: str, *, limit: int = READ_LIMIT) -> bytes:
        encoded_chunks = await self._ask_about_file(
            path, READ, seconds=transfer_seconds(limit), max_characters=encoded(limit), limit=str(limit)
        )
        with self._reading():
            return await asyncio.to_thread(base64.b64decode, "".join(encoded_chunks))

    async def write_file(self, path: str, data: bytes, mode: int | None = None) -> None:
        permissions = "" if mode is None else f"{mode:o}"
        for offset in range(0, max(len(data), 1), self.machine.chunk_size):
            chunk = data[offset : offset + self.machine.chunk_size]
            more, seconds = "1" if offset else "", transfer_seconds(len(chunk))
            await self._ask_about_file(path, WRITE, chunk, seconds=seconds, mode=permissions, more=more)

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        encoded_chunks = await self._ask_about_file(path, STAT, follow="1" if follow else "")
        with self._reading():
            (info,) = _parse_entries(encoded_chunks, 1, path)
        return info

    async def list_dir(self, path: str, *, limit: int = LIST_LIMIT) -> list[FileInfo]:
        encoded_chunks = await self._ask_about_file(path, LIST, max_characters=LISTING, fields=str(5 * limit + 1))
        with self._reading():
            return sorted(_parse_entries(encoded_chunks, limit, path), key=lambda info: info.name)

    async def set_mode(self, path: str, mode: int) -> None:
        await self._ask_about_file(path, CHMOD, mode=f"{mode:o}")

    async def make_dir(self, path: str) -> None:
        await self._ask_about_file(path, MKDIR)

    async def remove(self, path: str) -> None:
        await self._ask_about_file(path, REMOVE)

    async def rename(self, source: str, target: str) -> None:
        await self._ask_about_file(source, RENAME, q=self._short(target))

    async def _ask_about_file(
        self,
        path: str,
        script: bytes,
        data: bytes | None = None,
        *,
        seconds: float = FILE_SECONDS,
        max_characters: int = SMALL,
        **values: str,
    ) -> list[str]:
        try:
            return await self._ask(script, data, seconds, max_characters, p=self._short(path), **values)
        except OSError as error:
            error.filename = path
            raise

    async def _ask(
        self,
        script: bytes,
        data: bytes | None = None,
        seconds_to_wait: float = 60.0,
        max_characters: int = SMALL,
        /,
        **values: str | list[str],
    ) -> list[str]:
        text, marker = program(script, **values)
        if len(text) <= PROGRAM_ARGUMENT_BYTES:
            asked = command(text)
        else:
            path = f"{self._box}/{secrets.token_hex(8)}.s"
            await self.write_file(path, text)
            asked = f"bash {path}"
        stdin = None if data is None else (await asyncio.to_thread(base64.b64encode, data)).decode()
        async with self._turns:
            return await self._result(asked, marker, stdin, seconds_to_wait, max_characters)

    async def _result(
        self, asked: str, marker: str, stdin: str | None, seconds_to_wait: float, max_characters: int
    ) -> list[str]:
        started_at = time.monotonic()
        try:
            output = await self._link.execute(asked, stdin, seconds_to_wait, max_characters)
        except SandboxFailure as failure:
            raise (
                sandbox_gone(self._end_reason, by_agent=self.killed_by_agent) if self._end_reason else failure
            ) from None
        hung = time.monotonic() - started_at >= int(seconds_to_wait + SPARE_SECONDS) and f"){marker}" not in output
        if hung and await self._is_responding():
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        with self._reading():
            return answer(output, marker)

    async def _is_responding(self) -> bool:
        """Return True if the machine runs a command: then one that hangs there does so because of its agent."""
        text, marker = program(b"say true")
        try:
            async with asyncio.timeout(RESPONSE_SECONDS):
                answer(await self._link.execute(command(text), None, RESPONSE_SECONDS), marker)
        except (SandboxFailure, OSError, ValueError):
            return False
        return True

    def _short(self, path: str) -> str:
        """Return the absolute `path`; raises `OSError` (ENAMETOOLONG) as a system call does."""
        resolved = self.resolve(path)
        if len(system_bytes(resolved)) > PATH_LIMIT:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
        return resolved

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Parse a result in the block; the machine is lost if there is none, or it is invalid.

        Its programs are then the agent's, or gone. On a machine that all rollouts share they may belong to any of their
        agents.
        """
        try:
            yield
        except (SandboxFailure, ValueError) as error:
            self._killed_by_agent |= self._exposed and not self.machine.shared
            detail = getattr(error, "detail", f"the sandbox answered what cannot be read: {error}")
            raise sandbox_gone(detail, by_agent=self._killed_by_agent) from error


def encoded(limit: int) -> int:
    """Return the characters of a result that holds as many bytes."""
    return limit * 4 // 3 + SMALL


def transfer_seconds(size: int) -> float:
    """Return the seconds for the content of a file: a FIFO that an agent puts in its place is never opened."""
    return min(60.0 + size / MEBI, FILE_SECONDS)


KINDS: Mapping[bytes, Kind] = {b"f": "file", b"d": "directory", b"l": "symlink"}


def _parse_entries(encoded_chunks: list[str], limit: int, path: str) -> list[FileInfo]:
    """Return the output of `look`; raises `OSError` (E2BIG) if there are more than `limit` entries."""
    fields = base64.b64decode("".join(encoded_chunks)).split(b"\0")[:-1]
    if len(fields) > 5 * limit:
        raise OSError(errno.E2BIG, f"More than {limit} entries", path)
    return [
        FileInfo(os.fsdecode(name), KINDS.get(kind, "other"), int(size), int(mode, 8), float(mtime))
        for name, kind, size, mode, mtime in zip(*[iter(fields)] * 5, strict=True)
    ]
