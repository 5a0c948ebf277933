"""Rollouts that are there, scored anew where the scoring has changed since they were played."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.runs.grading import Grading
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.records import ROLLOUT_KEYS


@dataclass(frozen=True)
class Regrading:
    """From what `run.json` said to what the spec says now."""

    described: Mapping[str, Any]
    grading: Grading
    note: Callable[[str], None]
    changed: set[str] = field(default_factory=set)
    """Groups that have another score, or are trained on otherwise, after a call."""

    def __call__(self, rollouts: Journal) -> None:
        """Bring the rollouts to the spec's scoring, atomically; a repetition after a crash does no harm.

        Raises:
            UserError: what is there cannot be scored anew, and the way out.
        """
        if rollouts.empty:
            return
        before = self.described.get("grading")
        if not isinstance(before, Mapping):
            raise UserError(
                f"{rollouts.path.parent}: run.json does not say how the rollouts that are there were graded; "
                "use --fresh to start beside them"
            )
        self.grading.require_same_rewards(before, str(self.described.get("started", "they were played")))
        old = before.get("scoring") or {}
        if old != self.grading.scoring():
            self._rescore(rollouts, old.get("endings") or {})

    def _rescore(self, rollouts: Journal, endings: Mapping[str, Any]) -> None:
        count = 0

        def scored() -> Iterator[dict[str, Any]]:
            nonlocal count
            for line in rollouts.read(*ROLLOUT_KEYS):
                if line["score"] is not None or endings.get(line["ending"]) == "drop":
                    count += 1
                    self._score(line, endings)
                yield line

        rollouts.keep(scored())
        if count:
            self.note(f"the scoring has changed: {count} rollouts that were there are scored anew")

    def _score(self, line: dict[str, Any], endings: Mapping[str, Any]) -> None:
        before = line["score"], endings.get(line["ending"]) == "mask"
        line["score"], line["error"] = self.grading.score(line)
        if before != (line["score"], self.grading.endings.get(line["ending"]) == "mask"):
            self.changed.add(line["group"])
