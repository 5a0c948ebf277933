"""The rollouts of a run that are on disk: found again by their place, never played or scored twice.

One store for every mode. `rollouts.jsonl` has a line per finished rollout; `waiting.jsonl` those that are played and
get their score together with their group, so that a crash before that costs no generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.endings import Ending
from hermes_rl.errors import UserError
from hermes_rl.rollouts.environment import Environment, Treatment
from hermes_rl.rollouts.rollout import Rollout, RolloutKey
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.records import DIGITS, ROLLOUT_KEYS, member_of, rollout_record
from hermes_rl.runs.restore import attempt_of, rollout_of

ROLLOUTS, WAITING = "rollouts.jsonl", "waiting.jsonl"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a line begins, and what decides whether it is final."""

    begin: int
    score: float | None
    ending: Ending


@dataclass(frozen=True, slots=True)
class Held:
    """A rollout that waits for its group: where its line begins in the other file, and which attempt it is."""

    begin: int
    attempt: int


class Kept:
    """The rollouts in a run directory; see `hermes_rl.rollouts.memory.Memory`.

    Args:
        directory: of the run.
        size: members of a group.
        seed: of the spec, from which rollouts have their own.
        together: rollouts of a group are scored together, by rewards that compare them.
        treatment: what the spec does with an ending.

    Raises:
        UserError: a file is in use by another run, or holds lines that are no rollouts.
    """

    def __init__(
        self,
        directory: RunDirectory,
        size: int,
        *,
        seed: int = 0,
        together: bool = False,
        treatment: Callable[[Ending], Treatment] = lambda ending: "grade",
    ) -> None:
        self.size, self.seed, self.together, self.treatment = size, seed, together, treatment
        self.rollouts = directory.journal(ROLLOUTS)
        self._waiting: Journal | None = None
        self._entries: dict[str, dict[int, Entry]] = {}
        self._attempts: dict[tuple[str, int], int] = {}
        self._held: dict[tuple[str, int], Held] = {}
        self._digests: dict[str, str] = {}
        try:
            if together or (directory.path / WAITING).exists():
                self._waiting = directory.journal(WAITING)
        except BaseException:
            self.rollouts.close()
            raise

    @classmethod
    def of(cls, directory: RunDirectory, environment: Environment, size: int) -> Kept:
        """The store of a run that plays this environment."""
        return cls(
            directory,
            size,
            seed=environment.seed,
            together=environment.has_group_rewards,
            treatment=environment.treatment,
        )

    @property
    def journals(self) -> list[Journal]:
        """Every file that holds rollouts."""
        return [self.rollouts, *([self._waiting] if self._waiting is not None else [])]

    def load(self) -> None:
        """Read what is there; again whenever the files were rewritten."""
        self._index()
        superseded = self._superseded()
        if superseded:
            self.rollouts.keep(line for line in self.rollouts.read() if line["id"] not in superseded)
            self._index()

    def clear(self) -> None:
        """Begin with nothing."""
        self.rollouts.keep([])
        if self._waiting is not None:
            self._waiting.keep([])
        self._index()

    def _index(self) -> None:
        self._entries, self._attempts, self._held, self._digests = {}, {}, {}, {}
        for begin, line in self.rollouts.scan(*ROLLOUT_KEYS):
            self._enter(line, begin)
        for begin, line in self._waiting.scan(*ROLLOUT_KEYS) if self._waiting is not None else ():
            place = line["group"], member_of(line)
            self._held[place] = Held(begin, attempt_of(line))
            self._count(place, attempt_of(line))

    def _enter(self, line: dict[str, Any], begin: int) -> None:
        group, member = line["group"], member_of(line)
        self._count((group, member), attempt_of(line))
        if "row_digest" in line:
            self._digests.setdefault(group, line["row_digest"])
        members = self._entries.setdefault(group, {})
        known = members.get(member)
        if known is None or not self._final(known):
            members[member] = Entry(begin, line["score"], Ending(line["ending"]))

    def _count(self, place: tuple[str, int], attempt: int) -> None:
        self._attempts[place] = max(self._attempts.get(place, 0), attempt + 1)

    def _final(self, entry: Entry) -> bool:
        """Scored, or left out by the spec: never played again."""
        return entry.score is not None or self._left_out(entry)

    def _left_out(self, entry: Entry) -> bool:
        return entry.score is None and entry.ending.graded and self.treatment(entry.ending) == "drop"

    def _superseded(self) -> set[str]:
        """Lines that are to be scored anew with their group: they wait, and are taken out of the rollouts.

        A run that was killed while it wrote a compared group has written only some of its members; and one that failed
        to compare a group has said so in lines that hold no score.
        """
        if not self.together:
            return set()
        again = {group for group in self._entries if not self.complete(group)}
        found = [line for line in self.rollouts.read() if line["group"] in again and self._unfinished(line)]
        assert self._waiting is not None
        for line in found:
            if (line["group"], member_of(line)) not in self._held:
                self._waiting.append({**line, "score": None})
        return {line["id"] for line in found}

    def _unfinished(self, line: dict[str, Any]) -> bool:
        held = self._held.get((line["group"], member_of(line)))
        waits = line["score"] is not None or line["error"] is None
        return waits or (held is not None and held.attempt == attempt_of(line))

    def complete(self, group: str) -> bool:
        """True where nothing of the group is left to be played or scored."""
        members = self._entries.get(group, {})
        if self.together and any(self._left_out(member) for member in members.values()):
            return True  # the others are never compared without it
        return all(index in members and self._final(members[index]) for index in range(self.size))

    def whole(self, group: str) -> bool:
        """True where every member was played to its end, also to a failure."""
        return all(index in self._entries.get(group, {}) for index in range(self.size))

    def discarded(self, group: str, *, drop_uniform: bool) -> bool:
        """Played to its end and left out: because the spec drops how a member ended, or as uniform."""
        if not self.complete(group):
            return False
        scores = self.scores(group)
        return None in scores or (drop_uniform and len(scores) > 1 == len(set(scores)))

    def require_same(self, row: Row, group: str) -> None:
        """Refuse a row whose content is no longer that of the rollouts that are here.

        Raises:
            UserError: which row, and the way out.
        """
        if self._digests.get(group, row.digest[:DIGITS]) != row.digest[:DIGITS]:
            raise UserError(
                f"row {row.key} has changed since its rollouts were played; nothing was touched: use --fresh to start "
                "beside them, or give back the row that was"
            )

    def scores(self, group: str) -> list[float | None]:
        """The scores of the members in order; None for one that has none."""
        members = self._entries.get(group, {})
        return [members[index].score if index in members else None for index in range(self.size)]

    def unfinished(self) -> int:
        """How many rollouts are there of groups that are not complete."""
        groups = [group for group in self.groups if not self.complete(group)]
        places = ((group, index) for group in groups for index in range(self.size))
        return sum(place in self._held or self._is_final(*place) for place in places)

    def _is_final(self, group: str, member: int) -> bool:
        entry = self._entries.get(group, {}).get(member)
        return entry is not None and self._final(entry)

    @property
    def groups(self) -> Iterable[str]:
        """Every group that has a rollout here."""
        return {*self._entries, *(group for group, _ in self._held)}

    async def recall(self, key: RolloutKey) -> Rollout | None:
        """See `Memory`."""
        place = key.group, key.index
        entry = self._entries.get(key.group, {}).get(key.index)
        if entry is not None and self._final(entry):
            line = await asyncio.to_thread(self.rollouts.at, entry.begin)
        elif place in self._held and self._waiting is not None:
            line = await asyncio.to_thread(self._waiting.at, self._held[place].begin)
        else:
            return None
        masked = self.treatment(Ending(line["ending"])) == "mask"
        return rollout_of(line, key, key.seed(self.seed), masked=masked)

    def attempts(self, key: RolloutKey) -> int:
        """See `Memory`."""
        return self._attempts.get((key.group, key.index), 0)

    def hold(self, rollout: Rollout) -> None:
        """See `Memory`.

        Raises:
            RunError: it cannot be written.
        """
        assert self._waiting is not None
        place = rollout.key.group, rollout.key.index
        begin = self._waiting.append(rollout_record(rollout))
        self._held[place] = Held(begin, rollout.key.attempt)
        self._count(place, rollout.key.attempt)

    def keep(self, rollout: Rollout) -> None:
        """Write the line of a finished rollout.

        Raises:
            RunError: it cannot be written.
        """
        line = rollout_record(rollout)
        self._enter(line, self.rollouts.append(line))

    def lines(self, groups: Iterable[str]) -> Iterator[list[dict[str, Any]]]:
        """For each group whose members have all been played: a line per member, the last where it failed."""
        for group in groups:
            members = self._entries.get(group, {})
            if self.whole(group):
                yield [self.rollouts.at(members[index].begin) for index in range(self.size)]

    def close(self) -> None:
        """Close the files; the one of those that wait goes away where none does."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            if all(self._is_final(*place) for place in self._held):
                with suppress(OSError):
                    waiting.path.unlink()
            waiting.close()
        self.rollouts.close()
