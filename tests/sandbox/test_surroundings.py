"""What keeps bubblewrap from working is named with the options of the container engine that is at work."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.sandbox.surroundings import container_engine, way_out

MASKED = "512 498 0:5 /null /proc/kcore rw,nosuid - tmpfs tmpfs rw\n"
CONTAINERS: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "docker": ({".dockerenv": ""}, {}, "docker"),
    "docker by its control group": ({"proc/1/cgroup": "12:pids:/docker/ab12\n"}, {}, "docker"),
    "podman": ({"run/.containerenv": ""}, {}, "podman"),
    "podman with a read-only root": ({"proc/self/mountinfo": MASKED}, {"container": "podman"}, "podman"),
    "podman by its control group": ({"proc/1/cgroup": "0::/machine.slice/libpod-ab12.scope\n"}, {}, "podman"),
    "kubernetes": ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
    "kubernetes by its control group": ({"proc/1/cgroup": "11:cpu:/kubepods/burstable/pod12\n"}, {}, "kubernetes"),
    "another engine": ({"proc/self/mountinfo": MASKED}, {}, "container"),
    "another engine that says so": ({}, {"container": "oci"}, "container"),
}


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("case", CONTAINERS)
def test_container_is_known_by_each_of_its_signs(tmp_path: Path, case: str) -> None:
    files, environ, engine = CONTAINERS[case]
    assert container_engine(tree(tmp_path, files), environ) == engine


def test_bare_host_is_not_detected_as_a_container(tmp_path: Path) -> None:
    mounts = "24 31 0:22 / /proc rw,nosuid - proc proc rw\n35 24 0:33 / /proc/sys/fs/binfmt_misc rw - autofs s rw\n"
    root = tree(tmp_path, {"proc/1/cgroup": "0::/init.scope\n", "proc/self/mountinfo": mounts})
    assert container_engine(root, {"HOME": "/root"}) is None
    assert way_out("No permissions", root, {}) == "allow unprivileged user namespaces on this machine"


@pytest.mark.parametrize(
    ("environ", "options"),
    [
        ({"container": "docker"}, "--security-opt systempaths=unconfined"),
        ({"container": "podman"}, "--security-opt unmask=ALL"),
        ({"KUBERNETES_SERVICE_HOST": "a"}, "procMount: Unmasked"),
    ],
)
def test_container_fix_is_a_security_profile_that_names_the_obstacle(
    tmp_path: Path, environ: dict[str, str], options: str
) -> None:
    refused = way_out("Creating new namespace failed: Operation not permitted", tmp_path, environ)
    assert "refuses system calls" in refused and options in refused and "PROFILE.json" in refused
    assert "seccomp=unconfined" not in refused and "apparmor" not in refused.lower()
    assert "masks parts of /proc" in way_out("Can't mount proc on /newroot/proc", tmp_path, environ)
    root = tree(tmp_path, {"proc/self/attr/current": "docker-default (enforce)\n"})
    assert "apparmor" in way_out("Creating new namespace failed", root, environ).lower()


def test_switch_of_the_kernel_comes_first(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/sys/user/max_user_namespaces": "0\n", ".dockerenv": ""})
    assert way_out("No permissions", root, {}) == (
        "user namespaces are switched off: as root, sysctl -w user.max_user_namespaces=15000"
    )
