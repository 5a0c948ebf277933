"""What a run of process mode has written so far, and whether it can be gone on with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.records import GROUP_KEYS, ROLLOUT_KEYS


@dataclass(frozen=True)
class RunFiles:
    """Both files of a run, `run` its fingerprint; `moved`: the groups lie outside of the run directory."""

    groups: Journal
    rollouts: Journal
    run: str
    moved: bool = False

    def check(self, group_size: int) -> None:
        """Refuse groups that are of another run, or of another size than those that would follow.

        Raises:
            UserError: what is there, and the way out.
        """
        for line in self.groups.read(*GROUP_KEYS):
            self._check_run(line)
            size = len(line["scores"]) if isinstance(line["scores"], list) else 0
            if size != group_size:
                raise UserError(
                    f"{self.groups.path} holds groups of {size}, and process.group_size is {group_size}: set it to "
                    f"{size} to go on, or use --fresh to start beside it"
                )

    def _check_run(self, line: dict[str, Any]) -> None:
        if line.get("run", None if self.moved else self.run) != self.run:
            raise UserError(
                f"{self.groups.path} holds groups of another run ({line.get('run')}; this one is {self.run}): move "
                "it, or choose another place"
            )

    def finished(self, group_size: int, *, drop_uniform: bool) -> tuple[set[str], set[str]]:
        """The groups that are written, and those that were played and discarded as uniform.

        Rollouts of groups that were cut short are taken out, so that no id appears twice when they are played again.
        """
        written = {str(line["group"]) for line in self.groups.read(*GROUP_KEYS)}
        scores: dict[str, list[float]] = {}
        for line in self.rollouts.read(*ROLLOUT_KEYS):
            if line["score"] is not None:
                scores.setdefault(line["group"], []).append(line["score"])
        foreign = sorted(written - scores.keys())
        if foreign and self.moved:
            raise UserError(
                f"{self.groups.path} holds groups of a run in another directory than {self.rollouts.path.parent} "
                f"(such as {foreign[0]}): move it, or choose another place"
            )
        discarded = {
            group
            for group, found in scores.items()
            if group not in written and drop_uniform and len(found) == group_size > 1 == len(set(found))
        }
        kept = written | discarded
        self.rollouts.keep(line for line in self.rollouts.read() if line["group"] in kept)
        return written, discarded
