"""Record of the groups sent to a trainer: their order, and how many of them it had used at each of its steps.

The record is `deliveries.jsonl`, next to the rollouts. After a crash of this program only the groups in transit are
sent again; after a crash of the trainer, the groups that it reports as lost.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from hermes_rl.runs.journal import Journal

DELIVERIES = "deliveries.jsonl"


@dataclass(frozen=True)
class StepMark:
    """State at a training step: how many groups the trainer had taken out of its queue, and the state of the
    environment.
    """

    step: int
    groups_taken: int
    state: dict[str, Any]


def content_of(tokens: Iterable[Iterable[int]], scores: Iterable[float]) -> str:
    """Return a short text that identifies the tokens and scores of a group; takes a moment for long ones."""
    digest = blake2b(digest_size=12)
    for sequence in tokens:
        digest.update(array("q", sequence).tobytes() + b"|")
    digest.update(array("d", scores).tobytes())
    return digest.hexdigest()


@dataclass
class DeliveryLog:
    """Record of the groups sent to one trainer; it is read again at a start. Records of other trainers are not changed.

    Attributes:
        journal: the file; None: the record ends with the process.
        delivered: groups that the trainer has, in the order of delivery.
        doubtful: groups that were in transit when an earlier start ended.
        excluded: groups that must not be sent, with the cause.
        marks: one per step at which the trainer was seen.
        session: value that the trainer returned at its last registration, by which it identifies this environment.
        unanswered: True if a registration after that one may have reached the trainer.
        contents: content that distinguishes the group in doubt, and the one before it, from others (`content_of`).
        repeated: groups that were sent again, and that the trainer may have twice.
        doubled: True if the trainer's queue may hold a group twice, so that the length of the queue is too large.
    """

    journal: Journal | None
    trainer: str
    delivered: list[str] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)
    excluded: dict[str, str] = field(default_factory=dict)
    marks: list[StepMark] = field(default_factory=list)
    session: Any = None
    unanswered: bool = False
    contents: dict[str, str] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)
    doubled: bool = False

    def __post_init__(self) -> None:
        self._delivered_ids: set[str] = set()
        for line in self.journal.read("trainer", "event") if self.journal is not None else ():
            if line["trainer"] == self.trainer:
                self._apply_event(line)

    def is_resolved(self, group: str) -> bool:
        """Return True if the trainer has the group, or must not have it."""
        return group in self._delivered_ids or group in self.excluded

    def _apply_event(self, line: dict[str, Any]) -> None:
        event, group = line["event"], line.get("group", "")
        if event == "sending":
            self.doubtful.append(group)
            self.contents = {last: self.contents[last] for last in self.delivered[-1:] if last in self.contents}
            self.contents[group] = line.get("content", "")
        elif event == "delivered":
            self.doubtful = [other for other in self.doubtful if other != group]
            self.delivered.append(group)
            self._delivered_ids.add(group)
        elif event in ("excluded", "left_out"):  # the name in 0.1.0
            self.doubtful = [other for other in self.doubtful if other != group]
            self.excluded[group] = line["cause"]
        elif event == "lost":
            self._delivered_ids -= set(line["groups"])
            self.delivered = [group_id for group_id in self.delivered if group_id in self._delivered_ids]
            self.marks = [step_mark for step_mark in self.marks if step_mark.groups_taken <= len(self.delivered)]
            self.doubled = False
        elif event == "repeated":
            self.repeated.update(line["groups"])
            self.doubled = True
        elif event == "registered":
            self.session, self.unanswered, self.doubtful = line["session"], False, []
        elif event == "registering":
            self.unanswered = True
        elif event == "step":
            self.marks.append(StepMark(line["step"], line["taken"], line["state"]))

    def _write_event(self, event: str, **more: Any) -> None:
        line = {"trainer": self.trainer, "event": event, **more}
        if self.journal is not None:
            self.journal.append(line)
        self._apply_event(line)

    def sending(self, group: str, content: str = "") -> None:
        """Record that the group is about to be sent, and the content that distinguishes it from others."""
        self._write_event("sending", group=group, content=content)

    @property
    def content_in_doubt(self) -> str | None:
        """Content of the last group in doubt, or None if nothing distinguishes it from the group sent before it."""
        content = self.contents.get(self.doubtful[-1], "") if self.doubtful else ""
        before = self.contents.get(self.delivered[-1]) if self.delivered else None
        return content if content and content != before else None

    def has(self, group: str) -> None:
        """Record that the trainer has the group."""
        self._write_event("delivered", group=group)

    def repeat(self, groups: Sequence[str]) -> None:
        """Record that groups are sent again though the trainer may have them, or may still get them."""
        if groups:
            self._write_event("repeated", groups=list(groups))

    def exclude(self, group: str, cause: str) -> None:
        """Record that the group must not be sent, now or later."""
        self._write_event("excluded", group=group, cause=cause)

    def record_loss(self, groups: list[str]) -> None:
        """Record that the trainer has lost these groups, so that they are sent again."""
        if groups:
            self._write_event("lost", groups=groups)

    def registering(self) -> None:
        """Record that a registration is about to leave."""
        self._write_event("registering")

    def registered(self, session: Any) -> None:
        """Record the new session of the trainer; groups that were in doubt and did not arrive are sent again."""
        self._write_event("registered", session=session)

    def step(self, step: int, queued: int, state: dict[str, Any]) -> None:
        """Record that the trainer is at a step, with `queued` groups of this environment still in its queue."""
        self._write_event("step", step=step, taken=max(0, len(self.delivered) - queued), state=state)

    def mark_at(self, step: int) -> StepMark:
        """Return the last mark that is not beyond a step."""
        before = [step_mark for step_mark in self.marks if step_mark.step <= step]
        return before[-1] if before else StepMark(step, 0, {})

    def close(self) -> None:
        """Close the file."""
        if self.journal is not None:
            self.journal.close()
