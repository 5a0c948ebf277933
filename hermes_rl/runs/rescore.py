"""Rollouts that are there, brought to what the spec says now of how they are scored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.errors import UserError
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.grading import Grading
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.kept import Kept
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.records import ROLLOUT_KEYS
from hermes_rl.runs.rejudge import Rejudging


@dataclass(frozen=True)
class Regrading:
    """From what `run.json` said to what the spec says now; `rejudging` calls rewards that have changed."""

    described: Mapping[str, Any]
    grading: Grading
    note: Callable[[str], None]
    rejudging: Rejudging | None = None
    changed: set[str] = field(default_factory=set)
    """Groups that have another score, or are trained on otherwise, after a call."""

    @classmethod
    def of(
        cls, directory: RunDirectory, compiled: CompiledSpec, rows: Iterable[Row], size: int, progress: Progress
    ) -> Regrading:
        """What brings the rollouts in a directory to the spec's rewards and scoring."""
        grading = Grading.of(compiled.spec, compiled.grader, size)
        rejudging = Rejudging(directory, compiled, grading, rows, progress.note)
        return cls(directory.described(), grading, progress.note, rejudging)

    async def __call__(self, kept: Kept) -> None:
        """Bring the rollouts to the spec's scoring, atomically; a repetition after a crash does no harm.

        Raises:
            UserError: what is there cannot be scored anew, and the way out.
            RunError: a judge could not be asked; nothing was changed.
        """
        if all(journal.empty for journal in kept.journals):
            return
        before = self.described.get("grading")
        if not isinstance(before, Mapping):
            raise UserError(
                f"{kept.rollouts.path.parent}: run.json does not say how the rollouts that are there were graded; "
                "use --fresh to start beside them"
            )
        changed = self.grading.changed(before)
        if changed and self.rejudging is not None:
            await self.rejudging.judge(kept, changed)
        old = before.get("scoring") or {}
        if changed or old != self.grading.scoring():
            self._rescore(kept, old.get("endings") or {})
        if self.rejudging is not None:
            self.rejudging.forget()

    def _rescore(self, kept: Kept, endings: Mapping[str, Any]) -> None:
        count = 0
        for journal in kept.journals:
            found: list[int] = []
            journal.keep(self._scored(journal, endings, found))
            count += len(found)
        if count:
            self.note(f"the scoring has changed: {count} rollouts that were there are scored anew")

    def _scored(self, journal: Journal, endings: Mapping[str, Any], found: list[int]) -> Iterator[dict[str, Any]]:
        for line in journal.read(*ROLLOUT_KEYS):
            line["rewards"] = {name: line["rewards"][name] for name in self.grading.rewards if name in line["rewards"]}
            waits = line["score"] is None and line["error"] is None
            judged = self.rejudging is not None and self.rejudging.apply(line)
            if judged and set(line["rewards"]) != set(self.grading.rewards):
                line["score"], line["error"], waits = None, None, True  # mended, and to be compared with its group
            if not waits and (judged or line["score"] is not None or endings.get(line["ending"]) == "drop"):
                found.append(1)
                self._score(line, endings)
            yield line

    def _score(self, line: dict[str, Any], endings: Mapping[str, Any]) -> None:
        before = line["score"], endings.get(line["ending"]) == "mask"
        line["score"], line["error"] = self.grading.score(line)
        if before != (line["score"], self.grading.endings.get(line["ending"]) == "mask"):
            self.changed.add(line["group"])
