"""Random histories of serve, the trajectory API and the network between them: each group is trained once, or marked."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import aiohttp
import pytest

from hermes_rl.errors import RunError
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.deliveries import DeliveryLog, content_of
from hermes_rl.runs.journal import Journal
from hermes_rl.trainers.base import Registration
from tests.rollouts.worlds import row
from tests.thorough import THOROUGH
from tests.trainers.run_api import Answer, FaultyTrainer, Network, RunApi

STEPS = 6


class KilledError(BaseException):
    """The process of serve ends, at any moment."""


class Lines:
    """A journal in memory that outlives the process that writes it."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def read(self, *_: str) -> Iterator[dict[str, Any]]:
        yield from list(self.lines)

    def append(self, line: dict[str, Any]) -> None:
        self.lines.append(line)


class RefusedError(aiohttp.ClientConnectorError):
    """Nobody listens at the address."""

    def __init__(self) -> None:
        OSError.__init__(self, "connection refused")

    def __str__(self) -> str:
        return "connection refused"


class World(Network):
    """The network, and what happens beside it: batches are taken, the API restarts, serve is killed."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(RunApi(), chance, chance.choice((0.0, 0.1, 0.3)))
        self.restarts, self.kills = chance.choice((0.0, 0.01)), chance.choice((0.0, 0.02))
        self.trained: list[list[str]] = []
        """The groups of each step that the trainer has kept."""

    def request(self, path: str, body: dict[str, Any]) -> Answer:
        for _ in range(2):
            if batch := self.chance.random() < 0.3 and self.api.batch():
                self.trained.append([group["group_overrides"]["name"] for group in batch])
        if self.chance.random() < self.restarts:
            # The trainer goes on at its last checkpoint, and forgets what it has learned since.
            del self.trained[self.chance.randint(0, self.api.step) :]
            self.api = RunApi(len(self.trained))
            raise RefusedError
        kill = self.chance.random()
        if kill < self.kills / 2:
            raise KilledError
        answer = super().request(path, body)
        if kill < self.kills:
            raise KilledError
        return answer


def group(name: str) -> dict[str, Any]:
    number = int(name)
    return {
        "tokens": [[number], [number, 2]], "masks": [[1], [1, 2]], "scores": [0.0, 1.0],
        "group_overrides": {"name": name},
    }  # fmt: skip


async def serve(world: World, lines: Lines) -> DeliveryLog:
    """Send groups until the trainer has had its steps, as `Serving` does; return the log."""
    log = DeliveryLog(cast(Journal, lines), "atropos")
    trainer = FaultyTrainer("http://api", total_steps=STEPS, batches_ahead=2)
    trainer.network = world
    answer = await trainer.register(Registration("canned", 2, 100), log)
    for arrived in answer.arrived:
        log.has(arrived)
    log.record_loss(list(answer.lost))
    log.registered(answer.session)
    state = await trainer.state()
    if not log.marks or log.marks[-1].step != state.step:
        log.step(state.step, state.queued, {})
    for name in map(str, itertools.count()):
        while not log.is_resolved(name):
            before, state = state.step, await trainer.state()
            if state.step != before:
                log.step(state.step, state.queued, {})
            if state.finished:
                return log
            if state.wants > 0:
                log.sending(name, content_of(group(name)["tokens"], group(name)["scores"]))
                await trainer.send(Group(name, row(), []), [group(name)])
                log.has(name)
    raise AssertionError("there is always another group")


async def history(seed: int) -> None:
    world, lines = World(random.Random(seed)), Lines()
    while True:
        try:
            log = await serve(world, lines)
            break
        except (KilledError, RunError):
            continue
    trained = Counter(name for batch in world.trained for name in batch)
    queued = {each["group_overrides"]["name"] for each in world.api.queue}
    twice = [name for name, count in trained.items() if count > 1 and name not in log.repeated]
    assert not twice, f"seed {seed}: trained twice: {twice}"
    missing = {str(number) for number in range(max(map(int, trained)))} - trained.keys() - queued
    assert not missing, f"seed {seed}: left out: {missing}"


@pytest.mark.generated
@pytest.mark.timeout(600)
async def test_each_group_is_trained_once_or_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_rl.trainers.atropos.PAUSE", 0.0)
    chance = random.SystemRandom()
    for _ in range(5_000 if THOROUGH else 80):
        await history(chance.randrange(1 << 40))
