"""What a run may use up before it ends: failures, tokens, time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hermes_rl.errors import RunError
from hermes_rl.rollouts.rollout import Group, Rollout


@dataclass
class RunBudget:
    """Counts what a run uses; `None` is no bound.

    `max_failures` are groups (rows, in evaluation) that infrastructure failed for good, `max_tokens` prompt and
    completion tokens as the servers counted them, `max_cost` US dollars as they tell them, `deadline` seconds from the
    start.
    """

    max_failures: int | None = None
    max_tokens: int | None = None
    deadline: float | None = None
    max_cost: float | None = None
    clock: Callable[[], float] = time.monotonic
    failures: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    """Groups that the spec drops by a policy's ending."""
    tokens: int = 0
    cost: float = 0.0
    last_failure: str = ""

    def __post_init__(self) -> None:
        self.started = self.clock()

    def spend(self, rollout: Rollout) -> None:
        """Take the tokens of a finished rollout into account; those of failed attempts were spent as well.

        Raises:
            RunError: there is a bound to the cost, and the server does not tell it.
        """
        if rollout.result is None:
            return
        usage = rollout.result.usage
        self.tokens += usage.prompt_tokens + usage.completion_tokens
        self.cost += usage.cost or 0.0
        if self.max_cost is not None and usage.cost is None and rollout.result.turns_used:
            raise RunError(
                "budget.max_cost cannot be kept: the policy's server does not say what a call costs (usage.cost); "
                "use budget.max_tokens"
            )

    def count(self, group: Group) -> None:
        """Take a finished group into account.

        Raises:
            RunError: too many groups failed.
        """
        if group.dropped is None:
            return
        failed = next((r for r in group.rollouts if r.error is not None and not r.ending.graded), None)
        if failed is None and group.dropped.graded:
            self.left_out[str(group.dropped)] += 1  # the spec drops this ending; nothing has failed
            return
        self.failures[str(failed.ending if failed is not None else group.dropped)] += 1
        self.last_failure = (failed.error if failed is not None else group.detail) or ""
        if self.max_failures is not None and self.failures.total() > self.max_failures:
            raise RunError(
                f"{self.failures.total()} groups could not be played ({self.causes()}), more than "
                f"budget.max_failures ({self.max_failures}) allows. The last: {self.last_failure}"
            )

    def used_up(self) -> str | None:
        """The budget that ends the run cleanly, in words; None while there is room."""
        if self.max_tokens is not None and self.tokens >= self.max_tokens:
            return f"budget.max_tokens ({self.max_tokens}) is used up"
        if self.max_cost is not None and self.cost >= self.max_cost:
            return f"budget.max_cost ({self.max_cost:g} $) is used up"
        if self.deadline is not None and self.clock() - self.started >= self.deadline:
            return f"budget.deadline ({self.deadline:g} s) has passed"
        return None

    def causes(self) -> str:
        """The failures by cause, most frequent first."""
        return ", ".join(f"{cause}: {count}" for cause, count in self.failures.most_common())
