"""`groups.jsonl`: what of it belongs to this run, and is as the run's rollouts say."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.runs.encoding import encoded
from hermes_rl.runs.group_lines import GROUP_KEYS
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.store import RolloutStore


@dataclass(frozen=True)
class GroupsFile:
    """The groups of the run with the fingerprint `run`; `moved`: the file lies outside of the run directory.

    The file is made from the store: a group that is missing in it, or differs from its rollouts, is written from them.
    """

    journal: Journal
    run: str
    moved: bool = False

    def check(self, group_size: int) -> None:
        """Refuse groups that are of another run, or of another size than those that would follow.

        Raises:
            UserError: what is there, and the way out.
        """
        for line in self.journal.read(*GROUP_KEYS):
            if line.get("run", None if self.moved else self.run) != self.run:
                raise UserError(
                    f"{self.journal.path} holds groups of another run ({line.get('run')}; this one is {self.run}): "
                    "move it, or choose another place"
                )
            size = len(line["scores"]) if isinstance(line["scores"], list) else 0
            if size != group_size:
                raise UserError(
                    f"{self.journal.path} holds groups of {size}, and process.group_size is {group_size}: set it to "
                    f"{size} to go on, or use --fresh to start beside it"
                )

    def groups(self) -> set[str]:
        """Every group that is in the file."""
        return {line["group"] for line in self.journal.read(*GROUP_KEYS)}

    def reconcile(self, store: RolloutStore, changed: Set[str] = frozenset(), *, compare: bool = True) -> set[str]:
        """The groups that are written as their rollouts are; the others, and those `changed`, are taken out.

        Without `compare` scores may be others than those of the rollouts: an environment's own code has made them.

        Raises:
            UserError: a file elsewhere holds groups whose rollouts are not here.
        """
        layers: dict[str, set[int]] = {}
        totals: dict[str, int] = {}
        wrong: set[str] = set()
        extra = False
        for line in self.journal.read(*GROUP_KEYS):
            group, layer = line["group"], line.get("layer", 0)
            if self.moved and group not in store.groups:
                raise UserError(
                    f"{self.journal.path} holds groups of a run in another directory than {store.path} (such as "
                    f"{group}): move it, or choose another place"
                )
            seen = layers.setdefault(group, set())
            extra = extra or layer in seen
            seen.add(layer)
            if group in changed or (compare and line["scores"] != store.scores(group)):
                wrong.add(group)
            totals[group] = line.get("layers", 1)
        right = {group for group, seen in layers.items() if group not in wrong and seen == set(range(totals[group]))}
        if extra or len(right) < len(layers):
            self._take_out({(group, layer) for group in right for layer in layers[group]})
        return right

    def _take_out(self, right: set[tuple[str, int]]) -> None:
        left = set(right)

        def first(line: dict[str, Any]) -> bool:
            place = line["group"], line.get("layer", 0)
            present = place in left
            left.discard(place)
            return present

        self.journal.keep(line for line in self.journal.read() if first(line))

    async def encoded(self, lines: list[dict[str, Any]]) -> list[bytes]:
        """The lines of a group as they are to be written; their JSON is made off the event loop."""
        return [await encoded(line) for line in lines]

    def write(self, lines: list[bytes]) -> None:
        """Write the lines of a group, together."""
        self.journal.append_lines(lines)

    def close(self) -> None:
        """Close the file."""
        self.journal.close()
