"""`RolloutStore`: everything that a run knows about its rollouts, on disk before it counts.

`rollouts.jsonl` has a line per rollout that has ended; `waiting.jsonl` has those that were played and get their score
together with their group, so that a crash before that costs no generation. Resuming, grading anew, evaluating and
delivering read the store and nothing else. What a line says is `hermes_rl.runs.records`; here it is found again, by the
fields `group`, `index`, `attempt` and `state`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.errors import UserError
from hermes_rl.rollouts.environment import Environment
from hermes_rl.rollouts.rollout import Group, Rollout, RolloutKey, RolloutState
from hermes_rl.rollouts.runner import take_up
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.records import DIGITS, ROLLOUT_KEYS, rollout_of, rollout_record

ROLLOUTS, WAITING = "rollouts.jsonl", "waiting.jsonl"

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlayedEntry:
    """Where a rollout's line begins in its file, and what decides whether the rollout has to be played again."""

    begin: int
    attempt: int
    state: RolloutState
    score: float | None


@dataclass(slots=True)
class GroupEntry:
    """What is recorded about one group. `ended` and `waiting` are by the member's index in the group."""

    row_key: str
    epoch: int
    digest: str
    ended: dict[int, PlayedEntry] = field(default_factory=dict)
    waiting: dict[int, PlayedEntry] = field(default_factory=dict)


