"""Tests that are put in place after the agent has ended pass."""

from __future__ import annotations

import secrets
import shlex
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
        expected: names of tests (``test_x``, ``file::test_x``) that a pytest report of this very run must show as
            passed. The report is written to a path that nobody could know beforehand.
        apply: name of an artifact to apply first.
        timeout: seconds; a command that takes longer scores 0.
    """
    if apply is not None:
        raise NotYetAvailable("tests_pass: `apply` needs artifacts, which are not available yet")
    for file in files or []:
        ctx.write_file(file["to"], file["content"])
    report = f"/tmp/report-{secrets.token_hex(16)}.xml"
    prefix = f"export PYTEST_ADDOPTS={shlex.quote('--junitxml=' + report)}\n" if expected else ""
    answer = ctx.terminal(prefix + command, timeout=timeout)
    if answer["exit_code"] != 0:
        return Score(0.0, reason=f"exit status {answer['exit_code']}: {answer['output'][-400:]}")
    if expected:
        return _compare(ctx.read_file(report), expected)
    return Score(1.0)


def _compare(answer: dict[str, Any], expected: list[str]) -> Score:
    if "error" in answer:
        return Score(0.0, reason="the command wrote no pytest report")
    try:
        passed = _passed(answer["content"])
    except ElementTree.ParseError as error:
        return Score(0.0, reason=f"the pytest report cannot be read: {error}")
    missing = [name for name in expected if name.split("::")[-1] not in passed]
    if missing:
        return Score(0.0, reason=f"not passed: {', '.join(missing[:5])}", metrics={"missing": len(missing)})
    return Score(1.0)


def _passed(report: str) -> set[str]:
    bad = {"failure", "error", "skipped"}
    cases = ElementTree.fromstring(report).iter("testcase")
    return {case.get("name", "") for case in cases if not bad & {child.tag for child in case}}
