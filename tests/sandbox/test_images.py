"""Sandboxes with a root file system of their own, from a folder or an archive."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import hashlib
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hermes_rl.errors import SandboxFailure, UserError
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import ResourceLimits, SandboxConfig
from hermes_rl.sandbox.bubblewrap import Bubblewrap
from hermes_rl.sandbox.helper_sandbox import HelperSandbox
from hermes_rl.sandbox.images import ZSTANDARD, overlay_refused, ready_image
from hermes_rl.sandbox.packages import runtime_folder
from tests.rootfs import small_root


async def test_what_is_in_it_is_the_image(rootfs: Path, packed_rootfs: Path) -> None:
    for image, mark in ((rootfs, "one"), (packed_rootfs, "two")):
        async with create_sandbox(SandboxConfig(image=str(image), workdir="/testbed")) as sandbox:
            assert await sandbox.read_file("/etc/issue") == f"image {mark}\n".encode()
            assert (await sandbox.run("pwd; id -u")).output == "/testbed\n1000\n"
            assert "perl" not in (await sandbox.run("ls /usr/bin")).output
            assert (await sandbox.run(["python3", "-c", "print('own python')"])).output == "own python\n"


async def test_changes_stay_in_the_sandbox(rootfs: Path) -> None:
    config = SandboxConfig(image=str(rootfs))
    async with create_sandbox(config) as one, create_sandbox(config) as two:
        assert (await one.run("rm -r /usr/bin/python3; echo mine > /etc/issue; touch /bin/new")).exit_code == 0
        assert await one.read_file("/etc/issue") == b"mine\n"
        assert await two.read_file("/etc/issue") == b"image one\n"
        assert (await two.run(["python3", "-c", ""])).exit_code == 0
    assert (rootfs / "etc/issue").read_text() == "image one\n"
    assert not (rootfs / "bin/new").exists()


async def test_disk_limit(rootfs: Path) -> None:
    async with create_sandbox(SandboxConfig(image=str(rootfs), limits=ResourceLimits(disk=8 << 20))) as sandbox:
        filled = await sandbox.run("for i in $(seq 1 20); do head -c 1000000 /dev/zero > /usr/$i || exit 7; done")
        assert filled.exit_code == 7


async def test_helper_is_out_of_reach(rootfs: Path) -> None:
    async with create_sandbox(SandboxConfig(image=str(rootfs))) as sandbox:
        for command in (
            "rm -rf /.hermes-rl", "mv /.hermes-rl /x", "touch /.hermes-rl/bin/python3", "chmod 777 /.hermes-rl",
            "ln -sf /bin/true /.hermes-rl/bin/python3", "cat /proc/1/environ", "ls /proc/1/fd", "echo > /proc/1/mem",
        ):  # fmt: skip
            assert (await sandbox.run(command)).exit_code != 0, command
        await sandbox.run("rm -rf /lib /lib64 /usr /bin/[b-z]*")
        assert await sandbox.read_file("/etc/issue") == b"image one\n"
        assert (await sandbox.run("true")).exit_code != 0
        assert sandbox.alive


def preload(root: Path) -> None:
    (root / "etc/ld.so.preload").write_text("/planted.so\n")


def preload_by_links(root: Path) -> None:
    (root / "elsewhere").write_text("/planted.so\n")
    (root / "etc").rename(root / "config")
    (root / "etc").symlink_to("config")
    (root / "config/ld.so.preload").symlink_to("/elsewhere")


@pytest.mark.parametrize("plant", [preload, preload_by_links])
async def test_no_library_of_the_image_is_loaded_into_the_helper(plant: Callable[[Path], None], tmp_path: Path) -> None:
    root = small_root(tmp_path / "root", ["sh", "cat"])
    mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/lib" in line]
    shutil.copy(next(path for path in mapped if Path(path).name.startswith("libm")), root / "planted.so")
    plant(root)
    async with create_sandbox(SandboxConfig(image=str(root))) as sandbox:
        assert "/planted.so" in (await sandbox.run("cat /proc/self/maps")).output
        assert isinstance(sandbox, HelperSandbox) and isinstance(sandbox.isolation, Bubblewrap)
        helper = Path(f"/proc/{sandbox.isolation.first}")
        assert "/.hermes-rl/" in (helper / "maps").read_text()
        assert "/planted.so" not in (helper / "maps").read_text()
        assert b"LC_ALL=C\0" in (helper / "environ").read_bytes()  # so it reads no locale of the image either


async def test_nothing_of_this_machine_is_in_it(rootfs: Path) -> None:
    async with create_sandbox(SandboxConfig(image=str(rootfs))) as sandbox:
        mounts = (await sandbox.run("cat /proc/self/mountinfo; ls /")).output
        assert str(rootfs) not in mounts
        assert "scratch" not in (await sandbox.run("ls -a /")).output
        assert (await sandbox.run("ls /oldroot /scratch /image /runtime")).exit_code != 0


async def test_many_start_at_once_from_an_archive(packed_rootfs: Path, own_cache: Path) -> None:
    before = {path.name for path in (own_cache / "hermes-rl").glob("images/*")}

    async def issue() -> bytes:
        async with create_sandbox(SandboxConfig(image=str(packed_rootfs))) as sandbox:
            return await sandbox.read_file("/etc/issue")

    assert set(await asyncio.gather(*(issue() for _ in range(8)))) == {b"image two\n"}
    after = {path.name for path in (own_cache / "hermes-rl").glob("images/*")}
    assert len([name for name in after - before if not name.startswith(".")]) <= 1
    assert not [name for name in after if name.endswith(".partial")]


def archive(path: Path, *entries: tuple[str, bytes, str, bytes]) -> Path:
    """An archive of (name, kind, link target, content)."""
    with tarfile.open(path, "w") as packed:
        for name, kind, link, content in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size, entry.mode = kind, link, len(content), 0o4755
            packed.addfile(entry, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    "entries",
    [
        [("../out", tarfile.REGTYPE, "", b"x")],
        [("a/../../out", tarfile.REGTYPE, "", b"x")],
        [("way", tarfile.SYMTYPE, "/tmp", b""), ("way/out", tarfile.REGTYPE, "", b"x")],
        [("way", tarfile.SYMTYPE, "..", b""), ("way/sub", tarfile.DIRTYPE, "", b"")],
        [("hard", tarfile.LNKTYPE, "../../etc/passwd", b"")],
        [("way", tarfile.SYMTYPE, "/etc", b""), ("hard", tarfile.LNKTYPE, "way/passwd", b"")],
        [("link", tarfile.SYMTYPE, "/etc/passwd", b""), ("hard", tarfile.LNKTYPE, "link", b"")],
    ],
)
def test_archive_that_leads_out_is_refused(tmp_path: Path, entries: list[tuple[str, bytes, str, bytes]]) -> None:
    with pytest.raises(UserError, match="cannot be unpacked"):
        ready_image(str(archive(tmp_path / "bad.tar", *entries)))
    assert not Path("/tmp/out").exists()


def test_archive_with_devices_and_links(tmp_path: Path) -> None:
    folder = ready_image(
        str(
            archive(
                tmp_path / "odd.tar",
                ("/dev/sda", tarfile.BLKTYPE, "", b""),
                ("fifo", tarfile.FIFOTYPE, "", b""),
                ("real", tarfile.REGTYPE, "", b"first"),
                ("real", tarfile.REGTYPE, "", b"second"),
                ("hard", tarfile.LNKTYPE, "real", b""),
                ("link", tarfile.SYMTYPE, "/etc/passwd", b""),
                ("link", tarfile.REGTYPE, "", b"replaces the link"),
            )
        )
    ).folder
    assert sorted(path.name for path in folder.iterdir()) == ["hard", "link", "real"]
    assert (folder / "hard").read_bytes() == b"second"
    assert (folder / "link").read_bytes() == b"replaces the link"
    assert not any(path.stat().st_mode & 0o7000 for path in folder.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes run as another user")
def test_folder_of_root_is_copied_for_the_agent(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/secret").write_text("x")
    (tmp_path / "etc/secret").chmod(0o600)
    image = ready_image(str(tmp_path))
    copy = image.folder
    assert copy != tmp_path
    assert (copy / "etc/secret").stat().st_uid == 65534
    (tmp_path / "etc/more").write_text("y")
    os.utime(tmp_path, (1, 1))
    assert (ready_image(str(tmp_path)).folder / "etc/more").read_text() == "y"
    assert ready_image(str(tmp_path)).digest != image.digest


@pytest.mark.parametrize("image", ["/nowhere", "not-an-archive"])
def test_image_that_is_none(tmp_path: Path, image: str) -> None:
    (tmp_path / "not-an-archive").write_bytes(b"hello" * 1000)
    with pytest.raises(UserError, match=r"sandbox\.image"):
        ready_image(str(tmp_path / image))


def test_kernel_that_refuses_layers() -> None:
    error = overlay_refused("bwrap: Can't make overlay mount on /newroot/ with options …: Operation not permitted")
    assert error is not None
    assert "modprobe overlay" in str(error)
    assert overlay_refused("bwrap: something else") is None


@pytest.mark.parametrize("shell", [b"\x7fELF of another processor", b""], ids=["other processor", "empty"])
async def test_an_image_whose_shell_cannot_run_does_not_start(shell: bytes, tmp_path: Path) -> None:
    """Its rollouts were graded, each command a failure of the agent."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").write_bytes(shell)
    (tmp_path / "bin" / "sh").chmod(0o755)
    with pytest.raises(SandboxFailure, match="has a /bin/sh that cannot run"):
        async with create_sandbox(SandboxConfig(image=str(tmp_path))):
            pass


