"""Which programs a command did not find, from how it ended and what it printed.

Owns the forms in which shells, `env`, `make` and Python say it. Ask only about what a command has printed in a sandbox
in which nothing of an agent is: elsewhere anybody can print anything. Every form is looked for line by line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

NOT_EXECUTED, NOT_FOUND = 126, 127
"""Exit statuses of a shell for what cannot be executed, and for what is not there."""
ENDINGS = (": command not found", ": not found")
REFUSED = (": Permission denied", ": cannot execute", ": Exec format error", ": bad interpreter")
MODULES = frozenset({"pytest", "unittest", "nose2", "tox", "nox", "coverage", "xdist", "pytest_cov", "hypothesis"})
"""Runners of tests: of other modules nobody can tell whether the image or the agent was to bring them."""
QUOTES = "'\"\u2018\u2019`"
ASKING = ("env: ", "/usr/bin/env: ", "make: ", "gmake: ")
NO_FILE = ": No such file or directory"
ASSIGNMENT = re.compile(r"\w+=")
OPERATOR = re.compile(r"[;&|()]+")
SILENT = frozenset({"cd", "export", "set", "mkdir", "cp", "mv", "rm", "ln", "git", "echo"})
"""Programs that run no tests, whatever they are told."""


def missing(command: str, status: int, output: str, needs: Sequence[str] | None) -> str | None:
    """Return the first program or module that was not there; None where nothing says so.

    With `needs` only those count. A path is no program that an image has to bring, but what was to be made; and what
    another command stands in for, behind ``||``, is not missed where that one has run.
    """
    for kind, name in _complaints(status, output):
        counts = {"module": name in MODULES, "program": "/" not in name, "refused": True}[kind]
        if (name in needs if needs is not None else counts) and (
            status >= NOT_EXECUTED or "||" not in command.partition(name)[2]
        ):
            return name
    return None


def programs(command: str) -> list[str]:
    """Return what each part of a command starts with, where that is a program's name and no path."""
    firsts = [next((word for word in part if not ASSIGNMENT.match(word)), "") for part in _parts(command)]
    return [word for word in firsts if word and "/" not in word]


def last_command(command: str) -> str | None:
    """Return the last of commands that run one after the other; None where it may not be what decides over all.

    One before it that may run tests decides too: where they fail, nothing behind ``&&`` is run.
    """
    parts = [part for part in _parts(command.replace("\\\n", " ").replace("\n", "\n;")) if part]
    operators = re.sub(r"\d?>(&\d|\s*[\w./-]+)", "", command).replace("&&", "")
    if not parts or parts[-1][0] == "!" or any(each in operators for each in ("|", "&", "(", ")", "`", "<<")):
        return None
    return None if any(map(_may_test, parts[:-1])) else shlex.join(parts[-1])


def _may_test(part: list[str]) -> bool:
    """Whether a simple command looks as if it ran tests; installing a runner of tests does not run it."""
    silent = part[0] in SILENT or "install" in part or all(map(ASSIGNMENT.match, part))
    return not silent and any(word in " ".join(part) for word in ("test", "tox", "nox"))


def _complaints(status: int, output: str) -> Iterator[tuple[str, str]]:
    """Yield what is said to be lacking, with its kind."""
    for line in map(str.strip, output.splitlines()):
        for ending in ENDINGS:
            if line.endswith(ending):
                yield "program", _last_word(line.removesuffix(ending))
        if "command not found: " in line:
            yield "program", line.rpartition("command not found: ")[2]
        if line.startswith(ASKING) and line.endswith(NO_FILE):
            yield "program", _last_word(line.removesuffix(NO_FILE))
        if "No module named " in line:
            yield "module", line.rpartition("No module named ")[2].strip(QUOTES).partition(".")[0]
        refused = [line.index(words) for words in REFUSED if words in line] if status == NOT_EXECUTED else []
        if refused:
            yield "refused", _last_word(line[: min(refused)]).rpartition("/")[2]


def _last_word(line: str) -> str:
    return line.rpartition(": ")[2].strip(QUOTES)


def _parts(command: str) -> list[list[str]]:
    """Return the words of a command's simple commands."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    try:
        for word in lexer:
            if OPERATOR.fullmatch(word):
                parts.append([])
            else:
                parts[-1].append(word)
    except ValueError:
        return [command.split()]
    return parts
