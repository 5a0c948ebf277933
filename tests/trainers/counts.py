"""A trainer of one's own: it takes groups, counts a step for each, and keeps what it got in a file."""

import json
from pathlib import Path

from hermes_rl.trainers.base import Registered, TrainerState

GOT = Path("got.jsonl")


class Counts:
    name = "counts"

    def __init__(self, spec):
        self.steps = spec.serve.total_steps
        self.groups = [json.loads(line)["group"] for line in GOT.read_text().splitlines()] if GOT.exists() else []

    async def register(self, registration, log):
        lost = [group for group in log.delivered if group not in self.groups]
        arrived = [group for group in log.doubtful if group in self.groups]
        return Registered(lost=tuple(lost), arrived=tuple(arrived))

    async def state(self):
        step = len(self.groups)
        return TrainerState(step, wants=2, finished=step >= self.steps, version=step)

    async def send(self, group, lines):
        proof = group.provenance
        line = {"group": group.id, "scores": group.scores, "exact": proof.exact, "weights": proof.oldest}
        GOT.open("a").write(json.dumps(line) + "\n")  # noqa: ASYNC230
        self.groups.append(group.id)

    async def close(self):
        pass
