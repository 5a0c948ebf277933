"""What a player knows of rollouts that were played before it: the core asks, whoever keeps files answers."""

from __future__ import annotations

from typing import Protocol

from hermes_rl.rollouts.rollout import Rollout, RolloutKey


class Memory(Protocol):
    """Rollouts of an earlier start of the same run."""

    async def recall(self, key: RolloutKey) -> Rollout | None:
        """The finished rollout of this key, so that it is not played again.

        Its score is None where it waits to be compared with its group.
        """
        ...

    def attempts(self, key: RolloutKey) -> int:
        """How many attempts at this key are recorded, so that no id is given twice."""
        ...

    def hold(self, rollout: Rollout) -> None:
        """Keep a rollout that is played, and gets its score together with its group."""
        ...


class NoMemory:
    """A run that begins."""

    async def recall(self, key: RolloutKey) -> Rollout | None:
        return None

    def attempts(self, key: RolloutKey) -> int:
        return 0

    def hold(self, rollout: Rollout) -> None:
        """Nothing outlives the process."""
