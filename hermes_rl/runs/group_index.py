"""Index of a run's groups, with bounded memory however many groups there are.

Groups in progress are objects. A settled group, of which nothing is left to run or score, is read seldom and is stored
in a private SQLite database: two megabytes of it are in memory, the rest in a temporary file that the system removes
with the process.
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
    """Offset of a rollout's record in its file, and the fields that decide if the rollout must be run again."""

    start: int
    attempt: int
    state: RolloutState
    score: float | None
    part: str | None = None
    """See `Seat.part`; None also if one agent runs alone."""
    others: tuple[tuple[int, float | None, str | None], ...] = ()
    """Other seats of its episode: the offset of the record, the score, and the part."""


@dataclass(slots=True)
class GroupEntry:
    """Recorded state of one group. `ended` and `waiting` are indexed by the member's index in the group."""

    row_key: str
    epoch: int
    digest: str
    ended: dict[int, PlayedEntry] = field(default_factory=dict)
    waiting: dict[int, PlayedEntry] = field(default_factory=dict)


class GroupIndex(Mapping[str, GroupEntry]):
    """Entries by the id of the group. An entry that is changed must be `put` again. Raises `RunError` if the temporary
    file cannot be written.
    """

    def __init__(self) -> None:
        self.open: dict[str, GroupEntry] = {}
        """The groups that are not settled."""
        # It belongs to one thread at a time, which the store's callers see to, and needs to survive nothing.
        self._settled = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        self._settled.execute("PRAGMA journal_mode = OFF")
        self._settled.execute("PRAGMA synchronous = OFF")
        # Ids are bytes: an id from a dataset may not be valid UTF-8.
        self._settled.execute("CREATE TABLE settled (place INTEGER PRIMARY KEY, id BLOB UNIQUE, entry BLOB)")

    def put(self, group: str, entry: GroupEntry, *, settled: bool) -> None:
        """Replace the previous entry."""
        if not settled:
            self.open[group] = entry
            return
        self.open.pop(group, None)
        try:
            self._settled.execute(
                "INSERT INTO settled (id, entry) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET entry = excluded.entry",
                (_group_key(group), _pack_entry(entry)),
            )
        except sqlite3.Error as error:
            raise RunError(
                f"the temporary file of this run's index cannot be written: {error}. Complete results are saved; free "
                "disk space or set TMPDIR, and run the same command to resume"
            ) from error

    def __getitem__(self, group: str) -> GroupEntry:
        if group in self.open:
            return self.open[group]
        entry = self._settled.execute("SELECT entry FROM settled WHERE id = ?", (_group_key(group),)).fetchone()
        if entry is None:
            raise KeyError(group)
        return _unpack_entry(entry[0])

    def __iter__(self) -> Iterator[str]:
        """Yield the ids: settled groups first, in the order in which they were settled, then the others."""
        for (group,) in self._settled.execute("SELECT id FROM settled ORDER BY place"):
            yield group.decode("utf-8", "surrogatepass")
        yield from self.open

    def __len__(self) -> int:
        return len(self.open) + int(self._settled.execute("SELECT count(*) FROM settled").fetchone()[0])

    def __del__(self) -> None:
        # Results are read after the files of the run were closed, so that only the last reader can close this.
        self._settled.close()


def _group_key(group: str) -> bytes:
    return group.encode("utf-8", "surrogatepass")


def _pack_entry(entry: GroupEntry) -> bytes:
    members = [
        [
            (index, one.start, one.attempt, str(one.state), one.score, one.part, one.others)
            for index, one in entries.items()
        ]
        for entries in (entry.ended, entry.waiting)
    ]
    return marshal.dumps((entry.row_key, entry.epoch, entry.digest, *members))


def _unpack_entry(data: bytes) -> GroupEntry:
    row_key, epoch, digest, *members = marshal.loads(data)
    ended, waiting = (
        {
            index: PlayedEntry(start, attempt, RolloutState(state), score, part, others)
            for index, start, attempt, state, score, part, others in packed_entries
        }
        for packed_entries in members
    )
    return GroupEntry(row_key, epoch, digest, ended, waiting)
