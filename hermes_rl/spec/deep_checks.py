"""The checks of `validate --deep`: their names, which `checks:` of a spec may list, and their severities.

`hermes_rl.runs.deep_checks` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Severity = Literal["error", "warning"]


class DeepCheck(NamedTuple):
    """A check: its severity if the spec does not set one, and the fault it finds."""

    severity: Severity
    finds: str


DEEP_CHECKS: Mapping[str, DeepCheck] = {
    "no_rows": DeepCheck("error", "no row is left after `dataset.filter`"),
    "no_solution": DeepCheck("warning", "the spec has no `solution`, so no right answer was graded"),
    "reward_fails": DeepCheck("error", "a reward raises, exceeds its time limit, or gives no finite number"),
    "timeouts": DeepCheck("error", "answers ran out of time, so their scores show nothing"),
    "tests_skipped": DeepCheck("error", "every test of a row was skipped"),
    "gold_fails": DeepCheck("error", "the solution scores below `evaluate.success_threshold` on every row"),
    "gold_fails_on_some_rows": DeepCheck(
        "warning", "the solution scores below `evaluate.success_threshold`, or has no score"
    ),
    "constant_score": DeepCheck("error", "every answer has the same score"),
    "constant_reward": DeepCheck("warning", "a reward gave the same value to every answer"),
    "wrong_answer_scores": DeepCheck("error", "an empty answer, garbage or another row's solution scores like gold"),
    "leaked_answer": DeepCheck("error", "the prompt contains the answer"),
    "same_prompt": DeepCheck("error", "all rows have one prompt (a warning if a model can find out by tools)"),
    "not_deterministic": DeepCheck("error", "a reward gave the same answer another value in another rollout"),
    "not_repeatable": DeepCheck("error", "a reward gave another value when the same end state was graded again"),
    "untouched_passes": DeepCheck("warning", "a row passes although nothing was done"),
    "blind_answers_pay": DeepCheck("warning", "a reward pays for an answer that solves nothing"),
    "blind_answers_pass": DeepCheck("error", "an answer that solves nothing passes on half of the rows"),
    "slow_reward": DeepCheck("warning", "a reward took more than 10 s"),
}


def table() -> str:
    """Return the checks as a Markdown table, for the documentation."""
    lines = ["| check | severity | finds |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| `{name}` | {check.severity} | {check.finds} |" for name, check in DEEP_CHECKS.items())]
    )
