"""Forty odd images of rows among good ones: each costs its own row, and the run goes on."""

from __future__ import annotations

import io
import os
import shutil
import socket
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from hermes_rl.runs.process import run_process
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import load_spec
from tests.rootfs import small_root

PROGRAMS = ("sh", "cat", "true", "sleep", "yes", "ls")


def _shell(change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    """Change the bytes of the shell."""

    def apply(root: Path) -> None:
        content = bytearray((root / "bin/sh").read_bytes())
        change(content)
        (root / "bin/sh").write_bytes(content)

    return apply


def _other(name: str, kind: Callable[[Path], object]) -> Callable[[Path], None]:
    """Put something else in the place of a file or a folder."""

    def apply(root: Path) -> None:
        path = root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        kind(path)

    return apply


def _program(name: str) -> Callable[[Path], None]:
    return lambda root: shutil.copy(root / "bin" / name, root / "bin/sh") and None


def _text(path: Path) -> None:
    path.write_text("x")
    path.chmod(0o755)


def _link(to: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(to)


FOLDERS: dict[str, Callable[[Path], object]] = {
    "no shell": lambda root: (root / "bin/sh").unlink(),
    "shell is text": _other("bin/sh", _text),
    "shell of no program": _other("bin/sh", lambda path: (path.write_text("#!/no/such\n"), path.chmod(0o755))),
    "shell of another processor": _shell(lambda content: content.__setitem__(slice(18, 20), struct.pack("<H", 8))),
    "half a shell": _shell(lambda content: content.__delitem__(slice(5000, None))),
    "shell is a folder": _other("bin/sh", Path.mkdir),
    "shell leads nowhere": _other("bin/sh", _link("/nowhere")),
    "shell leads to itself": _other("bin/sh", _link("sh")),
    "shell is a pipe": _other("bin/sh", os.mkfifo),
    "shell may not run": lambda root: (root / "bin/sh").chmod(0o644),
    **{f"shell is {name}": _program(name) for name in ("true", "cat", "yes", "sleep", "ls")},
    "no libraries": lambda root: [path.unlink() for path in root.rglob("*.so*")],
    "empty library": lambda root: [path.write_bytes(b"") for path in root.rglob("libc.so*")],
    "no etc": lambda root: shutil.rmtree(root / "etc"),
    "accounts are a folder": _other("etc/passwd", Path.mkdir),
    "accounts lead out": _other("etc/passwd", _link("/etc/shadow")),
    "etc leads out": _other("etc", _link("/../../root")),
    **{
        f"{name.replace('/', ' ')} is a file": _other(name, _text)
        for name in ("tmp", "proc", "dev", "home", ".hermes-rl")
    },
    **{f"{name} is a link": _other(name, _link("/etc")) for name in ("tmp", "proc", "home", ".hermes-rl", "usr")},
    "closed": lambda root: root.chmod(0),
}


def _archive(good: Path, path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        archive.add(good, ".")
        for entry, data in entries:
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def _entry(name: str, kind: bytes = tarfile.REGTYPE, to: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, to
    return entry


def odd_images(good: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Make them, and yield the name of a row and its image."""
    for name, change in FOLDERS.items():
        shutil.copytree(good, folder / name, symlinks=True)
        change(folder / name)
        yield name, str(folder / name)
    _archive(good, folder / "out.tar", (_entry("../../evil"), b"x"))
    _archive(good, folder / "link.tar", (_entry("x", tarfile.LNKTYPE, "../../etc/shadow"), b""))
    _archive(good, folder / "through.tar", (_entry("d", tarfile.SYMTYPE, "/tmp"), b""), (_entry("d/evil"), b"x"))
    _archive(good, folder / "device.tar", (_entry("sda", tarfile.BLKTYPE), b""))
    _archive(good, folder / "half.tar")
    (folder / "half.tar").write_bytes((folder / "half.tar").read_bytes()[:100_000])
    (folder / "empty.tar").write_bytes(b"")
    (folder / "random.tar").write_bytes(os.urandom(10_000))
    os.mkfifo(folder / "pipe.tar")
    (folder / "empty").mkdir()
    for path in ("out.tar", "link.tar", "through.tar", "device.tar", "half.tar", "empty.tar", "random.tar", "pipe.tar"):
        yield path, str(folder / path)
    yield from (("empty", "empty"), ("missing", "nowhere"), ("name of an engine", "python:3.12"), ("zero byte", "a\0b"))
    yield from (
        ("long", "x" * 5000),
        ("the machine", "/"),
        ("its processes", "/proc/self/root"),
        ("zeros", "/dev/zero"),
    )


@pytest.mark.slow
async def test_each_odd_image_costs_its_own_row(tmp_path: Path, own_cache: Path) -> None:
    tmp_path.chmod(0o755)
    good = small_root(tmp_path / "good", PROGRAMS)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    odd = {**dict(odd_images(good, tmp_path)), "a socket": str(tmp_path / "socket")}
    assert len(odd) >= 40
    names = [f"good {number}" for number in range(6)]
    rows = [{"name": name, "image": image} for name, image in [*odd.items(), *((name, str(good)) for name in names)]]
    spec = {
        "version": 1,
        "name": "odd",
        "dataset": {"items": rows, "key": "name", "shuffle": 0},
        "prompt": {"user": "Say where you are."},
        "toolsets": ["terminal"],
        "sandbox": {"image": "{{ image }}"},
        "rewards": {"right": {"fn": "exact_match", "args": {"target": "{{ name }}"}}},
        "solution": {"turns": [{"tools": [{"name": "terminal", "args": {"command": "ls /"}}]}, {"say": "{{ name }}"}]},
        "servers": {"policy": {"type": "scripted", "error_rate": 0}},
        "process": {"group_size": 1, "groups": len(rows), "drop_uniform": False, "concurrency": 4},
        "budget": {"max_failures": 1000},
    }
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump(spec))
    _, directory = await run_process(load_spec(tmp_path / "odd.yaml"), RunOptions("process", tmp_path / "out"))
    aside = {row["row_key"]: row["detail"] for row in directory.read_run_info()["quarantined"]}
    graded = {line.partition('"row_key":"')[2].partition('"')[0] for line in (directory.path / "groups.jsonl").open()}
    assert set(names) <= graded
    assert graded.isdisjoint(aside) and graded | aside.keys() == odd.keys() | set(names)
    assert len(aside) >= 35 and not [detail for detail in aside.values() if detail.startswith("unexpected")]
