"""The seam for trainers: what a trainer's side does, whatever the trainer is. `hermes_rl.trainers.serving` feeds
anything that answers `Trainer`: one class with four methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from hermes_rl.errors import HermesRLError
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.deliveries import DeliveryLog


class GroupRefused(HermesRLError):
    """The trainer does not take a group, and never will. `cause` is the word that it is counted under."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail


@dataclass(frozen=True)
class Registration:
    """What a trainer is told about the environment.

    Attributes:
        name: of the environment.
        group_size: rollouts of a group.
        max_token_length: tokens of the longest sequence that the environment makes.
        weight: its share beside other environments of the trainer; below 0: there are no shares.
    """

    name: str
    group_size: int
    max_token_length: int
    weight: float = 1.0


@dataclass(frozen=True)
class Registered:
    """What a trainer answers to a registration.

    Attributes:
        session: how the trainer knows the environment, as JSON; it is recorded, and there at the next registration.
        number: of the environment at Atropos' trajectory API; None: the trainer gives none.
        lost: groups in the log that the trainer no longer has; they are sent again.
        arrived: groups that were under way when an earlier start ended, and that the trainer has after all.
        longest: tokens of the longest sequence that the trainer takes; None: no bound.
        project, run_group, run_name: names for the log of metrics, where the trainer gives them.
        checkpoint_folder, checkpoint_every: where the trainer saves, and after how many steps; None: it does not say.
    """

    session: Any = None
    number: int | None = None
    lost: tuple[str, ...] = ()
    arrived: tuple[str, ...] = ()
    longest: int | None = None
    project: str | None = None
    run_group: str | None = None
    run_name: str | None = None
    checkpoint_folder: str | None = None
    checkpoint_every: int | None = None


@dataclass(frozen=True)
class TrainerState:
    """Where a trainer is.

    Attributes:
        step: its optimizer steps so far.
        wants: groups that it takes now, beyond those that it was sent; 0 or less: none.
        queued: groups that it was sent and has not used yet.
        finished: it has had all of its steps.
        version: of its weights, where it tells; None: the policy's server does.
        share: the part of the model server that is this environment's, beside others of the same trainer.
    """

    step: int
    wants: int
    queued: int = 0
    finished: bool = False
    version: int | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("step", "wants", "queued", *(("version",) if self.version is not None else ())):
            if not hasattr(getattr(self, name), "__index__"):
                raise TypeError(f"TrainerState: {name} is {getattr(self, name)!r:.60}, and no whole number")
        if not 0 <= self.share <= 1:
            raise ValueError(f"TrainerState: share is {self.share!r:.60}, and not from 0 to 1")


class Trainer(Protocol):
    """Something that trains on groups."""

    name: str
    """Under which the deliveries are recorded: another name is another trainer, which has nothing yet."""

    async def register(self, registration: Registration, log: DeliveryLog) -> Registered:
        """Begin, or go on: find out which of the groups in the log the trainer has.

        Raises:
            RunError: the trainer cannot be reached.
        """

    async def state(self) -> TrainerState:
        """Where the trainer is; asked several times a second. Raises RunError where it is lost."""

    async def send(self, group: Group, lines: list[dict[str, Any]]) -> None:
        """Hand over a whole group.

        Args:
            group: its rollouts with their sequences, scores and certificate; an environment that plays by its own
                code has no rollouts here.
            lines: the same as ScoredDataGroups (see `hermes_rl.runs.groups`).

        Raises:
            GroupRefused: the trainer will never take it.
            RunError: the trainer is lost; whether it has the group is found out at the next registration.
        """

    async def close(self) -> None:
        """Release what is held; may be called twice."""
