"""The file of groups of process mode: what of it belongs to this run, and is as its rollouts say."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.rollouts.encode import Encoder
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.encoding import encoded
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.kept import Kept
from hermes_rl.runs.records import GROUP_KEYS, group_records


@dataclass(frozen=True)
class GroupsFile:
    """`groups.jsonl` of the run with the fingerprint `run`; `moved`: it lies outside of the run directory.

    It is made from `rollouts.jsonl`: a group that is missing, or differs from its rollouts, is written from them.
    """

    journal: Journal
    run: str
    moved: bool = False

    async def lines(self, group: Group, encoder: Encoder, generation_params: Mapping[str, Any]) -> list[bytes]:
        """A group with its tokens and its certificate as it is to be written: one line per layer."""
        await encoder.encode_group(group)
        return [await encoded(record) for record in group_records(group, generation_params, self.run)]

    def check(self, group_size: int) -> None:
        """Refuse groups that are of another run, or of another size than those that would follow.

        Raises:
            UserError: what is there, and the way out.
        """
        for line in self.journal.read(*GROUP_KEYS):
            self._check_run(line)
            size = len(line["scores"]) if isinstance(line["scores"], list) else 0
            if size != group_size:
                raise UserError(
                    f"{self.journal.path} holds groups of {size}, and process.group_size is {group_size}: set it to "
                    f"{size} to go on, or use --fresh to start beside it"
                )

    def _check_run(self, line: dict[str, Any]) -> None:
        if line.get("run", None if self.moved else self.run) != self.run:
            raise UserError(
                f"{self.journal.path} holds groups of another run ({line.get('run')}; this one is {self.run}): move "
                "it, or choose another place"
            )

    def reconcile(self, kept: Kept, changed: Set[str] = frozenset()) -> set[str]:
        """The groups that are written as their rollouts are; the others, and those `changed`, are taken out.

        Raises:
            UserError: a file elsewhere holds groups whose rollouts are not here.
        """
        layers: dict[str, set[int]] = {}
        totals: dict[str, int] = {}
        wrong: set[str] = set()
        extra = False
        known = set(kept.groups)
        for line in self.journal.read(*GROUP_KEYS):
            group, layer = line["group"], line.get("layer", 0)
            if group not in known and self.moved:
                raise UserError(
                    f"{self.journal.path} holds groups of a run in another directory than "
                    f"{kept.rollouts.path.parent} (such as {group}): move it, or choose another place"
                )
            seen = layers.setdefault(group, set())
            extra = extra or layer in seen
            seen.add(layer)
            if group in changed or line["scores"] != kept.scores(group):
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
