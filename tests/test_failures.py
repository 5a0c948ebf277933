"""What is graded is one table, and the documentation shows it."""

from __future__ import annotations

from pathlib import Path

from hermes_rl import errors
from hermes_rl.stop_reasons import RULES, StopReason, table

ROOT = Path(__file__).parents[1]


def test_the_documentation_shows_the_table_of_the_code() -> None:
    assert table() in (ROOT / "docs" / "failures.md").read_text(encoding="utf-8"), f"docs/failures.md needs:\n{table()}"


def test_every_stop_reason_has_a_rule_and_policy_ones_are_not_retried() -> None:
    assert set(RULES) == set(StopReason)
    assert not any(rule.retried and rule.caused_by_policy for rule in RULES.values())


def test_every_failure_is_an_ungraded_infrastructure_failure() -> None:
    failures = [errors.Failure, *errors.Failure.__subclasses__()]
    assert len(failures) >= 6
    assert not any(failure.stop_reason.graded for failure in failures)


def test_detail_of_a_failure_keeps_its_start_and_its_end() -> None:
    failure = errors.RewardFailure("reward 'right' raised " + "x" * 50_000_000 + " at code.py:3")
    assert len(failure.detail) == len(str(failure)) < 25_000
    assert failure.detail.startswith("reward 'right' raised x") and failure.detail.endswith("x at code.py:3")
