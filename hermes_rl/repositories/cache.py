"""Cache of fetched environments, each commit once, with the user's trust in them.

Below `environments/` of the cache is a directory for each repository and in it one for each commit; next to that is the
digest of its files, which proves that they are unchanged. `trusted/` has a file for each digest that the user has
accepted to run. Content that differs from its digest is fetched again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.errors import UserError
from hermes_rl.others_files import read_regular
from hermes_rl.repositories.address import Address
from hermes_rl.repositories.files import Unfit, digest_of, write_files
from hermes_rl.repositories.git import Named, git_commit, git_files
from hermes_rl.repositories.hub import hub_commit, hub_files


def cache_home() -> Path:
    """Return $XDG_CACHE_HOME/hermes-rl if set, else ~/.cache/hermes-rl, for root /var/cache/hermes-rl."""
    top = os.environ.get("XDG_CACHE_HOME")
    default = Path("/var/cache") if os.geteuid() == 0 else Path.home() / ".cache"
    return (Path(top) if top else default) / "hermes-rl"


@dataclass(frozen=True)
class Fetched:
    """A fetched repository; `address` names its commit."""

    address: Address
    folder: Path
    digest: str

    @property
    def path(self) -> Path:
        """Directory or spec in it to which the address refers."""
        return self.folder / self.address.inside

    @property
    def trusted(self) -> bool:
        """True if the user has accepted to run exactly this content."""
        return is_trusted(self.digest)

    def trust(self) -> None:
        """Record that the user has accepted to run exactly this content."""
        trust(self.digest, str(self.address))

    def to_record(self) -> dict[str, str]:
        """Return the entry for the record of a run."""
        return {"address": str(self.address), "commit": str(self.address.revision), "digest": self.digest}


def fetched(address: Address) -> Fetched:
    """Return a repository at the current commit of the address; only missing content is fetched.

    An address with a fetched commit needs no network. Raises `UserError` if it is not available, or is not an
    environment.
    """
    repository = _environments_folder() / _folder_name(address)
    if address.commit is not None:
        revision = Named(address.commit, address.commit)
    else:
        try:
            revision = git_commit(address) if address.kind == "git" else Named(hub_commit(address), "")
        except UserError as error:
            raise UserError(f"{error}{_describe_cached(repository, address)}") from error
    if (cached_copy := _load_cached(repository, address.at_commit(revision.commit))) is not None:
        return cached_copy
    try:
        repository.mkdir(parents=True, exist_ok=True)
        # One process fetches at a time, so that none replaces a directory that another one has just received.
        with _lock_folder(repository), tempfile.TemporaryDirectory(prefix=".fetching-", dir=repository) as work:
            return _load_cached(repository, address.at_commit(revision.commit)) or _fetch_commit(
                repository, address, revision, Path(work)
            )
    except Unfit as error:
        raise UserError(f"{address}: {error}") from error
    except OSError as error:
        raise UserError(f"{address} cannot be stored in {repository}: {error.strerror or error}") from error


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _fetch_commit(repository: Path, address: Address, revision: Named, work: Path) -> Fetched:
    files = work / "files"
    files.mkdir()
    if address.kind == "git":
        commit, entries = git_files(address, revision, work / "git")
    else:
        commit, entries = revision.commit, hub_files(address, revision.commit)
    if address.commit not in (None, commit):
        raise UserError(f"{address}: another commit was given, {commit}")
    if (cached_copy := _load_cached(repository, address.at_commit(commit))) is not None:
        return cached_copy  # the revision has moved to a commit that is here
    write_files(entries, files)
    digest = digest_of(files)
    metadata = json.dumps({"address": str(address.at_commit(commit)), "digest": digest})
    (work / "digest").write_text(metadata, encoding="utf-8")
    shutil.rmtree(repository / commit, ignore_errors=True)  # its content is no longer the fetched content
    files.rename(repository / commit)
    (work / "digest").rename(repository / f"{commit}.json")
    return Fetched(address.at_commit(commit), repository / commit, digest)


def _load_cached(repository: Path, address: Address) -> Fetched | None:
    """Return the fetched content of a commit, or None if it is missing or was changed."""
    folder = repository / str(address.revision)
    try:
        digest = str(json.loads(read_regular(repository / f"{address.revision}.json"))["digest"])
        return Fetched(address, folder, digest) if digest_of(folder) == digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _describe_cached(repository: Path, address: Address) -> str:
    """Return a description of the addresses that can be used without a network."""
    digest_files = sorted(repository.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    if not digest_files:
        return ""
    return "; here already: " + ", ".join(str(address.at_commit(path.stem)) for path in digest_files[:3])


def _folder_name(address: Address) -> str:
    """Return a recognizable name that no other repository has."""
    name = address.url.rstrip("/").rpartition("/")[2].removesuffix(".git")
    safe = "".join(char if char.isascii() and (char.isalnum() or char in "-_") else "-" for char in name)[:60]
    return f"{safe}-{hashlib.sha256(f'{address.kind} {address.url}'.encode()).hexdigest()[:12]}"


def _environments_folder() -> Path:
    return cache_home() / "environments"


def is_trusted(digest: str) -> bool:
    """Return True if the user has accepted to run the content with this digest."""
    return _trust_file(digest).is_file()


def trust(digest: str, description: str) -> None:
    """Record that the user has accepted to run the content with this digest; `description` describes it for people."""
    _trust_file(digest).parent.mkdir(parents=True, exist_ok=True)
    _trust_file(digest).write_text(f"{description}\n", encoding="utf-8")


def _trust_file(digest: str) -> Path:
    return _environments_folder() / "trusted" / digest
