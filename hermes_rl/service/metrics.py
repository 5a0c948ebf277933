"""What has gone through the service since it began, for GET /v1/metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hermes_rl import Group

INEXACT = "inexact"
STALE = "stale"


def unproven(group: Group) -> str | None:
    """Why the tokens of a group are not proven to be those that were sampled; None where they are."""
    certificate = group.certificate
    if certificate is not None and certificate.exact:
        return None
    problems = certificate.problems if certificate is not None else ("it has no certificate",)
    return f"its tokens are not proven to be those that were sampled: {problems[0]}"


class Metrics:
    """Counts what was handed out, and what was not to be trained on."""

    def __init__(self) -> None:
        self.handed_out = self.uniform = 0
        self.dropped: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        """Rollouts that were not scored for a reason of ours, by how they ended."""
        self.cancelled = 0
        """Answers whose reader went away."""

    def count(self, group: Group, dropped: str | None) -> None:
        """Take a group into account that a reader gets."""
        for rollout in group.rollouts:
            if rollout.error is not None and not rollout.ending.graded:
                self.failures[str(rollout.ending)] += 1
        if dropped is not None:
            self.dropped[dropped] += 1
            return
        self.handed_out += 1
        self.uniform += group.uniform

    def record(self, **more: Any) -> dict[str, Any]:
        """Return it as JSON has it, with what others know."""
        return {
            "groups": {
                "handed_out": self.handed_out,
                "dropped": self.dropped.total(),
                "stale": self.dropped[STALE],
                "inexact": self.dropped[INEXACT],
                "by_cause": dict(self.dropped),
            },
            "zero_variance": self.uniform / self.handed_out if self.handed_out else None,
            "failures": dict(self.failures),
            "readers_gone": self.cancelled,
            **more,
        }
