"""What a trainer was sent: which groups, in which order, and how many of them it had used at each of its steps.

Kept in `deliveries.jsonl` beside the rollouts. After a crash of this program nothing is sent again but what was under
way; after one of the trainer, what the trainer says it has lost.
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
    """At a step of the trainer: how many groups it had taken out of its queue, and the state of the environment."""

    step: int
    taken: int
    state: dict[str, Any]


def content_of(tokens: Iterable[Iterable[int]], scores: Iterable[float]) -> str:
    """Return a short text that stands for the tokens and scores of a group; takes a moment for long ones."""
    digest = blake2b(digest_size=12)
    for sequence in tokens:
        digest.update(array("q", sequence).tobytes() + b"|")
    digest.update(array("d", scores).tobytes())
    return digest.hexdigest()


@dataclass
class DeliveryLog:
    """The record of what one trainer was sent; it is read again at a start. Lines about other trainers are left alone.

    Attributes:
        journal: the file; None: the record ends with the process.
        delivered: groups that the trainer has, in the order in which it got them.
        doubtful: groups that were under way when an earlier start ended.
        left_out: groups that are not to be sent, with the cause.
        marks: one per step that the trainer was seen at.
        session: what the trainer gave at its last registration, by which it knows us.
        unanswered: whether a registration after that one may have reached the trainer.
        contents: what tells the group in doubt, and the one before it, from others (`content_of`).
        repeated: groups that were sent again, and that the trainer may have twice.
        doubled: whether the trainer's queue may hold a group twice, so that the queue's length says too much.
    """

    journal: Journal | None
    trainer: str
    delivered: list[str] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    marks: list[StepMark] = field(default_factory=list)
    session: Any = None
    unanswered: bool = False
    contents: dict[str, str] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)
    doubled: bool = False

    def __post_init__(self) -> None:
        self._known: set[str] = set()
        for line in self.journal.read("trainer", "event") if self.journal is not None else ():
            if line["trainer"] == self.trainer:
                self._take(line)

    def settled(self, group: str) -> bool:
        """Whether the trainer has the group, or is not to have it."""
        return group in self._known or group in self.left_out

    def _take(self, line: dict[str, Any]) -> None:
        event, group = line["event"], line.get("group", "")
        if event == "sending":
            self.doubtful.append(group)
            self.contents = {last: self.contents[last] for last in self.delivered[-1:] if last in self.contents}
            self.contents[group] = line.get("content", "")
        elif event == "delivered":
            self.doubtful = [other for other in self.doubtful if other != group]
            self.delivered.append(group)
            self._known.add(group)
        elif event == "left_out":
            self.doubtful = [other for other in self.doubtful if other != group]
            self.left_out[group] = line["cause"]
        elif event == "lost":
            self._known -= set(line["groups"])
            self.delivered = [group_id for group_id in self.delivered if group_id in self._known]
            self.marks = [mark for mark in self.marks if mark.taken <= len(self.delivered)]
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

    def _write(self, event: str, **more: Any) -> None:
        line = {"trainer": self.trainer, "event": event, **more}
        if self.journal is not None:
            self.journal.append(line)
        self._take(line)

    def sending(self, group: str, content: str = "") -> None:
        """Record that the group is about to leave, and by what it can be told from others."""
        self._write("sending", group=group, content=content)

    @property
    def content_in_doubt(self) -> str | None:
        """The content of the last group in doubt; None where nothing tells it from the one that was sent before."""
        content = self.contents.get(self.doubtful[-1], "") if self.doubtful else ""
        before = self.contents.get(self.delivered[-1]) if self.delivered else None
        return content if content and content != before else None

    def has(self, group: str) -> None:
        """Record that the trainer has the group."""
        self._write("delivered", group=group)

    def repeat(self, groups: Sequence[str]) -> None:
        """Record that groups are sent again though the trainer may have them, or may still get them."""
        if groups:
            self._write("repeated", groups=list(groups))

    def leave_out(self, group: str, cause: str) -> None:
        """Record that the group is not to be sent, now or later."""
        self._write("left_out", group=group, cause=cause)

    def lost(self, groups: list[str]) -> None:
        """Record that the trainer has lost these groups, so that they are sent again."""
        if groups:
            self._write("lost", groups=groups)

    def registering(self) -> None:
        """Record that a registration is about to leave."""
        self._write("registering")

    def registered(self, session: Any) -> None:
        """Record by what the trainer knows us from now on; what was in doubt and did not arrive is sent again."""
        self._write("registered", session=session)

    def step(self, step: int, queued: int, state: dict[str, Any]) -> None:
        """Record that the trainer is at a step, with so many of our groups still in its queue."""
        self._write("step", step=step, taken=max(0, len(self.delivered) - queued), state=state)

    def at(self, step: int) -> StepMark:
        """Return the last mark that is not beyond a step."""
        before = [mark for mark in self.marks if mark.step <= step]
        return before[-1] if before else StepMark(step, 0, {})

    def close(self) -> None:
        """Close the file."""
        if self.journal is not None:
            self.journal.close()