async def test_image_without_shell(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    async with create_sandbox(SandboxConfig(image=str(tmp_path))) as sandbox:
        with pytest.raises(SandboxFailure, match="has no /bin/sh"):
            await sandbox.run("true")
        await sandbox.write_file("x", b"files work")
        assert await sandbox.read_file("x") == b"files work"


def small_tar(words: bytes) -> bytes:
    """Two files, the second large enough to be cut."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as packed:
        for name, content in (("etc/issue", words), ("noise", os.urandom(1 << 20))):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            packed.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def in_two_parts(compress: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """As parallel compressors write: each part is whole by itself."""
    return lambda data: compress(data[:5000]) + compress(data[5000:])


def zstandard(data: bytes) -> bytes:
    if shutil.which("zstd") is None:
        pytest.skip("there is no program zstd (apt-get install zstd)")
    return subprocess.run(["zstd", "-qc"], input=data, capture_output=True, check=True).stdout


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "gz-parts": in_two_parts(gzip.compress),
    "bz2-parts": in_two_parts(bz2.compress),
    "xz": lzma.compress,
    "xz-parts": in_two_parts(lzma.compress),
    "zst": zstandard,
    "zst-parts": in_two_parts(zstandard),
}


@pytest.mark.parametrize("kind", COMPRESSORS)
async def test_every_compression(kind: str, tmp_path: Path) -> None:
    archive = tmp_path / f"root.tar.{kind}"
    archive.write_bytes(COMPRESSORS[kind](small_tar(kind.encode())))
    async with create_sandbox(SandboxConfig(image=str(archive))) as sandbox:
        assert await sandbox.read_file("/etc/issue") == kind.encode()
        assert (await sandbox.stat("/noise")).size == 1 << 20
        assert sandbox.image_digest == f"sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}"


@pytest.mark.parametrize("harm", ["cut", "changed"])
@pytest.mark.parametrize("kind", ["gz", "xz", "zst"])
def test_archive_that_is_damaged_is_refused(kind: str, harm: str, tmp_path: Path, own_cache: Path) -> None:
    packed = COMPRESSORS[kind](small_tar(b"whole"))
    middle = len(packed) // 2
    changed = packed[:middle] + bytes([packed[middle] ^ 255]) + packed[middle + 1 :]
    (tmp_path / "bad.tar").write_bytes(packed[:middle] if harm == "cut" else changed)
    before = images_of(own_cache)
    with pytest.raises(UserError, match=r"bad\.tar cannot be unpacked: .+"):
        ready_image(str(tmp_path / "bad.tar"))
    assert images_of(own_cache) == before


def images_of(cache: Path) -> set[str]:
    return {path.name for path in (cache / "hermes-rl").glob("images/*") if path.suffix != ".lock"}


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python reads zstd itself")
def test_without_the_program_zstd_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root.tar.zst").write_bytes(ZSTANDARD + b"whatever")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"need Python 3\.14 or the program zstd \(apt install zstd\)"):
        ready_image(str(tmp_path / "root.tar.zst"))


async def test_a_careful_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that only root may read would be closed to the user whom root's sandboxes run as."""
    with tempfile.TemporaryDirectory() as top:
        Path(top).chmod(0o755)
        monkeypatch.setenv("XDG_CACHE_HOME", f"{top}/cache")
        (tmp_path / "root.tar").write_bytes(small_tar(b"closed"))
        runtime_folder.cache_clear()
        before = os.umask(0o077)
        try:
            async with create_sandbox(SandboxConfig(image=str(tmp_path / "root.tar"))) as sandbox:
                assert await sandbox.read_file("/etc/issue") == b"closed"
        finally:
            os.umask(before)
            runtime_folder.cache_clear()
