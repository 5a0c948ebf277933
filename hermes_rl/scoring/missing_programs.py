"""Determine the programs that a command did not find, from its exit status and output.

This module owns the message forms of shells, `env`, `make` and Python. Use it only for output from a sandbox without
files of an agent: elsewhere the output may be forged. Every form is searched line by line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

NOT_EXECUTED, NOT_FOUND = 126, 127
"""Exit statuses of a shell for files that cannot be executed or do not exist."""
ENDINGS = (": command not found", ": not found")
REFUSED = (": Permission denied", ": cannot execute", ": Exec format error", ": bad interpreter")
RUNNER_MODULES = frozenset(
    {"pytest", "unittest", "nose2", "tox", "nox", "coverage", "xdist", "pytest_cov", "hypothesis"}
)
"""Test runners: for other modules it is unknown if the image or the agent should provide them."""
QUOTES = "'\"\u2018\u2019`"
ASKING = ("env: ", "/usr/bin/env: ", "make: ", "gmake: ")
NO_FILE = ": No such file or directory"
ASSIGNMENT = re.compile(r"\w+=")
OPERATOR = re.compile(r"[;&|()]+")
SILENT = frozenset({"cd", "export", "set", "mkdir", "cp", "mv", "rm", "ln", "git", "echo"})
"""Programs that run no tests, for any arguments."""


def missing(command: str, status: int, output: str, needs: Sequence[str] | None) -> str | None:
    """Return the first program or module that was missing, or None if no message reports one.

    With `needs`, only its names count. A path is not a program of the image, but a file to be created. A program with
    alternatives, after ``||``, is not missing unless all of them are.
    """
    lacking = [
        name
        for kind, name in _missing_names(status, output)
        if (
            name in needs
            if needs is not None
            else {"module": name in RUNNER_MODULES, "program": "/" not in name}.get(kind, 1)
        )
    ]
    return next((name for name in lacking if _stand_ins(command, name) <= set(lacking)), None)


def programs(command: str) -> list[list[str]]:
    """Return the programs that a command calls by name, grouped with their alternatives.

    Groups with a path are excluded, since the path may be a file to be created.
    """
    chains = [[_program_name(part) for part in chain] for chain in _command_chains(command)]
    return [chain for chain in chains if all(word and "/" not in word for word in chain)]


def _stand_ins(command: str, name: str) -> set[str]:
    """Return the alternatives that a command calls if a program of that name is missing."""
    for chain in _command_chains(command):
        for index, part in enumerate(chain):
            matches = [word for word in part if name in word]
            if matches:
                nested = [_stand_ins(word, name) for word in matches if "||" in word]  # sh -c "a || b"
                return {_program_name(other) for other in chain[index + 1 :]}.union(*nested)
    return set()


def last_command(command: str) -> str | None:
    """Return the last of several sequential commands, or None if it may not decide the exit status.

    An earlier command that may run tests decides too: if it fails, commands after ``&&`` are not run.
    """
    chains = _command_chains(command.replace("\\\n", " ").replace("\n", "\n;"))
    parts = [part for chain in chains for part in chain if part]
    operators = re.sub(r"\d?>(&\d|\s*[\w./-]+)", "", command).replace("&&", "")
    if not parts or parts[-1][0] == "!" or any(each in operators for each in ("|", "&", "(", ")", "`", "<<")):
        return None
    return None if any(map(_may_test, parts[:-1])) else shlex.join(parts[-1])


def _may_test(part: list[str]) -> bool:
    """Return True if a simple command seems to run tests; installing a test runner does not."""
    silent = part[0] in SILENT or "install" in part or all(map(ASSIGNMENT.match, part))
    return not silent and any(word in " ".join(part) for word in ("test", "tox", "nox"))


def _missing_names(status: int, output: str) -> Iterator[tuple[str, str]]:
    """Yield each name reported as missing, with its kind."""
    for line in map(str.strip, output.splitlines()):
        for stop_reason in ENDINGS:
            if line.endswith(stop_reason):
                yield "program", _last_word(line.removesuffix(stop_reason))
        if "command not found: " in line:
            yield "program", line.rpartition("command not found: ")[2]
        if line.startswith(ASKING) and line.endswith(NO_FILE):
            yield "program", _last_word(line.removesuffix(NO_FILE))
        if "No module named " in line:
            yield "module", line.rpartition("No module named ")[2].strip(QUOTES).partition(".")[0]
        refused = [line.index(phrase) for phrase in REFUSED if phrase in line] if status == NOT_EXECUTED else []
        if refused:
            yield "refused", _last_word(line[: min(refused)]).rpartition("/")[2]


def _last_word(line: str) -> str:
    return line.rpartition(": ")[2].strip(QUOTES)


def _command_chains(command: str) -> list[list[list[str]]]:
    """Return the simple commands of a command line, each split into arguments, grouped by ``||``."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    chains: list[list[list[str]]] = [[[]]]
    try:
        for word in lexer:
            if word == "||":
                chains[-1].append([])
            elif OPERATOR.fullmatch(word):
                chains.append([[]])
            else:
                chains[-1][-1].append(word)
    except ValueError:
        return [[command.split()]]
    return chains


def _program_name(part: list[str]) -> str:
    return next((word for word in part if not ASSIGNMENT.match(word)), "")
