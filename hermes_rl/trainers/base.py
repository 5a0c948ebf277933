"""Define the interface of a trainer, independent of its implementation.

`hermes_rl.trainers.serving` feeds any object that implements `Trainer`: one class with four methods.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import Any, Protocol

from hermes_rl.errors import HermesRLError
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.deliveries import DeliveryLog
from hermes_rl.values import write_json


class GroupRefused(HermesRLError):
    """The trainer refuses a group permanently. `cause` is the word under which it is counted."""

    def __init__(self, cause: str, detail: str) -> None:
        self.cause, self.detail = f"{cause!s:.80}", f"{detail!s:.2000}"
        super().__init__(f"{self.cause}: {self.detail}")

    def __reduce__(self) -> Any:
        return type(self), (self.cause, self.detail)


@dataclass(frozen=True)
class Registration:
    """Description of the environment for a trainer.

    Attributes:
        name: name of the environment.
        group_size: rollouts of a group.
        max_token_length: maximum tokens of a sequence.
        weight: weight relative to other environments of the trainer; below 0: weights are not used.
    """

    name: str
    group_size: int
    max_token_length: int
    weight: float = 1.0


@dataclass(frozen=True)
class Registered:
    """Response of a trainer to a registration.

    Attributes:
        session: identity of the environment at the trainer, as JSON; it is recorded, and available at the next
            registration.
        number: number of the environment at Atropos' trajectory API; None: the trainer assigns none.
        lost: groups in the log that the trainer no longer has; they are sent again.
        arrived: groups that were in flight when an earlier start ended, and that the trainer has received.
        longest: maximum tokens of a sequence that the trainer accepts; None: no limit.
        project, run_group, run_name: names for the metrics log, if the trainer sets them.
        checkpoint_folder, checkpoint_every: directory of the trainer's checkpoints, and steps between them; None:
            unknown.
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

    def __post_init__(self) -> None:
        for name in ("lost", "arrived"):
            groups = getattr(self, name)
            if not isinstance(groups, tuple | list | set) or not all(isinstance(group, str) for group in groups):
                raise TypeError(f"Registered: {name} is {groups!r:.60}; expected a tuple of group ids")
        _set_whole(
            self, (name for name in ("number", "longest", "checkpoint_every") if getattr(self, name) is not None)
        )
        if self.longest is not None and self.longest < 1:
            raise ValueError(f"Registered: longest is {self.longest}; expected at least 1")
        for name in ("project", "run_group", "run_name", "checkpoint_folder"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"Registered: {name} is {getattr(self, name)!r:.60}; expected a text")
        write_json(self.session)  # raises if it cannot be recorded


@dataclass(frozen=True)
class TrainerState:
    """Progress of a trainer.

    Attributes:
        step: number of optimizer steps so far.
        wants: number of groups that it accepts now, beyond those already sent; 0 or less: none.
        queued: number of groups that it has received and not used yet.
        finished: True if it has completed all of its steps.
        version: version of its weights, if it reports one; None: the policy's server does.
        share: fraction of the model server for this environment, relative to others of the same trainer.
    """

    step: int
    wants: int
    queued: int = 0
    finished: bool = False
    version: int | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        _set_whole(self, ("step", "wants", "queued", *(("version",) if self.version is not None else ())))
        for name in ("step", "queued"):
            if getattr(self, name) < 0:
                raise ValueError(f"TrainerState: {name} is {getattr(self, name)}, and below 0")
        if self.finished not in (True, False):
            raise TypeError(f"TrainerState: finished is {self.finished!r:.60}; expected True or False")
        if not 0 <= self.share <= 1:
            raise ValueError(f"TrainerState: share is {self.share!r:.60}; expected a number from 0 to 1")


def _set_whole(answer: Any, names: Iterable[str]) -> None:
    """Convert these fields to `int`: they may be integers of numpy, which JSON does not know and which overflow."""
    for name in names:
        value = getattr(answer, name)
        try:
            integer = index(value)
        except TypeError:
            integer = 1 << 63
        if abs(integer) >= 1 << 63:
            raise TypeError(
                f"{type(answer).__name__}: {name} is {value!r:.60}; expected an integer below 2**63 in size"
            )
        object.__setattr__(answer, name, integer)


class Trainer(Protocol):
    """A consumer that trains on groups."""

    name: str
    """Name under which the deliveries are recorded: another name is another trainer, which has received nothing yet."""

    async def register(self, registration: Registration, log: DeliveryLog) -> Registered:
        """Start or resume: determine which of the groups in the log the trainer has.

        Raises:
            RunError: the trainer is not reachable.
        """

    async def state(self) -> TrainerState:
        """Return the trainer's progress; called several times a second. Raises RunError if the trainer is lost."""

    async def send(self, group: Group, lines: list[dict[str, Any]]) -> None:
        """Send a whole group.

        Args:
            group: its rollouts with their sequences, scores and token provenance; a group of an environment's own code
                has no rollouts here.
            lines: the same as ScoredDataGroups (see `hermes_rl.runs.groups`).

        Raises:
            GroupRefused: the trainer refuses it permanently.
            RunError: the trainer is lost; the next registration determines if it has the group.
        """

    async def close(self) -> None:
        """Release its resources; may be called twice."""
