"""Can bubblewrap work on this machine, and if not, what is to be done?

Owns the diagnosis. A run asks before its first sandbox and stops with the remedy; it never goes on without
the fence. `hermes-rl doctor` prints the same.
"""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.errors import UserError
from hermes_rl.sandbox.bwrap_binary import Bwrap, find_bwrap, namespace_options
from hermes_rl.sandbox.cgroup import CONTROLLERS, DELEGATE, find_layout
from hermes_rl.sandbox.images import OUTER_UID, cache_folder, overlay_refused
from hermes_rl.sandbox.roots import UID
from hermes_rl.sandbox.seccomp import filter_program

OTHERWISE = "or choose another backend (`--set sandbox.backend=none` runs on the bare machine, without a fence)"

SWITCHES = (
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (or install your distribution's bubblewrap "
        "with its AppArmor profile)",
    ),
)
"""Files of the kernel, the value that forbids user namespaces, and the command that allows them."""


@dataclass(frozen=True)
class ProbeResult:
    """`detail` says what was found, `remedy` what to do about it; empty when all is well."""

    ok: bool
    detail: str
    remedy: str = ""


def probe() -> ProbeResult:
    """Try bubblewrap once, with the namespaces that sandboxes use."""
    try:
        bwrap = find_bwrap()
    except UserError as error:
        return ProbeResult(False, str(error), OTHERWISE)
    said = _try(bwrap)
    if said is None:
        return ProbeResult(True, f"{bwrap.path} works")
    return ProbeResult(False, f"{bwrap.path} cannot make a sandbox here: {said}", f"{_remedy()}, {OTHERWISE}")


@dataclass(frozen=True)
class Ability:
    """Something that not every sandbox needs; `remedy` is empty where it is there."""

    name: str
    detail: str
    remedy: str = ""


def parts() -> list[Ability]:
    """What sandboxes can have here beyond the fence itself."""
    return [_groups(), _images(), _filter_ability()]


def _groups() -> Ability:
    layout = find_layout()
    if layout is None:
        return Ability("control groups", "cannot be made here: limits hold per process, cpu not at all", DELEGATE)
    missing = [name for name in CONTROLLERS if name not in layout.parents]
    detail = f"version {layout.version} with {', '.join(layout.parents)}"
    return Ability("control groups", detail, f"not handed to this user: {', '.join(missing)}" if missing else "")


def _images() -> Ability:
    try:
        said = _try(find_bwrap(overlay=True), "--overlay-src", "/usr", "--tmp-overlay", "/tmp")
        cache = str(cache_folder())
    except UserError as error:
        return Ability("images", "cannot be used here", str(error))
    if said is not None:
        return Ability("images", "cannot be used here", str(overlay_refused(said) or said))
    return Ability("images", f"folders and archives work; they are unpacked below {cache}")


def _filter_ability() -> Ability:
    machine = platform.machine()
    if filter_program() is None:
        return Ability(
            "system calls", f"there is no filter for the processor {machine}", "choose another sandbox.backend"
        )
    return Ability("system calls", f"filtered ({machine})")


def require_bubblewrap() -> None:
    """Raise `UserError` with the remedy where bubblewrap cannot work."""
    result = probe()
    if not result.ok:
        raise UserError(f"{result.detail}\n{result.remedy}")


def _try(bwrap: Bwrap, *more: str) -> str | None:
    """What bubblewrap complains about, with more options; None when it works."""
    as_root = os.geteuid() == 0
    fds: list[int] = []
    executable, env = bwrap.by_descriptor(fds.append)
    try:
        done = subprocess.run(
            [
                "bwrap",
                *namespace_options(UID, network=False),
                "--ro-bind",
                "/",
                "/",
                "--proc",
                "/proc",
                *more,
                "/bin/true",
            ],
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


def _remedy() -> str:
    for path, forbids, command in SWITCHES:
        file = Path(path)
        if file.exists() and file.read_text("ascii").strip() == forbids:
            return f"user namespaces are switched off: as root, {command}"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return (
            "this is a container whose runtime forbids namespaces: start it with --security-opt "
            "seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"
        )
    return "allow unprivileged user namespaces on this machine"
