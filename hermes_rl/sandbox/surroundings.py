"""Find the reason why bubblewrap does not work here, and the fix: a switch of the kernel, or the options of a
container.

A container is detected by more than the marker files of Docker and Podman: with a read-only root Podman has none, and
the runtimes of Kubernetes make none. The message of bubblewrap shows which of its rules is the reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

SWITCHES = (
    ("proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    (
        "proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (or install your distribution's bubblewrap "
        "with its AppArmor profile)",
    ),
)
"""Files of the kernel, the value that forbids user namespaces, and the command that allows them."""
MASKED = re.compile(r" /proc/(?:acpi|kcore|keys|timer_list|sysrq-trigger) ")
"""Mount points by which runtimes hide parts of /proc."""
GROUPS = {"kubepods": "kubernetes", "libpod": "podman", "docker": "docker"}
"""Parts of the name that each engine gives to the control group of process 1."""
PROFILE = (
    'the engine\'s seccomp profile with six further system calls (docs/sandbox.md, "In a container", has the command '
    "that makes it)"
)
WAYS = {
    "docker": "--security-opt seccomp=PROFILE.json --security-opt systempaths=unconfined",
    "podman": "--security-opt seccomp=PROFILE.json --security-opt unmask=ALL",
    "kubernetes": "hostUsers: false, procMount: Unmasked, seccompProfile: {type: Localhost, "
    "localhostProfile: PROFILE.json}",
}
APPARMOR = {
    "docker": " --security-opt apparmor=unconfined",
    "podman": " --security-opt apparmor=unconfined",
    "kubernetes": ", appArmorProfile: {type: Unconfined}",
}


def container_engine(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> str | None:
    """Return docker, podman, kubernetes, or `container` for another engine; None outside a container."""
    environ = os.environ if environ is None else environ
    group = _read_text(root / "proc/1/cgroup")
    by_group = next((engine for part, engine in GROUPS.items() if part in group), None)
    container_variable = environ.get("container", "")
    if "KUBERNETES_SERVICE_HOST" in environ or by_group == "kubernetes":
        return "kubernetes"
    if container_variable == "podman" or by_group == "podman" or (root / "run/.containerenv").exists():
        return "podman"
    if container_variable == "docker" or by_group == "docker" or (root / ".dockerenv").exists():
        return "docker"
    return "container" if container_variable or MASKED.search(_read_text(root / "proc/self/mountinfo")) else None


def way_out(refusal: str, root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> str:
    """Return the fix for a `refusal`, the message of bubblewrap."""
    for path, forbids, command in SWITCHES:
        if _read_text(root / path).strip() == forbids:
            return f"user namespaces are switched off: as root, {command}"
    engine = container_engine(root, environ)
    if engine is None:
        return "allow unprivileged user namespaces on this machine"
    # AppArmor's profiles for containers deny mounts; `unconfined` and no file at all are both none.
    confined = _read_text(root / "proc/self/attr/current").strip("\0\n ") not in ("", "unconfined")
    ways = {name: option + (APPARMOR[name] if confined else "") for name, option in WAYS.items()}
    options = ways.get(engine) or "; ".join(f"{name}: {option}" for name, option in ways.items())
    cause = "masks parts of /proc" if "mount proc" in refusal else "refuses system calls"
    return f"this is a container whose runtime {cause}: start it with {options}, where PROFILE.json is {PROFILE}"


def _read_text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text("utf-8", errors="replace")
    return ""
