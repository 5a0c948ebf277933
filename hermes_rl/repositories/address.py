"""Parse the address of an environment in a repository.

::

    owner/name[@REV][#PATH]                          on GitHub
    git+https://HOST/PATH[@REV][#PATH]               any git: https, http, ssh, file
    hf://[datasets|models|spaces/]owner/name[@REV][#PATH]    on a hub of Hugging Face's API; without a kind, a dataset

REV is a branch, a tag, or a full commit. PATH is the directory or the spec inside the repository.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import urlsplit

from hermes_rl.errors import UserError
from hermes_rl.terminal_text import escape_controls

_NAME = r"[A-Za-z0-9][\w.-]*"
_SHORT = re.compile(rf"{_NAME}/{_NAME}")
_HUB = re.compile(rf"(?:(datasets|models|spaces)/)?({_NAME}/{_NAME})")
_REVISION = re.compile(r"[A-Za-z0-9_][\w.+/-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
SCHEMES = ("https", "http", "ssh", "file")
"""Allowed transports of git; others, such as `ext`, run programs."""


Kind = Literal["git", "datasets", "models", "spaces"]
_KINDS: dict[str | None, Kind] = {None: "datasets", "datasets": "datasets", "models": "models", "spaces": "spaces"}


@dataclass(frozen=True)
class Address:
    """A repository, and the part of it that is used.

    Attributes:
        repository: the text before the revision, unchanged.
        kind: host of the repository: git, or the kind of repository on a hub.
        url: argument for git; on a hub its `owner/name`.
        revision: a branch, a tag or a commit; None for the default of the repository.
        inside: the directory or the spec in it; empty for all of it.
    """

    repository: str
    kind: Kind
    url: str
    revision: str | None = None
    inside: str = ""

    @property
    def commit(self) -> str | None:
        """Commit, if the revision is one."""
        return self.revision if self.revision is not None and _COMMIT.fullmatch(self.revision) else None

    def at_commit(self, commit: str) -> Address:
        """Return the same address at a commit."""
        return replace(self, revision=commit)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision is not None else ""
        return f"{self.repository}{revision}{f'#{self.inside}' if self.inside else ''}"


def address_of(text: str) -> Address | None:
    """Return the address in a text, or None for a text that can only mean something on this machine.

    Raises `UserError` if it starts like an address, and is not one.
    """
    rest, _, inside = text.partition("#")
    scheme, colon, remainder = rest.partition("://")
    if not colon:
        repository, _, revision = rest.partition("@")
        if _SHORT.fullmatch(repository) is None or _means_a_file(repository):
            return None
        return _check_parts(text, Address(repository, "git", f"https://github.com/{repository}.git"), revision, inside)
    if scheme == "hf":
        repository, _, revision = remainder.partition("@")
        match = _HUB.fullmatch(repository)
        if match is None or match[2].partition("/")[0] in _KINDS:
            raise UserError(f"{escape_controls(text)} is not a repository of a hub: write hf://OWNER/NAME@REV")
        return _check_parts(text, Address(f"hf://{repository}", _KINDS[match[1]], match[2]), revision, inside)
    if not scheme.startswith("git+"):
        return None
    if (scheme := scheme.removeprefix("git+")) not in SCHEMES:
        raise UserError(
            f"{escape_controls(text)}: git is asked by {', '.join(f'git+{scheme}' for scheme in SCHEMES)} alone"
        )
    return _git_address(text, scheme, remainder, inside)


def _git_address(text: str, scheme: str, remainder: str, inside: str) -> Address:
    host, slash, path = remainder.partition("/")
    path, _, revision = path.partition("@")
    url = f"{scheme}://{host}{slash}{path}"
    if not path or any(ord(char) <= ord(" ") for char in url):
        raise UserError(f"{escape_controls(text)} names no repository: write git+https://HOST/PATH@REV")
    if scheme == "file" and host not in ("", "localhost"):
        raise UserError(
            f"{escape_controls(text)}: {escape_controls(host)} is not a host; a local path has three slashes "
            "in front, as in git+file:///srv/environments"
        )
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UserError(f"{escape_controls(text)} names no repository: {error}") from error
    if parts.password is not None or (parts.username and scheme != "ssh"):
        raise UserError(
            f"git+{scheme}://…@{escape_controls(host.rpartition('@')[2])}/…: an address with a password or token would "
            "be in every record of a run; remove it, and store it in git's credential helper"
        )
    return _check_parts(text, Address(f"git+{url}", "git", url), revision, inside)


def _means_a_file(reference: str) -> bool:
    """Return True for `specs/mine.yaml`, and for `specs/mine` if there is a directory `specs`: it was mistyped."""
    owner, _, name = reference.partition("/")
    return name.endswith((".yaml", ".yml", ".json")) or Path(owner).is_dir()


def _check_parts(text: str, address: Address, revision: str, inside: str) -> Address:
    if "@" in text.partition("#")[0].removeprefix(address.repository) and not revision:
        raise UserError(f"{escape_controls(text)}: a branch, a tag or a commit is missing after `@`")
    if revision and (_REVISION.fullmatch(revision) is None or ".." in revision):
        raise UserError(
            f"{escape_controls(text)}: {escape_controls(revision)!r} is not the name of a branch, a tag or a commit"
        )
    if inside and not plain_path(inside.rstrip("/")):
        raise UserError(
            f"{escape_controls(text)}: {escape_controls(inside)!r} is not a path in the repository such as envs/maths"
        )
    return replace(address, revision=revision or None, inside=inside.rstrip("/"))


def plain_path(path: str) -> bool:
    """Return True for a path that stays below its directory, whatever it contains, and is not one of git's files."""
    parts = path.split("/")
    return (
        len(path) <= 1000
        and not PurePosixPath(path).is_absolute()
        and "\\" not in path
        and path.isprintable()
        and all(part not in ("", ".", "..") and part.lower() != ".git" for part in parts)
    )
