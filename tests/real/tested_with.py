"""Which real components were played with: the table of docs/tested-with.md, made by the tests themselves.

Rows of other pages' tables are told by tests too: `record_property("agents.md", "| … |")`.

Each test that passed counts for the component of its module, `COMPONENT = "…"`. At the end of the session the
components and their versions are printed, and ``HERMES_RL_TESTED_WITH=docs/tested-with.md`` writes them to that file.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from pathlib import Path

HEADER = """# Tested with

What was played for real, by the tests in `tests/real`, which write this table
(`HERMES_RL_TESTED_WITH=docs/tested-with.md pytest -m real`). A component that cannot be had fails its tests.

| component | version | date | tests passed | run again |
|---|---|---|---|---|
"""


def rows_of(passed: Mapping[str, list[str]], versions: Mapping[str, Callable[[], str]]) -> dict[str, str]:
    """Return a row of the table for each component that has a test which passed."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    found = {}
    for component, tests in sorted(passed.items()):
        files = sorted({test.split("::")[0] for test in tests})
        again = f"`pytest {' '.join(files)}`"
        found[component] = f"| {component} | {versions[component]()} | {today} | {len(tests)} | {again} |"
    return found


def write(file: Path, rows: Mapping[str, str]) -> None:
    """Put the rows into the file; those of components that were not played stay as they are."""
    before = file.read_text("utf-8") if file.exists() else ""
    kept = {
        match[1]: match[0] for match in re.finditer(r"^\| ([^|]+?) \| .*$", before, re.M) if match[1] != "component"
    }
    merged = {**kept, **rows}
    file.write_text(HEADER + "\n".join(merged[name] for name in sorted(merged)) + "\n", "utf-8")


def write_row(file: Path, row: str) -> None:
    """Put a row into the table of a page with as many columns; a row that begins with the same cell goes."""
    text, name, columns = file.read_text("utf-8"), row.split(" | ")[0], row.count("|")
    lines = [line for line in text.splitlines() if not (line.startswith(f"{name} | ") and line.count("|") == columns)]
    head = next(number for number, line in enumerate(lines) if line.startswith("|---") and line.count("|") == columns)
    end = next(number for number in range(head, len(lines)) if not lines[number].startswith("|"))
    rows = sorted([*lines[head + 1 : end], row])
    file.write_text("\n".join([*lines[: head + 1], *rows, *lines[end:]]) + "\n", "utf-8")
