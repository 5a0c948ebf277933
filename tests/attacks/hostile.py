"""A random sequence of hostile primitives, played inside of a sandbox: ``python3 hostile.py SEED``.

Each primitive is a few lines, bounded in memory and time, and may fail; what it does to others is asked outside. It
runs under the sandbox's own Python and imports nothing but the standard library.
"""

# ruff: noqa: E501, E701, E702, BLE001, S110, PTH101, PTH102, PTH103, PTH104, PTH106, PTH109, PTH111, PTH123, PTH208, PTH211, RUF059, RUF100, SIM105, SIM115

import array
import ctypes
import fcntl
import mmap
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
KEEP: "list[object]" = []
"""What stays open until the program ends."""
NEVER = {22, 32, 33, 34, 35, 57, 58, 61, 230, 247, 7, 23, 270, 271, 232, 281, 202, 449, 15, 130}
"""Numbers that only make this program itself wait: a sequence that sleeps is no attack."""


def pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def fork(work, count=1):
    for _ in range(count):
        if os.fork() == 0:
            try:
                work()
            finally:
                os._exit(0)


def calls(rng):
    """System calls by number, with arguments of all kinds."""
    memory = mmap.mmap(-1, 1 << 16)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    values = (0, 1, 2, 3, 4, -1, 1 << 31, 1 << 63, address, address + 100, os.getpid(), os.getppid(), 0x5412, 16, 4096)
    for _ in range(60):
        number = rng.randrange(470)
        if number not in NEVER:
            libc.syscall(ctypes.c_long(number), *(ctypes.c_long(_signed(rng.choice(values))) for _ in range(6)))


def _signed(value):
    return value - (1 << 64) if value >= 1 << 63 else value


def limits(rng):
    for who in (0, 1, os.getppid()):
        resource.prlimit(who, rng.randrange(16), (0, 0))


def limit_self(rng):
    resource.setrlimit(
        rng.choice((resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE)), (0, 0)
    )


def kill_all(rng):
    os.kill(rng.choice((-1, 1, os.getppid())), rng.choice((1, 9, 11, 15, 19, 20, 23)))


def kill_group(rng):
    os.killpg(rng.choice((0, 1)), rng.choice((1, 10, 19)))


def queue(rng):
    [libc.sigqueue(1, rng.randrange(1, 64), ctypes.c_void_p(1)) for _ in range(2000)]


def ignore(rng):
    [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 3, 13, 15, 17)]


def block(rng):
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))


def fds_in_flight(rng):
    for _ in range(30):
        a, b = socket.socketpair()
        a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [a.fileno()] * 200))])
        KEEP.extend((a, b))


def fds_nested(rng):
    last, _ = pair = socket.socketpair()
    KEEP.append(pair)
    for _ in range(60):
        a, b = socket.socketpair()
        KEEP.append((a, b))
        a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [last.fileno()]))])
        last = b


def steal_fds(rng):
    for pid in pids():
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            continue
        for fd in range(12):
            own = libc.syscall(438, handle, fd, 0)
            if own >= 0:
                try:
                    fcntl.fcntl(own, fcntl.F_SETFL, rng.choice((0, os.O_NONBLOCK, os.O_APPEND | os.O_NONBLOCK)))
                except OSError:
                    pass
                if rng.random() < 0.3:
                    libc.write(own, b"\0forged 0\n" * 50, 500)
                if rng.random() < 0.2:
                    libc.shutdown(own, 2)


def steal_reads(rng):
    for pid in pids():
        for fd in range(12):
            own = libc.syscall(438, os.pidfd_open(pid), fd, 0)
            if own >= 0:
                os.set_blocking(own, False)
                os.read(own, 100)


def trace(rng):
    for pid in pids():
        if libc.ptrace(rng.choice((16, 0x4206)), pid, 0, 0) == 0:
            KEEP.append(pid)


def trace_and_cont(rng):
    libc.ptrace(16, os.getppid(), 0, 0)
    time.sleep(0.02)
    libc.ptrace(rng.choice((7, 8, 17)), os.getppid(), 0, rng.choice((0, 9)))


def write_memory(rng):
    for pid in pids():
        try:
            spans = [line.split() for line in open(f"/proc/{pid}/maps")]
            for span in spans:
                if span[1] == "rw-p" and pid != os.getpid():
                    ours, begin = ctypes.create_string_buffer(rng.randbytes(64), 64), int(span[0].split("-")[0], 16)
                    parts = [(ctypes.c_size_t * 2)(place, 64) for place in (ctypes.addressof(ours), begin)]
                    libc.process_vm_writev(int(pid), parts[0], 1, parts[1], 1, 0)
        except OSError:
            pass


def write_proc_fds(rng):
    for pid in pids():
        for fd in range(12):
            try:
                own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_NONBLOCK)
                os.write(own, b"0\n" * 100)
                os.ftruncate(own, 0)
            except OSError:
                pass


