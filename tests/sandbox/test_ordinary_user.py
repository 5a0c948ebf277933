"""The runner under an ordinary user: its sandboxes, images and cache are its own.

Where the tests run as root, a user namespace makes an ordinary user of them: with another number and no capabilities,
the owner of root's files, and shut out from those of everybody else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

UID = 1234
SPEC = """
version: 1
name: images
dataset: {items: [{image: ROOTFS}, {image: PACKED}], key: image, shuffle: 0, eval: only}
prompt: {user: "Say where you are."}
toolsets: {enabled: [terminal]}
sandbox: {image: "/{{ image }}", workdir: /testbed}
artifacts: {here: {path: here}}
rewards:
  right: {fn: "where.py:right"}
  fresh: {fn: "where.py:laid_in", sandbox: fresh}
solution:
  turns:
    - tools: [{name: terminal, args: {command: "cp /etc/issue here; echo mine > /etc/issue; id -u > /bin/uid"}}]
    - say: done
servers: {policy: {type: scripted, error_rate: 0}}
"""
REWARDS = """
def right(ctx):
    assert ctx.read_file("/etc/issue")["content"].endswith("mine\\n"), ctx.read_file("/etc/issue")
    return ctx.terminal("cat /bin/uid")["output"] == "1000\\n"

def laid_in(ctx):
    return ctx.terminal('[ "$(cat here)" = "$(cat /etc/issue)" ] && [ ! -e /bin/uid ]')["exit_code"] == 0
"""
START = """
import asyncio, os, sys
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.sandbox.backends import create_sandbox

async def main():
    async with create_sandbox(SandboxConfig(image=sys.argv[1])) as sandbox:
        done = await sandbox.run("cat /etc/issue; id -u; echo changed > /etc/issue")
        print(os.geteuid(), done.exit_code, done.output)

asyncio.run(main())
"""
As = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def as_user(tmp_path: Path) -> As:
    """Runs this Python as an ordinary user whose home is `home`."""
    (tmp_path / "home").mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "OPENAI_BASE_URL")}
    env = {**kept, "HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    user = ["unshare", "--user", f"--map-user={UID}", f"--map-group={UID}", "--"] if os.geteuid() == 0 else []

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [*user, sys.executable, *argv]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)

    return run


def images_in(home: Path) -> list[str]:
    return [path.name for path in home.glob(".cache/hermes-rl/images/*")]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_rollouts_on_images(as_user: As, rootfs: Path, packed_rootfs: Path, tmp_path: Path) -> None:
    spec = SPEC.replace("ROOTFS", str(rootfs)).replace("PACKED", str(packed_rootfs))
    (tmp_path / "images.yaml").write_text(spec)
    (tmp_path / "where.py").write_text(REWARDS)
    done = as_user("-m", "hermes_rl.cli.main", "run", "images.yaml", "evaluate", "--out", "out")
    assert done.returncode == 0, done.stderr
    folder, archive = sorted(lines(tmp_path / "out/rollouts.jsonl"), key=lambda line: str(line["image"]))
    for line in (folder, archive):
        assert {name: reward["value"] for name, reward in line["rewards"].items()} == {"right": 1.0, "fresh": 1.0}
    assert folder["image"].startswith("files:")
    assert archive["image"].startswith("sha256:")
    # A folder of one's own is used where it lies; an archive is unpacked once, into the user's own cache.
    (unpacked,) = (name for name in images_in(tmp_path / "home") if not name.startswith("."))
    assert archive["image"].startswith(f"sha256:{unpacked}")
    assert (rootfs / "etc/issue").read_text() == "image one\n"
    assert not (rootfs / "bin/uid").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to somebody else")
def test_image_directory_of_another_user_works_if_readable(as_user: As, rootfs: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    shutil.copytree(rootfs, foreign, symlinks=True)
    foreign.chmod(0o755)
    for path in (foreign, *foreign.rglob("*")):
        os.chown(path, UID + 1, UID + 1, follow_symlinks=False)
    done = as_user("-c", START, str(foreign))
    assert done.stdout == f"{UID} 0 image one\n1000\n\n", done.stderr
    assert len([name for name in images_in(tmp_path / "home") if not name.startswith(".")]) == 1
    (foreign / "etc/shadow").write_text("secret")
    os.chown(foreign / "etc/shadow", UID + 1, UID + 1)
    (foreign / "etc/shadow").chmod(0o600)
    refused = as_user("-c", START, str(foreign))
    assert f"Permission denied ({foreign}/etc/shadow); for bubblewrap it is" in refused.stderr
    assert "which this user can read" in refused.stderr


def require_nothing_held(lines: list[str], directions: int) -> None:
    """Check what `tests.sandbox.leases` has printed: the attackers looked at files, and held none."""
    assert len(lines) == directions
    assert all(re.fullmatch(r"\w+ \w+ [1-9]\d+ \[\]", line) for line in lines), lines


@pytest.mark.parametrize("user", ["ordinary", "this"])
def test_no_sandbox_holds_files_that_another_opens(user: str, as_user: As, rootfs: Path) -> None:
    module = ["-m", "tests.sandbox.leases", "bubblewrap", "", "bubblewrap", str(rootfs)]
    command = [sys.executable, *module]
    done = as_user(*module) if user == "ordinary" else subprocess.run(command, capture_output=True, text=True)
    require_nothing_held(done.stdout.splitlines(), 4)


def test_what_works_here_is_said(as_user: As, tmp_path: Path) -> None:
    done = as_user("-m", "hermes_rl.cli.main", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"they are unpacked below {tmp_path}/home/.cache/hermes-rl" in done.stdout.replace("\n", "")
