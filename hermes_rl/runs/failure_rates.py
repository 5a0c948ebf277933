"""Track how often rollouts of a run fail for infrastructure reasons and are not graded.

Failed rollouts are retried, so a few failures are harmless. An agent that could choose not to be graded would show up
as one row, or one policy, that fails far more often than the others. Failures are therefore counted by cause, by row
and by policy, failed attempts included; `run.json` contains the counts under `failure_rates`. It also counts the
members of groups whose retries were exhausted, and the members of these that stay in their group as the worst
(`on_stop.retries_exhausted`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.rollouts.rollout import Group, Rollout, RolloutState
from hermes_rl.stop_reasons import StopReason

ENOUGH = 6
"""AttemptCounts of a row from which its rate is meaningful: three rollouts, each run twice."""
OFTEN = 0.5
"""Failure rate of a row from which the user is warned."""
WORKER_DIED = "worker_died"
"""Cause of rollouts that failed because their worker died, for any reason."""
MAX_ROWS_RECORDED = 20
"""Rows in `run.json`: the rows with most failures."""


@dataclass
class AttemptCounts:
    """Attempt and failure counts of one row, one policy, or the whole run."""

    attempts: int = 0
    causes: Counter[str] = field(default_factory=Counter)

    @property
    def failure_rate(self) -> float:
        """Fraction of the attempts that failed."""
        return self.causes.total() / self.attempts if self.attempts else 0.0

    @property
    def causes_text(self) -> str:
        """Description of the causes, the most frequent first."""
        return ", ".join(f"{cause}: {count}" for cause, count in self.causes.most_common())

    def record(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "attempts": self.attempts,
            "failure_rate": round(self.failure_rate, 4),
            "causes": dict(self.causes.most_common()),
        }


class FailureRates:
    """Counts attempts since the run was started."""

    def __init__(self) -> None:
        self.all = AttemptCounts()
        self.by_row: dict[str, AttemptCounts] = {}
        """Rows with failures; `_played` has the attempts of the others."""
        self.by_policy: dict[str, AttemptCounts] = {}
        self._played: Counter[str] = Counter()
        self._warned: set[str] = set()
        self.members = 0
        """Members of groups that were run to completion."""
        self.retries_exhausted: Counter[str] = Counter()
        """Members whose retries were exhausted, by row."""
        self.kept_as_worst = 0
        """Members that count as the worst of their group."""

    def count(self, rollout: Rollout) -> str | None:
        """Count an attempt; return a warning for the user, if there is one.

        A rollout that was cancelled, or is older than the trainer allows, is ignored: it does not depend on its row.
        """
        if rollout.stop_reason in (StopReason.CANCELLED, StopReason.STALE):
            return None
        row, is_failure = rollout.key.row.key, not rollout.stop_reason.graded
        self._played[row] += 1
        # The model that replied; a rollout that failed earlier has none.
        replies = rollout.result.replies if rollout.result is not None else []
        policy = next((reply.model for reply in reversed(replies) if reply.model), "(no answer)")
        if policy not in self.by_policy:
            self.by_policy[policy] = AttemptCounts()
        counted = [self.all, self.by_policy[policy]]
        if is_failure or row in self.by_row:
            counted.append(self.by_row.setdefault(row, AttemptCounts(self._played[row] - 1)))
        for attempts in counted:
            attempts.attempts += 1
            if is_failure:
                attempts.causes[WORKER_DIED if rollout.worker_died else str(rollout.stop_reason)] += 1
        return self._describe_row(row) if is_failure else None

    def end(self, group: Group) -> None:
        """Count a finished group."""
        for rollout in group.rollouts:
            if rollout.stop_reason not in (StopReason.CANCELLED, StopReason.STALE):
                self.members += 1
                if rollout.state.abandoned:
                    self.retries_exhausted[group.row.key] += 1
                self.kept_as_worst += rollout.state is RolloutState.RETRIES_EXHAUSTED

    def _describe_row(self, row: str) -> str | None:
        row_counts = self.by_row[row]
        if (
            row in self._warned
            or row_counts.attempts < ENOUGH
            or row_counts.failure_rate < OFTEN
            or row_counts.failure_rate < 2 * self._rate_of_others(row_counts)
        ):
            return None
        self._warned.add(row)
        explanation = "what its agent does may keep them from being graded"
        if row_counts.causes[WORKER_DIED] > row_counts.causes.total() / 2:
            explanation = (
                "the workers that ran them died, with all of their rollouts; something on this machine may end them, "
                "such as a lack of memory"
            )
        return (
            f"row {row} loses {row_counts.failure_rate:.0%} of its rollouts ({row_counts.causes_text}), "
            f"the others {self._rate_of_others(row_counts):.0%}: "
            f"{explanation}; see `failure_rates` in run.json"
        )

    def _rate_of_others(self, row_counts: AttemptCounts) -> float:
        played = self.all.attempts - row_counts.attempts
        return (self.all.causes.total() - row_counts.causes.total()) / played if played else 0.0

    def record(self) -> dict[str, Any]:
        """Return the `failure_rates` entry of run.json."""
        worst_rows = sorted(self.by_row.items(), key=lambda item: (-item[1].causes.total(), item[0]))[
            :MAX_ROWS_RECORDED
        ]
        return {
            **self.all.record(),
            "policies": {name: attempts.record() for name, attempts in sorted(self.by_policy.items())},
            "members": {
                "ended": self.members,
                "retries_exhausted": self.retries_exhausted.total(),
                "kept_as_worst": self.kept_as_worst,
            },
            "rows": [
                {"row_key": key, **attempts.record(), "retries_exhausted": self.retries_exhausted[key]}
                for key, attempts in worst_rows
            ],
        }

    @property
    def summary(self) -> str:
        """Description of the rate and its causes; empty if nothing failed."""
        if not self.all.causes:
            return ""
        text = f"{self.all.failure_rate:.1%} of the rollouts failed ({self.all.causes_text})"
        if self.retries_exhausted.total():
            text += f", {self.retries_exhausted.total()} of {self.members} members of groups had no retries left"
        if self.kept_as_worst:
            text += f" and {self.kept_as_worst} of them count as the worst of their group"
        return f"{text}, see `failure_rates` in run.json"
