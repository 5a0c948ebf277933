"""Of files that others wrote, none behind a link, none that is no regular file, and none without a bound is read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hermes_rl.others_files import RefusedFileError, is_file, open_file, read_file, read_text


def test_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    file = tmp_path / "a" / "b" / "text"
    file.write_text("fünf")
    assert read_file(file) == read_file(file, tmp_path) == "fünf".encode()
    assert read_text(file) == "fünf"
    assert is_file(file) and not is_file(tmp_path / "a") and not is_file(tmp_path / "none")


@pytest.mark.parametrize("target", ["secret", "loop", "none"])
def test_link_is_not_followed(tmp_path: Path, target: str) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "loop").symlink_to("loop")
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(RefusedFileError, match="links are not followed"):
        read_file(link)


def test_directory_that_is_a_link_is_followed_only_above_the_top(tmp_path: Path) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "real" / "inner" / "file").write_text("x")
    (tmp_path / "real" / "away").symlink_to(tmp_path / "real" / "inner")
    (tmp_path / "link").symlink_to("real")
    assert read_file(tmp_path / "link" / "inner" / "file", tmp_path / "link") == b"x"
    with pytest.raises(RefusedFileError, match="links are not followed"):
        read_file(tmp_path / "link" / "away" / "file", tmp_path / "link")


def test_path_beyond_the_top_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "top").mkdir()
    for path in (tmp_path / "top" / ".." / "secret", tmp_path / "top"):
        with pytest.raises(RefusedFileError, match="is not below"):
            read_file(path, tmp_path / "top")


def test_special_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    (tmp_path / "folder").mkdir()
    for name, kind in (("pipe", "a named pipe"), ("socket", "a socket"), ("folder", "a directory")):
        with pytest.raises(RefusedFileError, match=kind):
            open_file(tmp_path / name)
    with pytest.raises(RefusedFileError, match="a device"):
        open_file(Path("/dev/zero"))


def test_file_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 101)
    assert len(read_file(tmp_path / "large", limit=101)) == 101
    with pytest.raises(RefusedFileError, match="more than 100 bytes"):
        read_file(tmp_path / "large", limit=100)


def test_text_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"ab\xff")
    with pytest.raises(RefusedFileError, match=r"is not UTF-8 \(byte 2\)"):
        read_text(tmp_path / "text")


def test_errors_of_the_system_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")
    with pytest.raises(NotADirectoryError):
        read_file(tmp_path / "file" / "inner", tmp_path)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("none")
    (tmp_path / "file").write_text("x")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a Path for each would be for nothing
    for name in ("link", "file", "none"):
        is_file(tmp_path / name)
    open_file(tmp_path / "file").close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
