"""What a command line changes in a spec, for every command that reads one: `--set`, Atropos' flags, `--env-file`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.spec.overrides import Overrides, parse_extra_args
from hermes_rl.spec.substitution import read_env_file


@dataclass(frozen=True)
class Options:
    """The options of one command, as they were typed."""

    sets: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    env_file: Path | None = None

    def overrides(self) -> Overrides:
        """What they change; raises SpecError with every one that is wrong."""
        return parse_extra_args(self.flags, self.sets)

    def environ(self) -> dict[str, str]:
        """See `environment`."""
        return environment(self.env_file)


def environment(env_file: Path | None) -> dict[str, str]:
    """The process's environment, which wins, with the lines of `env_file`; neither is changed.

    Raises:
        UserError: the file cannot be read, or a line is not KEY=VALUE.
    """
    return {**(read_env_file(env_file) if env_file is not None else {}), **os.environ}


def separated(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Specs, and flags with their values: Typer gives both as one list where it does not know the flags."""
    specs: list[str] = []
    flags: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            specs.append(word)
            continue
        flags.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            flags.append(rest.pop(0))
    return specs, tuple(flags)