def write_proc(rng):
    for name in (
        "oom_score_adj",
        "comm",
        "coredump_filter",
        "timerslack_ns",
        "clear_refs",
        "autogroup",
        "setgroups",
        "uid_map",
    ):
        for pid in ("self", "1"):
            try:
                open(f"/proc/{pid}/{name}", "w").write(rng.choice(("0", "1000", "-1000", "x" * 100)))
            except OSError:
                pass


def namespaces(rng):
    libc.unshare(rng.choice((0x10000000, 0x20000, 0x40000000, 0x20000000, 0x10020000, 0x400, 0x80)))


def enter(rng):
    [
        libc.setns(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY), 0)
        for pid in pids()
        for name in os.listdir(f"/proc/{pid}/ns")
    ]


def mounts(rng):
    libc.mount(b"x", b"/tmp", rng.choice((b"tmpfs", b"proc", b"overlay")), 0, None)
    libc.umount2(b"/proc", 2)
    libc.chroot(b"/tmp")


def schedule(rng):
    [libc.sched_setscheduler(who, rng.choice((1, 3, 5)), struct.pack("i", 0)) for who in (0, 1, os.getppid())]


def affinity(rng):
    [libc.sched_setaffinity(who, 8, struct.pack("Q", 1)) for who in (0, 1, os.getppid())]


def attributes(rng):
    libc.syscall(
        314, rng.choice((0, 1)), struct.pack("IIQiIQQQ", 48, rng.choice((0, 5, 6)), 0, 19, 0, 10**6, 10**7, 10**7), 0
    )


def priority(rng):
    [libc.setpriority(kind, who, 19) for kind in (0, 1, 2) for who in (0, 1)]
    libc.syscall(251, rng.choice((1, 2, 3)), rng.choice((0, 1)), 3 << 13)


def spin(rng):
    end = time.monotonic() + 0.5

    def work():
        while time.monotonic() < end:
            pass

    fork(work, 8)


def yielders(rng):
    end = time.monotonic() + 0.3

    def work():
        while time.monotonic() < end:
            os.sched_yield()

    fork(work, 6)


def orphans(rng):
    fork(lambda: (os.setsid(), fork(lambda: time.sleep(600), 3)), 4)


def fork_chain(rng):
    for _ in range(40):
        if os.fork():
            os._exit(0)


def fork_many(rng):
    fork(lambda: time.sleep(600), 100)


def threads(rng):
    threading.stack_size(65536)
    for _ in range(100):
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()


def zombies(rng):
    for _ in range(40):
        if os.fork() == 0:
            os._exit(0)


def vfork_exec(rng):
    os.spawnv(os.P_NOWAIT, "/bin/sh", ["sh", "-c", "exec 3<>/dev/null; (sleep 600 &) ; kill -STOP $$"])


def inotify(rng):
    for _ in range(200):
        fd = libc.inotify_init()
        if fd < 0:
            break
        for path in (b"/usr", b"/usr/bin", b"/proc", b"/tmp", b"/"):
            libc.inotify_add_watch(fd, path, 0xFFF)


def epoll(rng):
    files = [os.eventfd(0) for _ in range(50)]
    for _ in range(50):
        poll = select.epoll()
        KEEP.append(poll)
        for fd in files:
            poll.register(fd, select.EPOLLIN | select.EPOLLET)


def epoll_nested(rng):
    last = os.eventfd(1)
    for _ in range(8):
        poll = select.epoll()
        KEEP.append(poll)
        poll.register(last)
        last = poll.fileno()


def locks(rng):
    for path in ("/usr/bin/python3", "/etc/passwd", "/bin/sh", "/usr/bin", "/"):
        fd = os.open(path, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        KEEP.append(fd)


def leases(rng):
    for path in ("own", "/etc/passwd", "/bin/sh"):
        fd = os.open(path, os.O_RDONLY | os.O_CREAT if path == "own" else os.O_RDONLY)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)


def fifos(rng):
    for name in ("artifact", "x", "out", ".bashrc", ".profile", "/tmp/f"):
        os.path.lexists(name) or os.mkfifo(name)


def deep(rng):
    for _ in range(300):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)


def odd_names(rng):
    for _ in range(100):
        name = bytes(rng.choice(b"\x01\n\r\x1b\xff -*'\"\\$`;&|<>(){}[]?~#%a") for _ in range(rng.randrange(1, 40)))
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0))


def many_files(rng):
    os.makedirs("many", exist_ok=True)
    for i in range(2000):
        os.close(os.open(f"many/{i}", os.O_CREAT))


def links(rng):
    for name, to in (
        ("artifact", "/proc/self/root"),
        ("out", "out"),
        ("l1", "l2"),
        ("l2", "l1"),
        ("up", "../" * 60),
        ("p1", "/proc/1/cwd"),
        ("fd", "/proc/self/fd/0"),
    ):
        if not os.path.lexists(name):
            os.symlink(to, name)


def swap(rng):
    os.makedirs("a", exist_ok=True)
    os.path.lexists("b") or os.symlink("/etc", "b")

    def work():
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            libc.syscall(316, -100, b"a", -100, b"b", 2)

    fork(work, 2)


def no_rights(rng):
    for name in (".", "/tmp", "many", "/home/user"):
        os.chmod(name, rng.choice((0, 0o111, 0o444, 0o7777)))


