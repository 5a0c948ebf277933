"""A trainer outside of the package: it collects groups, counts a step for each batch, may die, and may come back."""

from __future__ import annotations

from typing import Any

from hermes_rl.errors import RunError
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.deliveries import DeliveryLog
from hermes_rl.trainers.base import Registered, Registration, TrainerState


class Collects:
    """Trains on `batch` groups a step, until it has had `steps`; dies as it takes the groups of these numbers."""

    name = "collects"

    def __init__(self, steps: int, batch: int = 1, *, dies: tuple[int, ...] = (), forgets: int = 0) -> None:
        self.steps, self.batch, self.dies, self.forgets = steps, batch, set(dies), forgets
        self.groups: list[tuple[Group, list[dict[str, Any]]]] = []
        self.registration: Registration | None = None

    async def register(self, registration: Registration, log: DeliveryLog) -> Registered:
        self.registration = registration
        self.groups = self.groups[: len(self.groups) - self.forgets] if self.forgets else self.groups
        mine = {group.id for group, _ in self.groups}
        return Registered(
            session="me",
            lost=tuple(group for group in log.delivered if group not in mine),
            arrived=tuple(group for group in log.doubtful if group in mine),
        )

    async def state(self) -> TrainerState:
        step = len(self.groups) // self.batch
        return TrainerState(step, wants=2 * self.batch, finished=step >= self.steps, version=step)

    async def send(self, group: Group, lines: list[dict[str, Any]]) -> None:
        number = len(self.groups)
        if number not in self.dies:
            self.groups.append((group, lines))
            return
        self.dies.remove(number)
        if number % 2:
            self.groups.append((group, lines))  # it has it, and nobody hears of that
        raise RunError("the trainer has died")

    async def close(self) -> None: ...
