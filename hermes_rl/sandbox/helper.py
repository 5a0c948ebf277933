"""Program that runs inside a sandbox as its first process and executes the host's requests.

It starts and kills processes there; file operations are in `helper_files`, the format of messages is in `wire`. It has
no policy: timeouts, limits on output, and permissions belong to the host. Its death ends the sandbox: as process 1 of a
PID namespace the kernel then kills everything in it. Without a namespace it is the "subreaper" of all its descendants
and kills them itself, then removes their directory.

It runs under any Python of the sandbox (3.8 or later). It uses the C modules `_socket`, `_signal` and `posix`: their
wrappers would double its start time.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed leaves it out
import _socket
import errno
import posix
import resource
import select
import stat
import sys
import time

from hermes_rl.sandbox.helper_copy import OPERATIONS as COPYING
from hermes_rl.sandbox.helper_files import OPERATIONS, is_folder, remove, write_all
from hermes_rl.sandbox.helper_system import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    children,
    descendants,
    filter_calls,
    prctl,
)
from hermes_rl.sandbox.wire import FRAME_LIMIT, IN_FILE, LAST_PIECE, MAX_FDS, PIECE, encode_number, pack, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hermes_rl.sandbox.helper_files import Answer

FIRST_FD = 10
"""Descriptors below this number are available for a process under that number."""
KILL_SECONDS = 5.0
IGNORED_SIGNALS = (_signal.SIGINT, _signal.SIGHUP, _signal.SIGTERM, _signal.SIGPIPE)
RESET = (*IGNORED_SIGNALS, _signal.SIGCHLD, _signal.SIGXFSZ)


def find_program(name: bytes, path: bytes) -> bytes:
    """Return a program by name from the command's PATH; the helper itself has none."""
    if b"/" in name:
        return name
    for folder in path.split(b":"):
        program = (folder or b".") + b"/" + name
        if posix.access(program, posix.X_OK) and not is_folder(program):
            return program
    raise FileNotFoundError(errno.ENOENT, "No such file or directory")


