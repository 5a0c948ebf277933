"""Resolve a SPEC that is a repository: fetch its commit, show its content, and ask for permission to run it.

`hermes_rl.repositories` owns fetching, and the list of accepted contents.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from hermes_rl.cli.echo import echo
from hermes_rl.errors import UserError
from hermes_rl.others_files import read_file, read_text
from hermes_rl.repositories.cache import Fetched, fetched, is_trusted
from hermes_rl.repositories.cache import trust as remember
from hermes_rl.repositories.files import files_of
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.spec.load import repository_of, spec_of
from hermes_rl.terminal_text import escape_controls, pluralize

MAX_FILES_NAMED = 60
"""Maximum number of files listed by name."""
_READ = (".py", ".yaml", ".yml", ".sh")
"""Suffixes of files that decide which code runs; they are listed first."""


def at_hand(source: str, *, trust: bool) -> str:
    """Return the spec that an argument names; for a repository, with the commit of its revision.

    A commit that is not available locally is fetched. Before its code may run, the user is shown its files and must
    accept them, once for each content.

    Args:
        source: the argument.
        trust: accept the content without asking.

    Raises:
        UserError: the repository is not available, has no spec, or is not accepted.
    """
    address = repository_of(source)
    if address is None:
        return source
    fetch = fetched(address)
    spec = spec_of(fetch)
    if address.revision is None:
        echo(
            f"{source}: no revision is named, so the current one is used. To use it again: {fetch.address}",
            err=True,
        )
    elif address.commit is None:
        echo(f"{source}: {address.revision} is the commit {fetch.address.revision}", err=True)
    if not fetch.trusted:
        for line in _content_lines(fetch, spec):
            echo(line, err=True)
        if not trust:
            _ask_for_trust(str(fetch.address))
        fetch.trust()
    return str(fetch.address)


def agree_to_grade(path: Path, *, trust: bool) -> None:
    """Ask for permission to run the code of a run directory's spec, unless this user has created or accepted it.

    Raises:
        UserError: the user does not accept it.
    """
    run = RunDirectory(path)
    if not (path / "spec.yaml").exists():
        return  # there is no run; the command reports that
    digest = run.code_digest()
    if is_trusted(digest):
        return
    echo(f"{path}: this run was not made here, or its spec has been changed since", err=True)
    echo(f"  content: sha256 {digest}", err=True)
    for name in code_of(read_text(path / "spec.yaml")):
        echo(f"  {escape_controls(name)}", err=True)
    echo("Rewards, states and datasets that its spec names run on this machine with your rights.", err=True)
    if not trust:
        _ask_for_trust(f"the code of {path}")
    remember(digest, f"agreed to: {path.absolute()}")


def code_of(spec: str) -> list[str]:
    """Return the references to code in the text of a spec, such as `rewards.py:f` or `package.module:f`."""
    return list(dict.fromkeys(re.findall(r"[\w./~-]+(?:\.py)?:[A-Za-z_]\w*", spec)))[:MAX_FILES_NAMED]


def _content_lines(fetch: Fetched, spec: Path) -> Iterator[str]:
    """Yield the lines that describe a repository's content; files that decide which code runs come first."""
    yield f"{fetch.address}"
    yield f"  content: sha256 {fetch.digest}"
    files = sorted(files_of(fetch.folder), key=lambda path: (path.suffix not in _READ, spec.parent not in path.parents))
    for path in files[:MAX_FILES_NAMED]:
        description = f"a link to {path.readlink()}" if path.is_symlink() else ""
        if not description:
            content = read_file(path)
            lines = content.count(b"\n") + (not content.endswith(b"\n") and content != b"")
            description = f"{len(content):,} bytes" if b"\0" in content[:8000] else pluralize(lines, "line")
        yield f"  {path.relative_to(fetch.folder).as_posix()}: {description}"
    if rest := files[MAX_FILES_NAMED:]:
        code = sum(path.suffix in _READ for path in rest)
        yield f"  and {pluralize(len(rest), 'more file')}, {code} of them code or YAML"
    yield f"  its directory: {fetch.folder}"
    yield "Its code runs on this machine with your rights; its spec sends your API keys to the servers that it names."


def _ask_for_trust(subject: str) -> None:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(
            f"{subject} has not been confirmed on this machine, and there is no terminal to ask: add --trust "
            "if you trust the files listed above"
        )
    if not typer.confirm("Do you trust it?", err=True):
        raise UserError(f"{subject} was not confirmed; none of its code has run")
