"""Environments of one process that feed one trainer: whose turn it is to begin a group, and who sends.

Their weights say which part of the sequences is whose. Of those that have something to begin, the one that has begun
least for its weight is next; one that cannot begin holds up no other, and catches up later.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import Protocol


class Feeds(Protocol):
    """One of the environments; `hermes_rl.trainers.serving.Serving` is one."""

    weight: float
    """Its part of the sequences; below 0: it takes no part in the turns."""
    unseen: int
    """Sequences that were sent, by any of them, since it last looked at the trainer."""
    looked: float
    """When it last looked at the trainer."""

    @property
    def begun(self) -> int:
        """Sequences that it has begun to play."""
        ...

    @property
    def pending(self) -> int:
        """Sequences that it has begun and that are not on their way to the trainer yet."""
        ...

    @property
    def able(self) -> bool:
        """Whether nothing of its own keeps it from beginning another group."""
        ...

    @property
    def full(self) -> bool:
        """Whether it has as many groups in flight as it may, and begins another as soon as one of them ends."""
        ...

    @property
    def room(self) -> bool:
        """Whether the trainer would take another group, as far as it has seen."""
        ...

    def wake(self) -> None:
        """Look again whether another group may begin."""
        ...


class Together:
    """The environments that one trainer gets its groups from.

    Args:
        number: of environments.
    """

    def __init__(self, number: int = 1) -> None:
        self.feeding: list[Feeds] = []
        self.under_way = asyncio.Lock()
        """Held while a group is sent, so that never more than one is in doubt."""
        self.registered = asyncio.Barrier(number)
        """None sends before all are registered: what the trainer has taken last tells which groups arrived."""

    def leave(self, one: Feeds) -> None:
        """Take note that it begins nothing more; may be called twice."""
        if one in self.feeding:
            self.feeding.remove(one)
            self.wake()

    @property
    def pending(self) -> int:
        """Sequences of all of them that are not on their way to the trainer yet."""
        return sum(one.pending for one in self.feeding)

    def sent(self, sequences: int) -> None:
        """Take note that so many sequences are on their way, which nobody has seen at the trainer."""
        for one in self.feeding:
            one.unseen += sequences

    def turn(self, mine: Feeds) -> bool:
        """Whether it is this one's turn, where it could begin another group.

        One that is behind is waited for where it has not looked at the trainer since, as it may find the same room, and
        where all that it may have in flight is: others would take its share for good, since it is always full.
        """
        behind = [one for one in self.feeding if one.weight >= 0 and _used(one) < _used(mine)]
        return mine.weight < 0 or not any(
            one.full or (one.able and (one.room or one.looked < mine.looked)) for one in behind
        )

    def wake(self) -> None:
        """Let all of them look whether it is their turn: one has begun a group, or has looked at the trainer."""
        for one in self.feeding:
            one.wake()


def _used(one: Feeds) -> float:
    return one.begun / one.weight if one.weight > 0 else inf
