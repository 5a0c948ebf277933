"""Generate the table of docs/tested-with.md: the real components that the tests ran with.

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

These components ran in the tests of `tests/real`, which write this table
(`HERMES_RL_TESTED_WITH=docs/tested-with.md pytest -m real`). If a component cannot be installed, its tests fail.

| component | version | date | tests passed | run again |
|---|---|---|---|---|
"""


def rows_of(passed: Mapping[str, list[str]], versions: Mapping[str, Callable[[], str]]) -> dict[str, str]:
    """Return a table row for each component with a passed test."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    found = {}
    for component, tests in sorted(passed.items()):
        files = sorted({test.split("::")[0] for test in tests})
        again = f"`pytest {' '.join(files)}`"
        found[component] = f"| {component} | {versions[component]()} | {today} | {len(tests)} | {again} |"
    return found


def write(file: Path, rows: Mapping[str, str]) -> None:
    """Write the rows to the table of the file. Keep the rows of other components, and the sections after the table."""
    before = file.read_text("utf-8") if file.exists() else ""
    _, section, more = before.partition("\n## ")
    kept = {
        match[1]: match[0] for match in re.finditer(r"^\| ([^|]+?) \| .*$", before, re.M) if match[1] != "component"
    }
    merged = {**kept, **rows}
    table = "\n".join(merged[name] for name in sorted(merged))
    file.write_text(f"{HEADER}{table}\n{section}{more}", "utf-8")


def write_row(file: Path, row: str) -> None:
    """Write a row to the table of a page with as many columns; it replaces a row with the same first cell."""
    text, name, columns = file.read_text("utf-8"), row.split(" | ")[0], row.count("|")
    lines = [line for line in text.splitlines() if not (line.startswith(f"{name} | ") and line.count("|") == columns)]
    head = next(number for number, line in enumerate(lines) if line.startswith("|---") and line.count("|") == columns)
    end = next(number for number in range(head, len(lines)) if not lines[number].startswith("|"))
    rows = sorted([*lines[head + 1 : end], row])
    file.write_text("\n".join([*lines[: head + 1], *rows, *lines[end:]]) + "\n", "utf-8")
