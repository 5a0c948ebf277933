"""Every system call of the kernel's table, and why no agent harms another sandbox or this machine by it.

What a call can do to files is done to files of the sandbox's own: the memory that it was given, or an overlay over the
machine's folders, whose locks, watches and leases are its own too (`tests/sandbox/test_isolation.py`).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hermes_rl.sandbox.base import Sandbox
from hermes_rl.sandbox.seccomp import AARCH64, IN_APPEARANCE, INSPECTED, X86_64
from tests.sandbox.test_seccomp import NUMBERS, call

HARMLESS = {
    "it reads, writes, names or describes files that are the sandbox's own, or that only reading is allowed of": """
        read write open close stat fstat lstat lseek pread64 pwrite64 readv writev access sendfile fsync fdatasync
        truncate ftruncate getdents getdents64 getcwd chdir fchdir rename mkdir rmdir creat link unlink symlink readlink
        chmod fchmod chown fchown lchown umask utime utimes futimesat utimensat statfs fstatfs readahead fallocate
        sync_file_range openat openat2 mkdirat mknod mknodat fchownat newfstatat unlinkat renameat renameat2 linkat
        symlinkat readlinkat fchmodat fchmodat2 faccessat faccessat2 preadv pwritev preadv2 pwritev2 copy_file_range
        statx cachestat setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
        removexattr lremovexattr fremovexattr setxattrat getxattrat listxattrat removexattrat file_getattr
        name_to_handle_at sysfs""",
    "locks and watches hang on files of an overlay, or in a container on read-only files that nothing locks": """
        flock inotify_init inotify_init1 inotify_add_watch inotify_rm_watch""",
    "it needs a descriptor that only a refused call gives": """
        io_destroy io_getevents io_pgetevents io_submit io_cancel fanotify_mark""",
    "its descriptors, pipes and waits are the process's own; how many, is limited for each user": """
        poll ppoll select pselect6 pipe pipe2 dup dup2 dup3 close_range epoll_create epoll_create1 epoll_ctl epoll_wait
        epoll_pwait epoll_pwait2 eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime
        splice tee vmsplice memfd_create memfd_secret""",
    "it is the process's own memory, which the control group counts": """
        mmap mprotect munmap brk mremap msync mincore mlock mlock2 munlock mlockall munlockall remap_file_pages
        mbind set_mempolicy get_mempolicy set_mempolicy_home_node pkey_mprotect pkey_alloc pkey_free mseal
        map_shadow_stack membarrier futex futex_waitv futex_wake futex_wait futex_requeue set_robust_list
        get_robust_list rseq process_mrelease""",
    "it is about processes of the own namespace, whose first is the helper, which nothing inside kills": """
        fork vfork execve execveat exit exit_group wait4 waitid kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo
        pidfd_open pidfd_send_signal getpid getppid gettid getpgid setpgid getpgrp getsid setsid sched_getparam
        sched_getscheduler sched_getaffinity sched_getattr sched_rr_get_interval getpriority ioprio_get""",
    "it takes what may be traced, and the helper may not": """
        process_vm_readv process_vm_writev pidfd_getfd kcmp""",
    "it changes or tells of the calling process alone": """
        rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack sched_yield
        pause nanosleep clock_nanosleep getitimer setitimer alarm timer_create timer_settime timer_gettime
        timer_getoverrun timer_delete getrlimit setrlimit getrusage times prctl arch_prctl set_thread_area
        get_thread_area set_tid_address restart_syscall seccomp landlock_create_ruleset landlock_add_rule
        landlock_restrict_self lsm_get_self_attr lsm_set_self_attr uretprobe uprobe""",
    "a sandbox has one user, no capabilities, and gets none": """
        getuid getgid geteuid getegid setuid setgid setreuid setregid setresuid setresgid getresuid getresgid setfsuid
        setfsgid getgroups setgroups capget capset""",
    "it tells of the machine and changes nothing": """
        uname sysinfo gettimeofday time clock_gettime clock_getres getcpu getrandom sched_get_priority_max
        sched_get_priority_min lsm_list_modules statmount listmount listns""",
    "the namespaces of the network and of messages are the sandbox's own": """
        connect accept accept4 sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg shutdown bind listen getsockname
        getpeername socketpair setsockopt getsockopt shmget shmat shmctl shmdt semget semop semctl semtimedop msgget
        msgsnd msgrcv msgctl mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr""",
    "Linux has none": "getpmsg putpmsg afs_syscall tuxcall security epoll_ctl_old epoll_wait_old vserver",
}  # fmt: skip
"""Reason → the calls that the filter lets pass; those of Linux 6.18 on x86-64."""
HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")


def names(text: str) -> list[str]:
    return text.split()


def test_each_call_has_one_reason() -> None:
    """Refused whatever its arguments, inspected, done in appearance, or harmless."""
    passing = [name for text in HARMLESS.values() for name in names(text)]
    assert len(passing) == len(set(passing))
    assert not set(passing) & X86_64.numbers.keys()
    assert not AARCH64.numbers.keys() - X86_64.numbers.keys()
    assert set(INSPECTED) | set(IN_APPEARANCE) <= X86_64.numbers.keys()


def test_the_table_has_all_calls_of_the_kernel() -> None:
    if not HEADER.exists():
        pytest.skip("this machine has no headers of Linux for x86-64")
    known = {name for text in HARMLESS.values() for name in names(text)} | X86_64.numbers.keys()
    numbers = dict(re.findall(r"__NR_(\w+) (\d+)", HEADER.read_text()))
    assert numbers.keys() - known == set()
    assert {name: int(numbers[name]) for name in X86_64.numbers if name in numbers}.items() <= X86_64.numbers.items()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sync", ()),
        ("syncfs", (0,)),
        ("syncfs", (-1,)),
        ("fadvise64", (-1, 0, 0, 4)),
        ("madvise", (1, 1, 20)),
        ("madvise", (1, 1, 21)),
    ],
)
async def test_what_would_cost_the_whole_machine_is_done_in_appearance(
    fenced: Sandbox, name: str, arguments: tuple[int, ...]
) -> None:
    """No file has the descriptor -1, and no page starts at address 1: the kernel was not asked."""
    assert await call(fenced, name, *arguments) == (0, 0)


async def test_other_advice_reaches_the_kernel(fenced: Sandbox) -> None:
    assert (await call(fenced, "fadvise64", -1, 0, 0, 3))[0] == -1
    assert (await call(fenced, "madvise", 1, 1, 4))[0] == -1
    assert NUMBERS["fadvise64"] and (await fenced.run("sync && dd if=/usr/bin/env of=x status=none")).exit_code == 0
