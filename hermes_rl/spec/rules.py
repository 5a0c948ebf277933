"""Combinations of keys that are impossible, each as one small rule over the plain values.

Rules run also where types are wrong, so that all problems are told at once; they pass over what they cannot
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hermes_rl.spec.fault import Fault
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.rules_data import DATA_RULES
from hermes_rl.spec.rules_run import RUN_RULES
from hermes_rl.spec.rules_sandbox import SANDBOX_RULES, sources_below

FolderOf = Callable[[NodePath], Path]


def broken_rules(data: dict[str, Any], folder_of: FolderOf | None) -> Iterator[Fault]:
    """Every fault of a spec's plain values."""
    for rule in (*DATA_RULES, *SANDBOX_RULES, *RUN_RULES):
        yield from rule(data)
    if folder_of is not None:
        yield from sources_below(data, folder_of)