class Helper:
    """One control socket, and the processes that were started for it."""

    def __init__(self, fd: int) -> None:
        self.socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, fd)
        self.is_init = posix.getpid() == 1
        self.folder = b""
        self.jobs: dict[int, bytes] = {}
        """Process id → number of the request that started it."""
        self.operations = {**OPERATIONS, **COPYING}
        self.operations.update({b"init": self.init, b"kill": self.kill, b"killall": self.kill_all})
        self.operations.update({b"listen": self.listen, b"interrupt": self.interrupt})

    # ------------------------------------------------------------------ the loop

    def serve(self) -> None:
        wake, self.waker = posix.pipe2(posix.O_CLOEXEC | posix.O_NONBLOCK)
        _signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        for signal in IGNORED_SIGNALS:
            _signal.signal(signal, _signal.SIG_IGN)
        poll = select.poll()
        poll.register(self.socket.fileno(), select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == wake:
                    posix.read(wake, 4096)
                elif not self.answer():
                    return
            self.reap()

    def answer(self) -> bool:
        """Execute one request; return False at the end of the connection."""
        frame, fds = self.receive()
        if not frame:
            return False
        fields, payload = unpack(frame)
        try:
            if fields[1] == b"spawn":
                answer = self.spawn(fields[0], fields[2:], fds)
            else:
                answer = self.operations[fields[1]](fields[2:], payload, fds)
            self.send([fields[0], b"ok", *answer[0]], answer[1], answer[2])
        except OSError as error:
            self.send([fields[0], b"error", encode_number(error.errno or errno.EIO), str(error.strerror).encode()])
        except Exception as error:  # noqa: BLE001
            # One failed request must not end the sandbox.
            self.send([fields[0], b"error", encode_number(errno.EIO), repr(error).encode("utf-8", "replace")])
        finally:
            for fd in fds:
                posix.close(fd)
        return True

    def receive(self) -> tuple[bytes, list[int]]:
        frame, rest, _, _ = self.socket.recvmsg(
            FRAME_LIMIT + 4096, _socket.CMSG_SPACE(4 * MAX_FDS), _socket.MSG_CMSG_CLOEXEC
        )
        raw = b"".join(data for level, kind, data in rest if kind == _socket.SCM_RIGHTS)
        fds = [int.from_bytes(raw[i : i + 4], sys.byteorder) for i in range(0, len(raw), 4)]
        if frame == IN_FILE:
            size = posix.fstat(fds[0]).st_size
            frame = posix.pread(fds[0], size, 0)
            posix.close(fds.pop(0))
        return frame, fds

    def send(self, fields: list[bytes], payload: bytes = b"", fds: list[int] | None = None) -> None:
        frame, fds = pack(fields, payload), list(fds or ())
        if len(frame) > FRAME_LIMIT:
            fds.insert(0, posix.memfd_create("frame", posix.MFD_CLOEXEC))
            write_all(fds[0], frame)
            frame = IN_FILE
        raw = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
        rest = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, raw)] if fds else []
        try:
            self.socket.sendmsg([frame], rest)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or len(fds) != 1 or not stat.S_ISREG(posix.fstat(fds[0]).st_mode):
                raise
            self.send_pieces(b"" if frame == IN_FILE else frame, fds[0])
        finally:
            for fd in fds:
                posix.close(fd)

    def send_pieces(self, head: bytes, fd: int) -> None:
        """Send a message, followed by the content of a file."""
        offset, data = 0, head
        while True:
            chunk = posix.pread(fd, FRAME_LIMIT // 2, offset)
            if not chunk:
                self.socket.sendmsg([LAST_PIECE + data])
                return
            self.socket.sendmsg([PIECE + data])
            offset, data = offset + len(chunk), chunk

    # ------------------------------------------------------------------ operations

    def init(self, fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
        """Apply the limits of this sandbox.

        Fields: a directory to make now and to remove at the end, paths of programs, then name=value of each resource
        limit; a filter on system calls, or nothing → the existing ones of the programs.
        """
        if fields[0]:
            posix.mkdir(fields[0], 0o700)
        self.folder = fields[0]
        for field in fields[2:]:
            name, _, value = field.decode().partition("=")
            kind, limit = getattr(resource, name), int(value)
            hard = resource.getrlimit(kind)[1]
            if hard != resource.RLIM_INFINITY:
                limit = min(limit, hard)  # a stricter limit cannot be raised
            resource.setrlimit(kind, (limit, limit))
        if payload:
            filter_calls(payload)
        return [path for path in fields[1].split(b":") if posix.access(path, posix.F_OK)], b"", []

    def listen(self, fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
        """Listen on a port of the sandbox's loopback → a socket."""
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        try:
            listener.bind((b"127.0.0.1", int(fields[0])))
            listener.listen(128)
            return [], b"", [posix.dup(listener.fileno())]
        finally:
            listener.close()

    def spawn(self, job: bytes, fields: list[bytes], fds: list[int]) -> Answer:
        """Start a process: cwd, descriptors as target:index, number of arguments, arguments …, variables … → process
        id.
        """
        count = int(fields[2])
        arguments, variables = fields[3 : 3 + count], fields[3 + count :]
        env = dict(variable.partition(b"=")[::2] for variable in variables)
        actions: list[tuple[int, ...]] = [(posix.POSIX_SPAWN_DUP2, self.null, 0)]
        for pair in fields[1].split(b","):
            target, _, index = pair.partition(b":")
            actions.append((posix.POSIX_SPAWN_DUP2, fds[int(index)], int(target)))
        try:
            posix.chdir(fields[0])
        except OSError as error:
            raise OSError(error.errno, f"working directory: {error.strerror}") from error
        try:
            program = find_program(arguments[0], env.get(b"PATH", b"/usr/bin:/bin"))
            pid = posix.posix_spawn(program, arguments, env, file_actions=actions, setsid=True, setsigdef=RESET)
        finally:
            posix.chdir("/")
        self.jobs[pid] = job
        return [encode_number(pid)], b"", []

    def kill(self, fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
        """Send a signal to a process: a spawn's number and the signal; a process that has ended already is not an
        error.
        """
        for pid, job in self.jobs.items():
            if job == fields[0]:
                posix.killpg(pid, int(fields[1]))
                # `kill_all` has stopped all its children.
                for each in descendants(pid) if int(fields[1]) == _signal.SIGCONT else ():
                    posix.kill(each, _signal.SIGCONT)
        return [], b"", []

    def interrupt(self, fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
        """Kill the process groups of a job's children, but not the job itself. The field is the number of the job."""
        for pid, job in self.jobs.items():
            if job == fields[0]:
                for child in children(pid):
                    posix.killpg(child, _signal.SIGKILL)
        return [], b"", []

    def kill_all(self, fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
        """Kill all processes except the jobs whose numbers are the fields; these are stopped with their children.

        The answer is "left" if another process still lives at the deadline.
        """
        end = time.monotonic() + KILL_SECONDS
        while self.kill_round([pid for pid, job in self.jobs.items() if job in fields]):
            if time.monotonic() > end:
                return [b"left"], b"", []
            time.sleep(0.0005)
            self.reap()
        return [], b"", []

    # ------------------------------------------------------------------ processes

    def kill_round(self, kept_pids: list[int]) -> bool:
        """Kill the running processes, but stop the processes `kept_pids`; return True while there is something left to
        wait for.
        """
        if self.is_init:
            try:
                posix.kill(-1, _signal.SIGSTOP if kept_pids else _signal.SIGKILL)  # all at once, so that none is missed
            except ProcessLookupError:
                return False
            if not kept_pids:
                return True
        spared = {*kept_pids, *(each for pid in kept_pids for each in descendants(pid))}
        pids = descendants(posix.getpid())
        for pid in pids:
            try:
                posix.kill(pid, _signal.SIGSTOP if pid in spared else _signal.SIGKILL)
            except ProcessLookupError:
                continue
        return not spared.issuperset(pids)

    def reap(self) -> None:
        """Report ended processes; orphans that became children of the helper are only reaped."""
        while True:
            try:
                pid, status = posix.waitpid(-1, posix.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            job = self.jobs.pop(pid, None)
            if job is not None:
                signalled = posix.WIFSIGNALED(status)
                code = 128 + posix.WTERMSIG(status) if signalled else posix.WEXITSTATUS(status)
                self.send([b"exit", job, encode_number(code)])

    def prepare(self) -> None:
        """Make the process untraceable for its children, and free the low descriptors.

        When memory runs out, the kernel should choose it, and its children, before the runner and all other processes.
        """
        try:
            chosen_first = posix.open("/proc/self/oom_score_adj", posix.O_WRONLY | posix.O_CLOEXEC)
            posix.write(chosen_first, b"1000")
            posix.close(chosen_first)
        except OSError:
            pass  # if /proc is read-only, the parent process has done this
        prctl(PR_SET_DUMPABLE, 0)
        if not self.is_init:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        posix.umask(0o022)
        posix.chdir("/")
        socket_fd = self.socket.fileno()
        posix.set_inheritable(socket_fd, False)
        posix.closerange(3, socket_fd)
        posix.closerange(socket_fd + 1, 1024)
        self.null = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
        while self.null < FIRST_FD:
            self.null = posix.dup(self.null)

    def finish(self) -> None:
        """End, since the host is gone. Process 1 just ends; otherwise the helper must clean up."""
        if self.is_init:
            return
        self.jobs.clear()  # no receiver is left
        self.kill_all([], b"", [])
        if self.folder:
            remove([self.folder], b"", [])


def main() -> None:
    helper = Helper(int(sys.argv[1]))
    helper.prepare()
    try:
        helper.serve()
    except OSError:
        pass  # the socket broke: the same as its end
    finally:
        helper.finish()
