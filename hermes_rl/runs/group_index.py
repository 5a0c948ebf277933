"""What a run remembers of each of its groups, so that its process does not grow with their number.

Groups that are still played are objects. A settled one, of which nothing is left to be played or scored, is asked for
seldom, and is kept in a private database of SQLite's: two megabytes of it lie in memory, the rest in a temporary file
that the system removes with the process.
"""

from __future__ import annotations

import marshal
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hermes_rl.errors import RunError
from hermes_rl.rollouts.rollout import RolloutState


@dataclass(frozen=True, slots=True)
class PlayedEntry:
    """Where a rollout's line begins in its file, and what decides whether the rollout has to be played again."""

    begin: int
    attempt: int
    state: RolloutState
    score: float | None
    part: str | None = None
    """See `Seat.part`; None also where one agent plays alone."""
    others: tuple[tuple[int, float | None, str | None], ...] = ()
    """Of the other seats of its episode: where the line begins, the score, and the part."""


@dataclass(slots=True)
class GroupEntry:
    """What is recorded about one group. `ended` and `waiting` are by the member's index in the group."""

    row_key: str
    epoch: int
    digest: str
    ended: dict[int, PlayedEntry] = field(default_factory=dict)
    waiting: dict[int, PlayedEntry] = field(default_factory=dict)


class GroupIndex(Mapping[str, GroupEntry]):
    """The entries by the id of the group. An entry that is changed has to be `put` again. Raises `RunError` where the
    temporary file cannot be written."""

    def __init__(self) -> None:
        self.open: dict[str, GroupEntry] = {}
        """The groups that are not settled."""
        # It belongs to one thread at a time, which the store's callers see to, and needs to survive nothing.
        self._settled = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        self._settled.execute("PRAGMA journal_mode = OFF")
        self._settled.execute("PRAGMA synchronous = OFF")
        # Ids are bytes: one that a dataset gave may hold what is no UTF-8.
        self._settled.execute("CREATE TABLE settled (place INTEGER PRIMARY KEY, id BLOB UNIQUE, entry BLOB)")

    def put(self, group: str, entry: GroupEntry, *, settled: bool) -> None:
        """Keep an entry in the place of the one before."""
        if not settled:
            self.open[group] = entry
            return
        self.open.pop(group, None)
        try:
            self._settled.execute(
                "INSERT INTO settled (id, entry) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET entry = excluded.entry",
                (_key(group), _packed(entry)),
            )
        except sqlite3.Error as error:
            raise RunError(
                f"the temporary file of this run's index cannot be written: {error}. What is complete is kept; make "
                "room or set TMPDIR, and the same command goes on from there"
            ) from error

    def __getitem__(self, group: str) -> GroupEntry:
        if group in self.open:
            return self.open[group]
        entry = self._settled.execute("SELECT entry FROM settled WHERE id = ?", (_key(group),)).fetchone()
        if entry is None:
            raise KeyError(group)
        return _unpacked(entry[0])

    def __iter__(self) -> Iterator[str]:
        """Yield the ids: those of settled groups in the order in which they were settled, then the others."""
        for (group,) in self._settled.execute("SELECT id FROM settled ORDER BY place"):
            yield group.decode("utf-8", "surrogatepass")
        yield from self.open

    def __len__(self) -> int:
        return len(self.open) + int(self._settled.execute("SELECT count(*) FROM settled").fetchone()[0])

    def __del__(self) -> None:
        # Results are read after the files of the run were closed, so that nobody but the last reader can say when.
        self._settled.close()


def _key(group: str) -> bytes:
    return group.encode("utf-8", "surrogatepass")


def _packed(entry: GroupEntry) -> bytes:
    members = [
        [(index, one.begin, one.attempt, str(one.state), one.score, one.part, one.others) for index, one in of.items()]
        for of in (entry.ended, entry.waiting)
    ]
    return marshal.dumps((entry.row_key, entry.epoch, entry.digest, *members))


def _unpacked(data: bytes) -> GroupEntry:
    row_key, epoch, digest, *members = marshal.loads(data)
    ended, waiting = (
        {
            index: PlayedEntry(begin, attempt, RolloutState(state), score, part, others)
            for index, begin, attempt, state, score, part, others in of
        }
        for of in members
    )
    return GroupEntry(row_key, epoch, digest, ended, waiting)
