"""Where serve is: which groups the trajectory API has taken, and how many of them the trainer had at each of its steps.

Kept in `place.jsonl` of the run directory. The API gives out groups in the order in which they came, so a number of
groups says which they are. After a crash of this program nothing has to be sent again but what was under way; after one
of the API, whose queue is in memory alone, what the trainer had not received by the step at which it goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hermes_rl.runs.journal import Journal

PLACE = "place.jsonl"


@dataclass(frozen=True)
class Mark:
    """At a step of the trainer: how many groups had left the API's queue, and the environment's state."""

    step: int
    gone: int
    state: dict[str, Any]


@dataclass
class Place:
    """The journal of what was sent, read again at a start."""

    journal: Journal
    sent: list[str] = field(default_factory=list)
    """Groups that the API has taken, in order."""
    doubtful: list[str] = field(default_factory=list)
    """Groups that were under way when an earlier process ended."""
    marks: list[Mark] = field(default_factory=list)
    env_id: int | None = None
    """What the API called the environment before."""

    def __post_init__(self) -> None:
        for line in self.journal.read():
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        if "sending" in line:
            self.doubtful = [*self.doubtful, line["sending"]]
        elif "sent" in line:
            self.doubtful = [group for group in self.doubtful if group != line["sent"]]
            self.sent.append(line["sent"])
        elif "step" in line:
            self.marks.append(Mark(line["step"], line["gone"], line["state"]))
        elif "back_to" in line:
            self.sent, self.doubtful = self.sent[: line["back_to"]], []
            self.marks = [mark for mark in self.marks if mark.gone <= line["back_to"]]
        elif "env_id" in line:
            self.env_id, self.doubtful = line["env_id"], []

    def _write(self, line: dict[str, Any]) -> None:
        self.journal.append(line)
        self._take(line)

    def sending(self, group: str) -> None:
        """A group is about to leave."""
        self._write({"sending": group})

    def arrived(self, group: str) -> None:
        """The API has taken it."""
        self._write({"sent": group})

    def registered(self, env_id: int) -> None:
        """The API knows the environment by this number now; what was in doubt is settled."""
        self._write({"env_id": env_id})

    def mark(self, step: int, queued: int, state: dict[str, Any]) -> None:
        """The trainer is at a step, with so many of our groups still in the queue."""
        self._write({"step": step, "gone": max(0, len(self.sent) - queued), "state": state})

    def at(self, step: int) -> Mark:
        """The last mark that is not beyond a step."""
        before = [mark for mark in self.marks if mark.step <= step]
        return before[-1] if before else Mark(step, 0, {})

    def queue_was_lost(self, step: int, queued: int | None) -> bool:
        """Whether the API has forgotten what it was sent; `queued` of our groups it has now (None: it knows us not)."""
        if queued is None:
            return bool(self.sent)
        last = self.marks[-1] if self.marks else Mark(step, 0, {})
        # Steps of an API never fall, and while they stay what was in its queue stays there.
        return step < last.step or (queued == 0 and step == last.step and len(self.sent) > last.gone)

    def go_back(self, step: int) -> list[str]:
        """Forget what the trainer had not received by a step; returns those groups."""
        gone = self.at(step).gone
        lost = self.sent[gone:]
        self._write({"back_to": gone})
        return lost
