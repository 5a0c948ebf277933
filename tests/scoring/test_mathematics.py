"""Comparing expressions, and surviving those that never end."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hermes_rl.errors import RewardFailure
from hermes_rl.scoring import mathematics
from hermes_rl.scoring.mathematics import equal

SECONDS = 60.0
"""Enough on a machine that is busy with other tests."""


def same(answer: str, target: str) -> bool:
    return equal(answer, target, SECONDS)[0]


@pytest.mark.parametrize("target", ["0.5", "1/2", r"\frac12", r"\frac{1}{2}"])
@pytest.mark.parametrize("answer", [r"\boxed{0.5}", r"\boxed{1/2}", r"\boxed{\frac12}", r"so it is $\frac{1}{2}$."])
def test_a_half_is_a_half(answer: str, target: str) -> None:
    assert same(answer, target)


@pytest.mark.parametrize(
    ("answer", "target"),
    [
        (r"\boxed{12\text{ cm}}", "12"),
        (r"\boxed{12}", r"12 \text{ cm}"),
        (r"\boxed{\$1,000}", "1000"),
        (r"\boxed{50\%}", "50"),
        (r"\boxed{14^\circ}", "14"),
        (r"\boxed{x=3}", "3"),
        (r"first \boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{\sqrt{8}}{2}}", r"\sqrt{2}"),
        (r"\boxed{(x+1)^2}", "x^2+2x+1"),
        (r"\boxed{ 007.50 }", "7.5"),
        ("She earns $18 every day.", "18"),
    ],
)
def test_the_same_written_otherwise_is_equal(answer: str, target: str) -> None:
    assert same(answer, target)


@pytest.mark.parametrize(
    ("answer", "target"),
    [
        (r"\boxed{0.33}", "1/3"),
        (r"\boxed{1.4142}", r"\sqrt{2}"),
        (r"\boxed{3}", "-3"),
        (r"\boxed{1,2,3}", "3"),
        (r"\boxed{(2,1)}", "(1,2)"),
        (r"\boxed{2}, no: \boxed{1}", "2"),
        (r"\boxed{x^2+1}", "x^2+2x+1"),
        (r"\boxed{}", "5"),
        ("", "5"),
        ("It is 19.", "18"),
        (r"\boxed{12345678901234567891}", "12345678901234567890"),
        (r"\boxed{0.1000000000000000001}", "0.1"),
    ],
)
def test_near_misses_are_not_equal(answer: str, target: str) -> None:
    verdict, reason = equal(answer, target, SECONDS)
    assert not verdict
    assert reason is not None


@pytest.mark.parametrize("target", ["", " ", "$"])
def test_a_target_that_is_no_expression_is_a_failure_and_no_zero(target: str) -> None:
    with pytest.raises(RewardFailure, match="target"):
        equal(r"\boxed{5}", target, SECONDS)


def test_an_answer_that_never_ends_is_given_up_and_the_next_one_is_compared() -> None:
    assert same(r"\boxed{1/2}", "0.5")  # the helper is up, so that the time below is the comparison's
    began = time.perf_counter()
    verdict, reason = equal(r"\boxed{9^{9^{9^9}}}", "5", 0.5)
    assert (verdict, "within 0.5 s" in str(reason)) == (False, True)
    assert time.perf_counter() - began < 10
    assert same(r"\boxed{2/4}", "0.5")


def test_many_threads_share_the_helper() -> None:
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda n: same(rf"\boxed{{{n}/2}}", "1.5"), range(16)))
    assert verdicts == [n == 3 for n in range(16)]


def test_a_long_answer_with_any_character_in_it_is_read() -> None:
    assert same("word \N{SNOWMAN} \ud800 \n" * 20_000 + r"\boxed{1/2}", "0.5")


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[mathematics._Helper]:
    """A helper of the test's own, not yet started."""
    own = mathematics._Helper()
    monkeypatch.setattr(mathematics, "_helper", own)
    yield own
    own._kill()


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """So many that the next one has a number above 1023, which select() cannot take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for descriptor in held:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("helper")
def test_a_file_of_the_working_directory_takes_no_modules_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sympy.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    assert same(r"\boxed{1/2}", "0.5")


@pytest.mark.usefixtures("helper", "many_open_files")
def test_it_works_beside_more_than_a_thousand_open_files() -> None:
    assert same(r"\boxed{1/2}", "0.5")


def test_the_helper_does_not_hear_ctrl_c(helper: mathematics._Helper) -> None:
    assert same(r"\boxed{1/2}", "0.5")
    assert helper._process is not None
    assert os.getsid(helper._process.pid) == helper._process.pid
