"""Tests that are put in place after the agent has ended pass."""

from __future__ import annotations

import secrets
import xml.etree.ElementTree as ElementTree
from typing import Any

from hermes_rl import Score
from hermes_rl.errors import NotYetAvailable


def tests_pass(
    ctx: Any,
    *,
    command: str,
    files: list[dict[str, Any]] | None = None,
    expected: list[str] | None = None,
    apply: str | None = None,
    timeout: float = 180.0,
) -> Score:
    """1 if `command` exits with 0 in the rollout's sandbox, else 0; with `expected`, if those tests passed.

    Args:
        command: a shell command, run in the working directory.
        files: laid down before, removed after: a list of {to, content} with `to` relative to the working directory.
        expected: tests (``test_x``, ``file.py::test_x``, ``file.py::Class::test_x[case]``) that the report of this
            very pytest run must show as passed, each of that name, whatever the command's exit status says about
            others. The report is written to a path that nobody could know beforehand.
        apply: name of an artifact to apply first.
        timeout: seconds; a command that takes longer scores 0.
    """
    if apply is not None:
        raise NotYetAvailable("tests_pass: `apply` needs artifacts, which are not available yet")
    for file in files or []:
        ctx.write_file(file["to"], file["content"])
    report = f"/tmp/report-{secrets.token_hex(16)}.xml"
    answer = ctx.terminal(_with_report(command, report) if expected else command, timeout=timeout)
    if answer.get("timed_out"):
        return Score(0.0, reason=f"no end within {timeout:g} s")
    if expected:
        return _compare(ctx.read_file(report), expected, answer)
    return Score(1.0) if answer["exit_code"] == 0 else _failed(answer)


def _with_report(command: str, report: str) -> str:
    return f'export PYTEST_ADDOPTS="${{PYTEST_ADDOPTS:-}} --junitxml={report}"\n{command}'


def _failed(answer: dict[str, Any]) -> Score:
    return Score(0.0, reason=f"exit status {answer['exit_code']}: {answer['output'][-400:]}")


def _compare(report: dict[str, Any], expected: list[str], answer: dict[str, Any]) -> Score:
    if "error" in report:
        return _failed(answer) if answer["exit_code"] else Score(0.0, reason="the command wrote no pytest report")
    try:
        cases = list(ElementTree.fromstring(report["content"]).iter("testcase"))
    except ElementTree.ParseError as error:
        return Score(0.0, reason=f"the pytest report cannot be read: {error}")
    missing = [name for name in expected if not _passed(name, cases)]
    if missing:
        return Score(0.0, reason=f"not passed: {', '.join(missing[:5])}", metrics={"missing": len(missing)})
    return Score(1.0)


def _passed(name: str, cases: list[ElementTree.Element]) -> bool:
    """Whether the report has this test, and every case of it passed."""
    outcomes = [{child.tag for child in case} for case in cases if _is(name, case)]
    return bool(outcomes) and not any({"failure", "error", "skipped"} & outcome for outcome in outcomes)


def _is(name: str, case: ElementTree.Element) -> bool:
    """``tests/test_a.py::Class::test_x`` is in the report as class ``tests.test_a.Class``, name ``test_x``."""
    plain, bracket, case_id = name.partition("[")
    *where, test = plain.split("::")
    reported = case.get("name", "")
    if reported != test + bracket + case_id and (bracket or reported.partition("[")[0] != test):
        return False
    file, *classes = where or [""]
    wanted = ".".join([file.removesuffix(".py").replace("/", ".").lstrip("."), *classes])
    found = case.get("classname", "")
    return not wanted or found == wanted or found.endswith(f".{wanted}")
