"""What a sandbox sees as /etc: the same, whether one folder is shown or each file by itself."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_rl.sandbox import etc
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.sandbox.etc import etc_folder

SEEN = """
cd /etc; ls -A; cat passwd group hosts hostname; wc -c < ld.so.cache; ls ssl/certs | wc -l; readlink -f alternatives/awk
touch new 2>&1; rm -f passwd 2>&1
"""


@pytest.fixture(autouse=True)
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the machine's /etc, in which no installation of packages changes anything."""
    folder = tempfile.TemporaryDirectory()  # the one of the test may be entered by its owner alone
    copy = Path(folder.name)
    copy.chmod(0o755)
    for name in (*etc.ETC, etc.RESOLVER):
        here, there = Path("/etc", name), copy / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if here.is_dir():
            shutil.copytree(here, there, symlinks=True)
        elif here.exists():
            shutil.copyfile(here, there)
    monkeypatch.setattr(etc, "SOURCE", copy)
    with folder:
        yield copy


async def seen() -> str:
    async with create_sandbox(SandboxConfig()) as sandbox:
        return (await sandbox.run(SEEN)).output


async def test_etc_is_the_same_without_a_cached_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = await seen()
    assert "user:x:1000:1000" in kept
    assert "shadow" not in kept
    assert kept.count("Read-only file system") == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("no folder")
    assert etc_folder(others=False) is None
    alone = await seen()
    assert alone.replace("resolv.conf\n", "") == kept.replace("resolv.conf\n", "")


def test_a_folder_that_others_may_not_enter_is_not_shown_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tmp_path.chmod(0o700)
    assert etc_folder(others=True) is None


async def test_a_cache_that_is_emptied_while_a_program_runs_is_filled_again() -> None:
    before, folder = await seen(), etc_folder(others=False)
    assert folder is not None
    shutil.rmtree(folder)
    assert await seen() == before


def test_recreated_etc_directory_is_named_by_its_new_content(source: Path) -> None:
    former = etc_folder(others=False)
    assert former is not None
    (source / "services").write_text("echo 7/tcp\n")
    assert etc_folder(others=False) == former, "a program shows all of its sandboxes the same, while it is there"
    shutil.rmtree(former)
    later = etc_folder(others=False)
    assert later is not None and later != former and not former.exists()
    assert (later / "services").read_text() == "echo 7/tcp\n"


async def test_networked_sandbox_uses_the_resolver_of_the_host(source: Path) -> None:
    async with create_sandbox(SandboxConfig(network=True)) as sandbox:
        assert (await sandbox.run("cat /etc/resolv.conf")).output == (source / "resolv.conf").read_text()