def no_home(rng):
    os.rename("/home/user", "/home/user2") if os.access("/home", os.W_OK) else os.rmdir(os.getcwd())


def fill(rng):
    with open("/tmp/full", "wb", 0) as file:
        for _ in range(100):
            file.write(b"x" * (1 << 20))


def inodes(rng):
    for i in range(3000):
        os.mkdir(f"/tmp/i{i}")


def sparse(rng):
    os.truncate(os.open("artifact", os.O_CREAT | os.O_RDWR), 1 << 40)


def truncated(rng):
    def work():
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            with open("artifact", "wb") as file:
                file.write(b"x" * rng.randrange(1 << 16))

    fork(work)


def memory_files(rng):
    for _ in range(20):
        fd = os.memfd_create("m", 2)
        os.ftruncate(fd, 1 << 19)
        fcntl.fcntl(fd, 1033, 15)


def shared_memory(rng):
    for _ in range(20):
        libc.shmget(0, 1 << 18, 0o1600)


def message_queues(rng):
    [libc.msgget(0, 0o1600) for _ in range(100)]
    [libc.semget(0, 100, 0o1600) for _ in range(50)]


def memory(rng):
    def work():
        data = bytearray(32 << 20)
        data[::4096] = b"x" * len(data[::4096])
        time.sleep(0.2)

    fork(work, 3)


def pipes(rng):
    for _ in range(60):
        r, w = os.pipe()
        os.set_blocking(w, False)
        try:
            fcntl.fcntl(w, 1031, 1 << 20)
            os.write(w, b"x" * (1 << 20))
        except OSError:
            pass


def terminals(rng):
    for _ in range(20):
        a, b = os.openpty()
        fcntl.ioctl(b, rng.choice((0x5412, 0x540E, 0x5414, 0x541C, 0x541D)), b"x" * 64)


def escapes(rng):
    sys.stdout.write("\x1b]0;x\a\x1b[2J\x1b[?1049h\x1bP+q\x1b\\\x9b31m" + "\r\n" * 200 + "\0" * 100)
    sys.stdout.flush()


def flood(rng):
    for _ in range(30):
        os.write(1, b"x" * 65536)


def odd_output(rng):
    os.write(1, rng.randbytes(5000))
    os.write(2, b"\xff\xfe" * 1000)


def close_all(rng):
    os.closerange(0, 64)


def nonblocking(rng):
    [os.set_blocking(fd, rng.random() < 0.5) for fd in (0, 1, 2)]


def servers(rng):
    for _ in range(100):
        s = socket.socket()
        s.bind(("127.0.0.1", 0))
        s.listen()
        KEEP.append(s)


def abstract(rng):
    for i in range(100):
        s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        s.bind(f"\0x{i}")
        KEEP.append(s)


def families(rng):
    for family in range(50):
        for kind in (1, 2, 3, 5):
            libc.socket(family, kind, rng.randrange(3))
            libc.socketpair(family, kind, 0, (ctypes.c_int * 2)())


def netlink(rng):
    s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, rng.choice((0, 4, 9, 15, 16)))
    s.bind((0, 0))
    s.send(rng.randbytes(64))
    s.settimeout(0.05)
    s.recv(4096)


def uring(rng):
    libc.syscall(425, 8, ctypes.create_string_buffer(256))
    libc.syscall(206, 60000, ctypes.byref(ctypes.c_ulong()))


def personality(rng):
    libc.personality(rng.choice((0x0008, 0x40000, 0x0400000, 0x8000000)))


def prctl(rng):
    [libc.prctl(rng.randrange(1, 75), rng.choice((0, 1, 2, 9)), 0, 0, 0) for _ in range(20)]


def subreaper(rng):
    libc.prctl(36, 1, 0, 0, 0)
    fork(lambda: fork(lambda: time.sleep(600), 5), 3)


def filter_self(rng):
    libc.prctl(38, 1, 0, 0, 0)
    libc.prctl(22, 1, 0, 0, 0)


def core(rng):
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    fork(os.abort, 3)


def stop(rng):
    os.kill(os.getpid(), signal.SIGSTOP)


def programs(rng):
    for name in ("bash", "sh", "python3", "env", "cat"):
        with open(os.path.expanduser(f"~/{name}"), "w") as file:
            file.write("#!/bin/sh\nkill -9 -1\n")
        os.chmod(os.path.expanduser(f"~/{name}"), 0o755)


def timers(rng):
    for _ in range(500):
        libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p()))
        libc.timerfd_create(1, 0)


PRIMITIVES = [value for name, value in dict(globals()).items()
              if callable(value) and getattr(value, "__module__", "") == __name__ and name not in ("pids", "fork", "_signed")]  # fmt: skip


def main():
    rng = random.Random(int(sys.argv[1]))
    for primitive in rng.choices(PRIMITIVES, k=rng.randrange(2, 9)):
        try:
            primitive(rng)
        except BaseException:  # whatever one attack ends with, the next one is tried
            pass


if __name__ == "__main__":
    main()
