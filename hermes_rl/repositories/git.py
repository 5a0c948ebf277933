"""Fetch files of a git repository at a commit, by the program `git`.

Owns the use of git: it only provides objects, and this module writes the files. So no hook, filter, attribute or
submodule of a repository has an effect, and files are checked and bounded before they are written.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from hermes_rl.errors import UserError
from hermes_rl.repositories.address import Address
from hermes_rl.repositories.files import MOST_BYTES, RepositoryFile, Unfit
from hermes_rl.terminal_text import escape_controls

SECONDS = 600
"""Timeout of a fetch in seconds."""
_BLOCK = 512
_NOT_OURS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_OBJECT_DIRECTORY",
             "GIT_ALTERNATE_OBJECT_DIRECTORIES")  # fmt: skip
"""Variables of a process that git itself has started in a repository."""
_SETTINGS = (
    "core.hooksPath=/dev/null", "core.fsmonitor=false", "fetch.recurseSubmodules=false", "gc.auto=0",
    "maintenance.auto=false", "fetch.unpackLimit=1", "transfer.unpackLimit=1", "fetch.showForcedUpdates=false",
)  # fmt: skip
_POINTER = b"version https://git-lfs.github.com/spec/"


class Named(NamedTuple):
    """Current meaning of a revision: a commit, and the name by which to request it."""

    commit: str
    refspec: str


def git_commit(address: Address) -> Named:
    """Return the current commit of a revision.

    Raises `UserError` if the repository cannot be reached, or has no such revision.
    """
    revision = address.revision
    patterns = ["HEAD"] if revision is None else [f"refs/tags/{revision}", f"refs/tags/{revision}^{{}}",
                                                  f"refs/heads/{revision}"]  # fmt: skip
    lines = (
        _run_git(address, ["ls-remote", "--quiet", "--", address.url, *patterns])
        .decode("utf-8", "replace")
        .splitlines()
    )
    commits = {name: commit for commit, _, name in (line.partition("\t") for line in lines)}
    for name in patterns:
        if name in commits:
            return Named(commits.get(f"{name}^{{}}", commits[name]), name)
    if revision is None:
        raise UserError(f"{address} is empty: it has no commit")
    raise UserError(
        f"{address.repository} has no branch and no tag {revision}; a commit is named by all of its 40 digits"
    )


def git_files(address: Address, revision: Named, folder: Path) -> tuple[str, Iterator[RepositoryFile]]:
    """Fetch a commit into an empty directory; return the commit, and its files.

    Raises `UserError` if it is not available, or is too large.
    """
    _run_git(address, ["init", "--quiet", "--bare", "--template=", "--", str(folder)])
    directory_options = ["-C", str(folder)]
    _run_git(
        address, [*directory_options, "fetch", "--quiet", "--depth=1", "--no-tags", "--", address.url, revision.refspec]
    )
    commit = _run_git(address, [*directory_options, "rev-parse", "--verify", "FETCH_HEAD^{commit}"]).decode().strip()
    listing = _run_git(address, [*directory_options, "ls-tree", "-r", "-z", "-l", "--full-tree", commit])
    return commit, _read_entries(address, directory_options, listing)


def _read_entries(address: Address, directory_options: Sequence[str], listing: bytes) -> Iterator[RepositoryFile]:
    entries: list[tuple[str, str, str, int]] = []
    for line in listing.decode("utf-8", "surrogateescape").split("\0")[:-1]:
        about, _, path = line.partition("\t")
        permissions, kind, blob, length = about.split()
        if kind == "blob":  # else a submodule: another repository, which must not be fetched
            entries.append((path, permissions, blob, int(length)))
    yield from (RepositoryFile(name, size, link=mode == "120000") for name, mode, _, size in entries)
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
        stdin.write("".join(f"{blob}\n" for _, _, blob, _ in entries).encode())
        stdin.seek(0)
        _run_git(address, [*directory_options, "cat-file", "--batch"], stdin.fileno(), stdout.fileno())
        stdout.seek(0)
        for name, mode, _, size in entries:
            stdout.readline()
            content = stdout.read(size)
            stdout.read(1)
            if content.startswith(_POINTER) and size < 1024:
                raise Unfit(f"{escape_controls(name)} is stored in Git LFS, not in the repository: remove it from LFS")
            yield RepositoryFile(name, size, link=mode == "120000", executable=mode == "100755", content=content)


def _run_git(address: Address, arguments: Sequence[str], stdin: int | None = None, into: int | None = None) -> bytes:
    """Run git, bounded in time and in the size of the file that it writes; return its output.

    Raises `UserError` if git is not installed, or fails.
    """
    scheme = urlsplit(address.url).scheme
    environ = {name: value for name, value in os.environ.items() if name not in _NOT_OURS}
    environ |= {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "", "SSH_ASKPASS": "", "GIT_ALLOW_PROTOCOL": scheme}
    environ |= {"LC_ALL": "C", "GIT_LFS_SKIP_SMUDGE": "1"}
    environ.setdefault("GIT_SSH_COMMAND", "ssh -oBatchMode=yes")
    settings = [word for setting in _SETTINGS for word in ("-c", setting)]
    limited = ["sh", "-c", 'ulimit -f "$0" && exec git "$@"', str(2 * MOST_BYTES // _BLOCK), *settings, *arguments]
    with tempfile.TemporaryFile() as stderr:
        try:
            child = subprocess.Popen(
                limited, stdin=subprocess.DEVNULL if stdin is None else stdin, stderr=stderr, env=environ,
                stdout=subprocess.PIPE if into is None else into, start_new_session=True,
                restore_signals=False,  # as in Python, a file that is too large gives an error, not a signal
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"git cannot be started ({error.strerror}): install it to fetch {address}") from error
        try:
            output, _ = child.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise UserError(f"{address}: git was not ready after {SECONDS} s; try again") from None
        finally:
            if child.returncode is None:  # git starts child processes for the transfer, which would continue
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if child.returncode == 0:
            return output or b""
        stderr.seek(0)
        error_text = " ".join(stderr.read(4000).decode("utf-8", "replace").split()) or f"status {child.returncode}"
    if child.returncode == 127:
        raise UserError(f"git is not installed, and {address} needs it")
    if "File too large" in error_text:
        raise UserError(f"{address} is larger than {2 * MOST_BYTES:,} bytes: an environment is code and few rows")
    hint = "" if "://" in address.repository else "; nothing of that name is here, so it was taken for one on GitHub"
    raise UserError(f"{address} cannot be fetched: git says: {escape_controls(error_text)[:600]}{hint}")
