"""Write how long tests took, by group, and print which failed: python -m scripts.test_results FILE REPORT.xml…

The reports are those of `pytest --junitxml`; one that does not exist is left out. Groups are directories of tests, and
modules of tests/real. The file lists the groups and then all tests, the longest first; the groups are printed as well,
and then each failed test with the end of what it said, as the output of a long run is often cut at its beginning.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from tests.budget import MOST

LINES = 15
"""Lines of an error that are printed."""


def durations(report: Path) -> dict[tuple[str, str], float]:
    """Return the seconds of each test by its module and name."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return {(case.get("classname", ""), case.get("name", "")): float(case.get("time", "0")) for case in cases}


def failures(report: Path) -> Iterator[str]:
    """Yield the name of each test that failed, or took too much processor time, with the last lines of its error."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        for failure in (*case.iter("failure"), *case.iter("error")):
            yield "\n    ".join((f"failed: {name}", *(failure.text or "").strip().splitlines()[-LINES:]))
        for used in case.iter("property"):
            if used.get("name") == "processor" and float(used.get("value", "0")) > MOST:
                yield f"failed: {name} took {used.get('value')} s of processor time, more than {MOST}"


def group_of(module: str) -> str:
    """Return the group of `tests.real.test_ray` (itself), `tests.agent.test_loop` (tests.agent) or `tests.test_x`."""
    parts = module.split(".")
    depth = 3 if parts[:2] == ["tests", "real"] else 2
    return ".".join(parts[:depth]) if len(parts) > 2 else "tests"


def main(file: Path, *reports: Path) -> None:
    lines = []
    for report in reports:
        tests = durations(report)
        groups: Counter[str] = Counter()
        for (module, _), seconds in tests.items():
            groups[group_of(module)] += seconds  # type: ignore[assignment]
        summary = [f"{report.stem}: {len(tests)} tests, {sum(tests.values()) / 60:.1f} min of all workers together"]
        summary += [f"{seconds:9.1f} s  {group}" for group, seconds in groups.most_common()]
        sys.stdout.write("\n".join((*summary, "")))
        longest = sorted(tests.items(), key=lambda test: -test[1])
        lines += [*summary, *(f"{seconds:9.2f} s  {module}::{name}" for (module, name), seconds in longest), ""]
    file.write_text("\n".join(lines), "utf-8")
    sys.stdout.writelines(f"{failure}\n" for report in reports for failure in failures(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *filter(Path.exists, map(Path, sys.argv[2:])))
