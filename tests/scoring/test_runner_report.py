"""Reports of test processes count in the order in which the tests run."""

from __future__ import annotations

import pytest

from hermes_rl.scoring.runner_report import (
    DISORDER,
    INTERRUPTED,
    LEFT,
    SCRIPT_FAILED,
    TOO_MUCH,
    UNFINISHED,
    RunnerReport,
    parse_report,
)


def said(*lines: str, pid: int = 7) -> RunnerReport:
    return parse_report([(pid, f"{pid}\t{line}\n".replace(" ", "\t")) for line in lines])


RUN = ("begin unittest", "tests a b", "start 0", "end 0 passed", "start 1", "end 1 failed", "finish")


def test_tests_have_the_outcomes_that_were_said() -> None:
    report = said(*RUN)
    assert (report.spoke, report.problem, report.outcomes) == (True, None, [("a", "passed"), ("b", "failed")])


def test_a_session_of_pytest_says_its_status_before_its_end() -> None:
    run = ("begin pytest", *RUN[1:6], "session 1", "finish")
    assert said(*run).problem is None
    assert said(*(line for line in run if line != "session 1")).problem == DISORDER
    assert said("begin pytest", "finish").problem is None  # it only told its version
    assert said(*run[:6], "session 2", "finish").problem == INTERRUPTED


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (("begin script", "session 0", "finish"), None),
        (("begin script", "session 1", "finish"), SCRIPT_FAILED),
        (("begin script", "session 1", "finish", "begin script", "session 0", "finish"), None),
        (("begin script", "session 0", "finish", "begin script", "session 1", "finish"), SCRIPT_FAILED),
        (("begin script", "finish"), LEFT),
        (("begin script", "session 0"), UNFINISHED),
        (("begin script",), UNFINISHED),
        (("begin script", "session 0", "finish sys.exit"), "sys.exit was replaced"),
    ],
)
def test_report_requires_the_script_to_finish_normally(lines: tuple[str, ...], problem: str | None) -> None:
    assert said(*lines).problem == problem


@pytest.mark.parametrize(
    "lines",
    [
        ("start 2",),
        ("start -1",),
        ("start x",),
        ("start 99999999999999999999",),
        ("start",),
        ("start 0", "start 1"),
        ("start 0", "tests c"),
        ("start 0", "end 1 passed"),
        ("start 0", "end 0"),
        ("start 0", "end 0 passed", "start 0"),
        ("end 0 passed",),
        ("start 0", "finish"),
        ("finish", "tests c"),
        ("finish", "finish"),
        ("session 0",),
        ("nonsense",),
        ("",),
    ],
)
def test_what_comes_out_of_order_makes_all_of_it_worthless(lines: tuple[str, ...]) -> None:
    assert said("begin unittest", "tests a b", *lines, "finish").problem == DISORDER


def test_a_process_that_does_not_come_to_its_end_does_too() -> None:
    assert said(*RUN[:-1]).problem == UNFINISHED
    assert said(*RUN[:-1], *RUN).problem == UNFINISHED  # another program in its place
    assert said(*RUN, *RUN).problem is None
    assert said(*RUN[:3], "interrupted", "end 0 passed", "finish").problem == INTERRUPTED


def test_messages_of_an_unregistered_sender_are_ignored() -> None:
    whole = [(7, f"7\t{line}\n".replace(" ", "\t")) for line in RUN]
    copied = [(8, "7\tend\t0\tpassed\n"), (8, "7\tfinish\n")]
    report = parse_report([*whole[:3], *copied, *whole[3:]])
    assert (report.problem, report.outcomes) == (None, [("a", "passed"), ("b", "failed")])
    assert parse_report(copied) == RunnerReport()


def test_what_was_replaced_is_the_outcome_of_all_its_tests() -> None:
    report = said(*RUN[:-1], "finish unittest.case.run")
    assert {outcome for _, outcome in report.outcomes} == {"with unittest.case.run"}


def test_oversized_report_is_reported_as_too_large() -> None:
    assert parse_report(None).problem == TOO_MUCH
