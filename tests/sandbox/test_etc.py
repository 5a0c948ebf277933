"""What a sandbox sees as /etc: the same, whether one folder is shown or each file by itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hermes_rl.sandbox import SandboxConfig, create_sandbox
from hermes_rl.sandbox.etc import etc_folder

SEEN = """
cd /etc; ls -A; cat passwd group hosts hostname; wc -c < ld.so.cache; ls ssl/certs | wc -l; readlink -f alternatives/awk
touch new 2>&1; rm -f passwd 2>&1
"""


async def seen() -> str:
    async with create_sandbox(SandboxConfig()) as sandbox:
        return (await sandbox.run(SEEN)).output


async def test_it_is_the_same_where_the_folder_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_the_names_of_hosts_are_those_of_this_machine_where_a_sandbox_has_its_network() -> None:
    async with create_sandbox(SandboxConfig(network=True)) as sandbox:
        assert (await sandbox.run("cat /etc/resolv.conf")).output == Path("/etc/resolv.conf").read_text()