class RolloutStore:
    """The rollouts in a run directory; it answers `hermes_rl.rollouts.runner.Recorded`.

    Args:
        directory: where the files are.
        size: members of a group.
        compared: rewards compare the members of a group, so that all of them get their scores together.

    Raises:
        UserError: another process uses a file, or a line was not written by this form of run.
    """

    def __init__(self, directory: RunDirectory, size: int, *, compared: bool = False) -> None:
        self.size, self.compared = size, compared
        self.path = directory.path
        self._groups: dict[str, GroupEntry] = {}
        self._rollouts = directory.journal(ROLLOUTS)
        self._waiting: Journal | None = None
        try:
            if compared or (directory.path / WAITING).exists():
                self._waiting = directory.journal(WAITING)
            self.load()
        except BaseException:
            self._rollouts.close()
            if self._waiting is not None:
                self._waiting.close()
            raise

    # ------------------------------------------------------------------ reading the files

    def load(self) -> None:
        """Read what is in the files; call it again whenever they were rewritten."""
        self._index()
        again = self._to_compare_again()
        if again:
            self._rollouts.keep(line for line in self._rollouts.read() if _place(line) not in again)
            self._index()

    def clear(self) -> None:
        """Forget everything."""
        for journal in self._journals:
            journal.keep([])
        self._index()

    def rewrite(self, change: Callable[[Line], Line]) -> None:
        """Put another line in the place of each, each file in one step: a crash leaves the old file or the new one."""
        for journal in self._journals:
            journal.keep(change(line) for line in journal.read(*ROLLOUT_KEYS))

    def all_lines(self) -> Iterator[Line]:
        """Every line of every file, failed attempts included."""
        for journal in self._journals:
            yield from journal.read(*ROLLOUT_KEYS)

    @property
    def empty(self) -> bool:
        """True where nothing was recorded yet."""
        return all(journal.empty for journal in self._journals)

    @property
    def _journals(self) -> list[Journal]:
        return [self._rollouts, *([self._waiting] if self._waiting is not None else [])]

    def _index(self) -> None:
        self._groups = {}
        for begin, line in self._rollouts.scan(*ROLLOUT_KEYS):
            self._enter_ended(line, begin)
        for begin, line in self._waiting.scan(*ROLLOUT_KEYS) if self._waiting is not None else ():
            self._enter_waiting(line, begin)

    def _enter_ended(self, line: Line, begin: int) -> None:
        group, entry = self._entered(line), _entry(line, begin)
        known = group.ended.get(line["index"])
        if known is None or not known.state.final:
            group.ended[line["index"]] = entry

    def _enter_waiting(self, line: Line, begin: int) -> None:
        self._entered(line).waiting[line["index"]] = _entry(line, begin)

    def _entered(self, line: Line) -> GroupEntry:
        known = self._groups.get(line["group"])
        if known is None:
            known = GroupEntry(line["row_key"], line["epoch"], line.get("row_digest", ""))
            self._groups[line["group"]] = known
        return known

    def _to_compare_again(self) -> set[tuple[str, int, int]]:
        """Lines that are taken out of the rollouts, since their group is still to be compared as a whole.

        A run that was killed while it wrote a compared group has written some of its members only, and one whose
        comparison failed has said so in lines that hold no score. Both wait again afterwards.
        """
        if not self.compared:
            return set()
        assert self._waiting is not None
        found = set()
        for line in self._rollouts.read():
            group = self._groups[line["group"]]
            waits = group.waiting.get(line["index"])
            announced = line["state"] == RolloutState.FAILED and waits is not None and waits.attempt == line["attempt"]
            unfinished = line["state"] in (RolloutState.SCORED, RolloutState.WAITING) and not self.complete(
                line["group"]
            )
            if announced or unfinished:
                found.add(_place(line))
                if waits is None:
                    self._waiting.append({**line, "state": RolloutState.WAITING, "score": None})
        return found

    # ------------------------------------------------------------------ what is known about a group

    @property
    def groups(self) -> dict[str, GroupEntry]:
        """What is recorded, by the id of the group."""
        return self._groups

    def complete(self, group: str) -> bool:
        """True where nothing of the group is left to be played or scored."""
        known = self._groups.get(group)
        if known is None:
            return False
        states = [entry.state for entry in known.ended.values()]
        if self.compared and RolloutState.LEFT_OUT in states:
            return True  # the others are never compared without it
        return len(states) == self.size and all(state.final for state in states)

    def played(self, group: str) -> bool:
        """True where every member was played to its end, perhaps to a failure."""
        known = self._groups.get(group)
        return known is not None and len(known.ended) >= self.size

    def scores(self, group: str) -> list[float | None]:
        """The scores of the members in order; None for one that has none."""
        known = self._groups.get(group)
        ended = known.ended if known is not None else {}
        return [ended[index].score if index in ended else None for index in range(self.size)]

    def left_out(self, group: str, *, drop_uniform: bool) -> bool:
        """True where the group was played to its end and is not to be written or sent.

        Either the spec drops how one of its members ended, or all of its scores are the same.
        """
        if not self.complete(group):
            return False
        scores = self.scores(group)
        return None in scores or (drop_uniform and len(scores) > 1 == len(set(scores)))

    def rollouts_of_unfinished_groups(self) -> int:
        """How many rollouts are recorded of groups that are not complete."""
        unfinished = [known for group, known in self._groups.items() if not self.complete(group)]
        return sum(len(_recallable(known)) for known in unfinished)

    def require_same(self, row: Row, group: str) -> None:
        """Refuse a row whose content is no longer that of its recorded rollouts.

        Raises:
            UserError: which row, and the way out.
        """
        known = self._groups.get(group)
        if known is not None and known.digest and known.digest != row.digest[:DIGITS]:
            raise UserError(
                f"row {row.key} has changed since its rollouts were played; nothing was touched: use --fresh to start "
                "beside them, or give back the row that was"
            )

    def lines(self, groups: Iterable[str]) -> Iterator[list[Line]]:
        """For each group whose members have all been played: a line per member, the last one where it failed."""
        for group in groups:
            if self.played(group):
                ended = self._groups[group].ended
                yield [self._rollouts.at(ended[index].begin) for index in range(self.size)]

    # ------------------------------------------------------------------ for the runner

    def attempts(self, key: RolloutKey) -> int:
        """How many attempts at this place are recorded, so that no id is given twice."""
        known = self._groups.get(key.group)
        entries = (known.ended.get(key.index), known.waiting.get(key.index)) if known is not None else ()
        return max((entry.attempt + 1 for entry in entries if entry is not None), default=0)

    async def recall(self, key: RolloutKey) -> Rollout | None:
        """The rollout of this place where it need not be played again: it is final, or waits for its group."""
        known = self._groups.get(key.group)
        if known is None:
            return None
        ended, waiting = known.ended.get(key.index), known.waiting.get(key.index)
        if ended is not None and ended.state.final:
            line = await asyncio.to_thread(self._rollouts.at, ended.begin)
        elif waiting is not None and self._waiting is not None:
            line = await asyncio.to_thread(self._waiting.at, waiting.begin)
        else:
            return None
        return rollout_of(line, key)

    async def group(self, group: str, environment: Environment) -> Group:
        """A group that is complete, with what its rollouts have of tokens."""
        known = self._groups[group]
        # Every member is recorded, so nothing of the row is needed but its key.
        row = Row(key=known.row_key, columns={}, index=0, digest=known.digest)
        keys = [RolloutKey(row, group, index, self.size) for index in range(self.size)]
        rollouts = [rollout for key in keys if (rollout := await self.recall(key)) is not None]
        for rollout in rollouts:
            take_up(environment, rollout)
        return Group(group, row, rollouts, known.epoch)

    def record(self, *rollouts: Rollout) -> None:
        """Write the lines of rollouts that belong together, in one piece.

        Raises:
            RunError: they cannot be written.
        """
        for waits in (True, False):
            lines = [rollout_record(one) for one in rollouts if (one.state is RolloutState.WAITING) is waits]
            if not lines:
                continue
            journal = self._waiting if waits else self._rollouts
            assert journal is not None, "only a store of compared groups has rollouts that wait"
            for line, begin in zip(lines, journal.append_all(lines), strict=True):
                (self._enter_waiting if waits else self._enter_ended)(line, begin)

    def close(self) -> None:
        """Close the files; the one of those that wait is removed where none does."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            if not any(set(known.waiting) - _final(known) for known in self._groups.values()):
                with suppress(OSError):
                    waiting.path.unlink()
            waiting.close()
        self._rollouts.close()


def _entry(line: Line, begin: int) -> PlayedEntry:
    return PlayedEntry(begin, line["attempt"], RolloutState(line["state"]), line["score"])


def _place(line: Line) -> tuple[str, int, int]:
    return line["group"], line["index"], line["attempt"]


def _final(known: GroupEntry) -> set[int]:
    return {index for index, entry in known.ended.items() if entry.state.final}


def _recallable(known: GroupEntry) -> set[int]:
    """Members that are not played again."""
    return _final(known) | set(known.waiting)
