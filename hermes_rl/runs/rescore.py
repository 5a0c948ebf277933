"""Rollouts that are there, scored anew where the scoring has changed since they were played."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.runs.grading import Grading
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.records import GROUP_KEYS, ROLLOUT_KEYS, UNTRAINED, member_of


@dataclass(frozen=True)
class Regrading:
    """From what `run.json` said to what the spec says now; `drop_uniform` as in process mode."""

    described: Mapping[str, Any]
    grading: Grading
    note: Callable[[str], None]
    drop_uniform: bool = False

    def __call__(self, rollouts: Journal, groups: Journal | None = None) -> None:
        """Bring both files to the spec's scoring, atomically each; a repetition after a crash does no harm.

        Raises:
            UserError: what is there cannot be scored anew, and the way out.
        """
        if not any(journal.path.stat().st_size for journal in (rollouts, groups) if journal is not None):
            return
        before = self.described.get("grading")
        if not isinstance(before, Mapping):
            raise UserError(
                f"{rollouts.path.parent}: run.json does not say how the rollouts that are there were graded; "
                "use --fresh to start beside them"
            )
        self.grading.require_same_rewards(before, str(self.described.get("started", "they were played")))
        old = before.get("scoring") or {}
        if old == self.grading.scoring():
            return
        endings = old.get("endings") or {}
        found = self._scores(rollouts, endings)
        if not found:
            return
        rollouts.keep(self._rescored(rollouts))
        if groups is not None:
            groups.keep(self._regrouped(groups, found))
        self.note(f"the scoring has changed: {sum(map(len, found.values()))} rollouts that were there are scored anew")

    def _scores(self, rollouts: Journal, endings: Mapping[str, Any]) -> dict[str, dict[int, tuple[float | None, str]]]:
        found: dict[str, dict[int, tuple[float | None, str]]] = {}
        for line in rollouts.read(*ROLLOUT_KEYS):
            if line["score"] is None:
                continue
            ending = line["ending"]
            if endings.get(ending) == "mask" and self.grading.endings.get(ending, "grade") not in ("mask", "drop"):
                raise UserError(
                    f"endings.{ending} was `mask`: what is trained on of the rollouts that are there cannot be made "
                    "anew; leave it, or use --fresh to start beside them"
                )
            found.setdefault(line["group"], {})[member_of(line)] = (self.grading.score(line)[0], ending)
        return found

    def _rescored(self, rollouts: Journal) -> Iterator[dict[str, Any]]:
        for line in rollouts.read(*ROLLOUT_KEYS):
            if line["score"] is not None:
                line["score"], line["error"] = self.grading.score(line)
            yield line

    def _regrouped(
        self, groups: Journal, found: Mapping[str, Mapping[int, tuple[float | None, str]]]
    ) -> Iterator[dict[str, Any]]:
        """The groups that are still whole, with their new scores; the others are played again or left out."""
        for line in groups.read(*GROUP_KEYS):
            members = found.get(line["group"], {})
            if sorted(members) != list(range(len(line["scores"]))):
                raise UserError(
                    f"{groups.path}: the rollouts of group {line['group']} are not in the run directory, so it "
                    "cannot be scored anew; use --fresh to start beside it"
                )
            ordered = [members[index] for index in range(len(members))]
            scores = [score for score, _ in ordered if score is not None]
            uniform = len(scores) > 1 == len(set(scores))
            if len(scores) == len(ordered) and not (uniform and self.drop_uniform):
                yield {**line, "scores": scores, "masks": self._masks(line, [ending for _, ending in ordered])}

    def _masks(self, line: Mapping[str, Any], endings: list[str]) -> Any:
        if line.get("masks") is None:
            return None
        masked = [self.grading.endings.get(ending) == "mask" for ending in endings]
        return [[UNTRAINED] * len(mask) if off else mask for mask, off in zip(line["masks"], masked, strict=True)]
