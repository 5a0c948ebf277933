"""docs/ports.md gives the sizes of the shipped specs as they are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def lines(path: Path) -> int:
    return sum(not line.lstrip().startswith("#") for line in path.read_text().splitlines())


def test_the_sizes_are_right() -> None:
    page = (ROOT / "docs" / "ports.md").read_text()
    for row in re.findall(r"^\| [^|]*\(`\w+`\).*$", page, re.MULTILINE):
        named = re.findall(r"\((\.\./specs/[\w-]+\.yaml)\)", row)
        told = [int(number) for number in re.findall(r"(\d+)(?= and \d+ lines| lines)", row)]
        assert told == [lines(ROOT / "docs" / name) for name in named]
        assert all(count < 60 for count in told)
    reader = (ROOT / "specs" / "tasks" / "terminal_bench.py").read_text().splitlines()
    assert f"and {len(reader)} of Python" in page
