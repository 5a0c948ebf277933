"""Environments fetched from real git repositories: pinned, bounded, and without an effect of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.errors import UserError
from hermes_rl.repositories import cache as cache_module
from hermes_rl.repositories import files, git
from hermes_rl.repositories.address import Address, address_of
from hermes_rl.repositories.cache import Fetched, fetched
from tests.repositories.gits import ENVIRONMENT, REWARDS, GitServer, commit, crafted, repository
from tests.repositories.gits import git as run_git


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hermes-rl" / "environments"


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    return repository(tmp_path / "origin")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GitServer]:
    with GitServer(tmp_path) as running:
        yield running


def fetch(text: str) -> Fetched:
    address = address_of(text)
    assert isinstance(address, Address)
    return fetched(address)


def contents(found: Fetched) -> dict[str, str]:
    return {path.relative_to(found.folder).as_posix(): path.read_text() for path in files.files_of(found.folder)}


@pytest.mark.parametrize("revision", [None, "main", "v1", "annotated", "a/branch", "commit"])
def test_each_kind_of_revision_becomes_its_commit(origin: Path, revision: str | None) -> None:
    wanted = run_git(origin, "rev-parse", "HEAD")
    run_git(origin, "tag", "v1")
    run_git(origin, "tag", "-m", "said", "annotated")
    run_git(origin, "branch", "a/branch")
    revision = wanted if revision == "commit" else revision
    found = fetch(f"git+file://{origin}" + (f"@{revision}" if revision else ""))
    assert found.address.revision == wanted
    assert contents(found) == ENVIRONMENT
    assert found.to_record() == {
        "address": f"git+file://{origin}@{wanted}",
        "commit": wanted,
        "digest": found.digest,
    }


def test_commit_is_fetched_once_over_http_and_then_read_from_the_cache(
    origin: Path, server: GitServer, tmp_path: Path
) -> None:
    old = run_git(origin, "rev-parse", "HEAD")
    commit(origin, {"rewards.py": "def right(): return 0\n"})
    address = f"git+{server.url}/origin"
    found = fetch(f"{address}@{old}")
    assert contents(found) == ENVIRONMENT
    assert any("git-upload-pack" in path for path in server.asked)
    server.asked.clear()
    assert fetch(f"{address}@{old}") == found
    assert server.asked == []
    assert fetch(address).address.revision != old
    shutil.rmtree(origin)
    assert fetch(f"{address}@{old}") == found
    with pytest.raises(UserError, match=f"cannot be fetched.*here already: {re.escape(address)}@"):
        fetch(address)


def test_what_moved_under_a_tag_has_another_digest(origin: Path) -> None:
    run_git(origin, "tag", "v1")
    first = fetch(f"git+file://{origin}@v1")
    first.trust()
    commit(origin, {"rewards.py": "def right(): return 1\n"})
    run_git(origin, "tag", "-f", "v1")
    second = fetch(f"git+file://{origin}@v1")
    assert second.digest != first.digest
    assert first.trusted
    assert not second.trusted
    assert fetch(str(first.address)).trusted


def test_content_that_changed_in_the_cache_is_fetched_again(origin: Path) -> None:
    found = fetch(f"git+file://{origin}@main")
    (found.folder / "rewards.py").write_text("import os\n")
    assert contents(fetch(str(found.address))) == ENVIRONMENT
    (found.folder / "more.py").write_text("import os\n")
    shutil.rmtree(origin)
    with pytest.raises(UserError, match="cannot be fetched"):
        fetch(str(found.address))


@pytest.mark.parametrize("damaged", [False, True])
def test_concurrent_fetches_of_a_commit_share_one_intact_copy(
    origin: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    address = f"git+file://{origin}@{run_git(origin, 'rev-parse', 'HEAD')}"
    if damaged:
        (fetch(address).folder / "rewards.py").write_text("import os\n")
    both, met = [], threading.Barrier(2)
    written = cache_module.write_files

    def write_together(*given: Any) -> None:
        written(*given)
        with suppress(threading.BrokenBarrierError):
            met.wait(0.5)  # both have fetched, where both do

    def fetch_one() -> None:
        found = fetch(address)
        both.append((found.folder.stat().st_ino, found))

    monkeypatch.setattr(cache_module, "write_files", write_together)
    threads = [threading.Thread(target=fetch_one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (inode, found), (other_inode, other) = both
    assert inode == other_inode
    assert contents(found) == contents(other) == ENVIRONMENT


def test_compiled_files_in_the_cache_do_not_count_as_a_change(origin: Path) -> None:
    found = fetch(f"git+file://{origin}")
    (found.folder / "__pycache__").mkdir()
    (found.folder / "__pycache__" / "rewards.pyc").write_bytes(b"\0")
    shutil.rmtree(origin)
    assert fetch(str(found.address)) == found


def test_hooks_filters_attributes_and_submodules_have_no_effect(origin: Path, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    hook = origin / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {touched}\n")
    hook.chmod(0o755)
    other = repository(tmp_path / "other")
    run_git(origin, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", f"file://{other}", "sub")
    commit(origin, {".gitattributes": "*.py filter=evil export-ignore\n", "hooks/post-checkout": "touch x\n"})
    run_git(origin, "config", "core.fsmonitor", f"touch {touched}")
    run_git(origin, "config", "filter.evil.smudge", f"touch {touched}")
    found = fetch(f"git+file://{origin}")
    assert set(contents(found)) == {*ENVIRONMENT, ".gitattributes", ".gitmodules", "hooks/post-checkout"}
    assert contents(found)["rewards.py"] == REWARDS
    assert not touched.exists()


def test_compiled_files_of_a_repository_are_excluded(origin: Path) -> None:
    commit(origin, {"__pycache__/rewards.cpython-311.pyc": b"\0", "hidden.pyc": b"\0", "a/__pycache__/b.py": b""})
    found = fetch(f"git+file://{origin}")
    assert sorted(path.name for path in found.folder.iterdir()) == sorted(ENVIRONMENT)


@pytest.mark.parametrize(
    ("links", "leads_out"),
    [
        ({"a": "rewards.py", "folder/b": "../rewards.py"}, False),
        ({"a": "/etc/passwd"}, True),
        ({"a": "../../x"}, True),
        ({"x/y/up": "../../", "a": "x/y/up/../x"}, True),  # from where `up` leads, `..` is outside
        ({"a": "b", "b": "a"}, False),
    ],
)
def test_links_stay_in_the_repository(origin: Path, links: dict[str, str], leads_out: bool) -> None:
    for name, target in links.items():
        (origin / name).parent.mkdir(parents=True, exist_ok=True)
        (origin / name).symlink_to(target)
    commit(origin, {})
    if not leads_out:
        assert (fetch(f"git+file://{origin}").folder / "a").is_symlink()
        return
    with pytest.raises(UserError, match="is a link that leads out of the repository"):
        fetch(f"git+file://{origin}")


@pytest.mark.parametrize(
    "name", ["../out.py", "a/../../out.py", "/out.py", ".git/config", "A/.GIT/hooks/x", "a\\b", "a\nb"]
)
def test_names_that_lead_elsewhere_are_refused(origin: Path, cache: Path, name: str) -> None:
    crafted(origin, ("100644", name, b"import os\n"))
    with pytest.raises(UserError, match=r"not a name of a file that may be written here|cannot be fetched"):
        fetch(f"git+file://{origin}")
    assert not list(cache.rglob("out.py"))


def test_a_file_through_a_link_is_not_written(origin: Path, tmp_path: Path) -> None:
    crafted(origin, ("120000", "d", str(tmp_path).encode()), ("100644", "d/out.py", b"import os\n"))
    with pytest.raises(UserError):
        fetch(f"git+file://{origin}")
    assert not (tmp_path / "out.py").exists()


def test_what_is_too_large_is_refused_by_name_before_it_is_written(
    origin: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 10_000)
    commit(origin, {"rows.jsonl": b"0" * 20_000})
    with pytest.raises(UserError, match=r"rows.jsonl \(20,000 bytes\).*`dataset.path`"):
        fetch(f"git+file://{origin}")
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_git_writes_no_more_than_it_may(origin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git, "MOST_BYTES", 100_000)
    commit(origin, {"rows.bin": os.urandom(1_000_000)})
    with pytest.raises(UserError, match="is larger than 200,000 bytes"):
        fetch(f"git+file://{origin}")


def test_too_many_files_are_refused(origin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_FILES", 3)
    commit(origin, {f"{number}.txt": "" for number in range(3)})
    with pytest.raises(UserError, match="more than 3 files"):
        fetch(f"git+file://{origin}")


def test_git_ends_in_time_with_all_that_it_has_started(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "git").write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/started\nwait\n")
    (programs / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setattr(git, "SECONDS", 1)
    with pytest.raises(UserError, match="not ready after 1 s"):
        fetch(f"git+file://{origin}")
    child = int((tmp_path / "started").read_text())
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(child)], capture_output=True, text=True).stdout.strip()
    assert state[:1] in ("", "Z")


def test_a_revision_that_is_not_there_and_a_repository_that_is_not(origin: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no branch and no tag v9"):
        fetch(f"git+file://{origin}@v9")
    with pytest.raises(UserError, match="cannot be fetched"):
        fetch(f"git+file://{origin}@{'0' * 40}")
    with pytest.raises(UserError, match="cannot be fetched: git says"):
        fetch(f"git+file://{tmp_path}/nothing")


def test_git_lfs_pointer_is_refused(origin: Path) -> None:
    commit(origin, {"rows.jsonl": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"})
    with pytest.raises(UserError, match=r"rows.jsonl is stored in Git LFS"):
        fetch(f"git+file://{origin}")


def test_fetch_without_credentials_fails_without_a_password_prompt(server: GitServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be fetched"):
        fetch(f"git+{server.url}/nothing@v1")


def test_damaged_cache_record_is_rewritten(origin: Path) -> None:
    found = fetch(f"git+file://{origin}")
    record = found.folder.with_name(f"{found.address.revision}.json")
    record.write_text("{")
    assert fetch(str(found.address)) == found
    assert json.loads(record.read_text())["digest"] == found.digest
