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

    def described(self) -> dict[str, str]:
        """Return the entry for the record of a run."""
        return {"address": str(self.address), "commit": str(self.address.revision), "digest": self.digest}


def fetched(address: Address) -> Fetched:
    """Return a repository at the current commit of the address; only missing content is fetched.

    An address with a fetched commit needs no network. Raises `UserError` if it is not available, or is not an
    environment.
    """
    repository = _environments() / _folder_name(address)
    if address.commit is not None:
        named = Named(address.commit, address.commit)
    else:
        try:
            named = git_commit(address) if address.kind == "git" else Named(hub_commit(address), "")
        except UserError as error:
            raise UserError(f"{error}{_kept(repository, address)}") from error
    if (here := _here(repository, address.at(named.commit))) is not None:
        return here
    try:
        repository.mkdir(parents=True, exist_ok=True)
        # One process fetches at a time, so that none replaces a directory that another one has just received.
        with _locked(repository), tempfile.TemporaryDirectory(prefix=".fetching-", dir=repository) as work:
            return _here(repository, address.at(named.commit)) or _fetch(repository, address, named, Path(work))
    except Unfit as error:
        raise UserError(f"{address}: {error}") from error
    except OSError as error:
        raise UserError(f"{address} cannot be kept in {repository}: {error.strerror or error}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _fetch(repository: Path, address: Address, named: Named, work: Path) -> Fetched:
    files = work / "files"
    files.mkdir()
    if address.kind == "git":
        commit, entries = git_files(address, named, work / "git")
    else:
        commit, entries = named.commit, hub_files(address, named.commit)
    if address.commit not in (None, commit):
        raise UserError(f"{address}: another commit was given, {commit}")
    if (here := _here(repository, address.at(commit))) is not None:
        return here  # the revision has moved to a commit that is here
    write_files(entries, files)
    digest = digest_of(files)
    described = json.dumps({"address": str(address.at(commit)), "digest": digest})
    (work / "digest").write_text(described, encoding="utf-8")
    shutil.rmtree(repository / commit, ignore_errors=True)  # its content is no longer the fetched content
    files.rename(repository / commit)
    (work / "digest").rename(repository / f"{commit}.json")
    return Fetched(address.at(commit), repository / commit, digest)


def _here(repository: Path, address: Address) -> Fetched | None:
    """Return the fetched content of a commit, or None if it is missing or was changed."""
    folder = repository / str(address.revision)
    try:
        digest = str(json.loads((repository / f"{address.revision}.json").read_text(encoding="utf-8"))["digest"])
        return Fetched(address, folder, digest) if digest_of(folder) == digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _kept(repository: Path, address: Address) -> str:
    """Return a description of the addresses that can be used without a network."""
    there = sorted(repository.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    if not there:
        return ""
    return "; here already: " + ", ".join(str(address.at(path.stem)) for path in there[:3])


def _folder_name(address: Address) -> str:
    """Return a recognizable name that no other repository has."""
    name = address.url.rstrip("/").rpartition("/")[2].removesuffix(".git")
    safe = "".join(char if char.isascii() and (char.isalnum() or char in "-_") else "-" for char in name)[:60]
    return f"{safe}-{hashlib.sha256(f'{address.kind} {address.url}'.encode()).hexdigest()[:12]}"


def _environments() -> Path:
    return cache_home() / "environments"


def is_trusted(digest: str) -> bool:
    """Return True if the user has accepted to run the content with this digest."""
    return _trust(digest).is_file()


def trust(digest: str, what: str) -> None:
    """Record that the user has accepted to run the content with this digest; `what` describes it for people."""
    _trust(digest).parent.mkdir(parents=True, exist_ok=True)
    _trust(digest).write_text(f"{what}\n", encoding="utf-8")


def _trust(digest: str) -> Path:
    return _environments() / "trusted" / digest
