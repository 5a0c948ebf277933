"""Thousands of groups survive dying readers, a killed service and new weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.summing import TEXT
from tests.service.playing import many, named, policy
from tests.service.served import Served, spec_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GROUPS, MEMBERS = 2000, 2
MOST_READERS = 8
DIES_AFTER = {0: 150, 1: 400}
"""Lines after which the first readers die."""
KILLED = 2
"""The reader under whom the service is killed."""
FAILS = """
import pathlib
import random

chance = random.Random()


def steady(item, result) -> bool:
    if chance.random() < 0.1 or (item["a"] % 20 == 0 and pathlib.Path({down!r}).exists()):
        raise ConnectionError("the grader fails now and then, and for some rows until a group was dropped")
    return True
"""


class Trainer:
    """Takes groups as a trainer does, and moves its weights meanwhile."""

    def __init__(self, down: Path) -> None:
        self.down = down
        """A file: as long as it exists, the grader fails for some rows."""
        self.got: dict[str, dict[str, Any]] = {}
        self.dropped = self.version = 0

    def read(self, service: Served, most: int | None, asked: dict[str, Any]) -> dict[str, Any] | None:
        """Read a batch, up to so many lines; return the last line, where it came to that."""
        with contextlib.suppress(OSError, ValueError):  # the service is killed in the middle of a line
            for count, line in enumerate(service.stream(**asked), 1):
                if line.get("end"):
                    return line
                self.take(line)
                if count == most:
                    return None
        return None

    def take(self, line: dict[str, Any]) -> None:
        if line["dropped"] is not None:
            self.dropped += 1
            self.down.unlink(missing_ok=True)
            assert all(one["score"] is None and not one["sequences"] for one in line["rollouts"])
        else:
            assert self.got.setdefault(line["group"], line) == line, "what is handed out twice is the same"

    @contextlib.asynccontextmanager
    async def training(self, service: Served) -> AsyncIterator[None]:
        """Meanwhile the weights move."""

        async def moves() -> None:
            with contextlib.suppress(OSError):
                while True:
                    self.version += 1
                    await asyncio.to_thread(service.ask, "PUT", "/v1/policy", {"version": self.version})
                    await asyncio.sleep(0.3)

        moving = asyncio.create_task(moves())
        try:
            yield
        finally:
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)

    def sampled(self) -> list[list[tuple[int, float]]]:
        """The tokens that are trained on, with their log-probabilities, of each sequence."""
        return [
            [
                (token, logprob)
                for token, mask, logprob in zip(one["ids"], one["mask"], one["logprobs"], strict=True)
                if mask
            ]
            for line in self.got.values()
            for rollout in line["rollouts"]
            for one in rollout["sequences"]
        ]


def all_keys(service: Served) -> list[str]:
    keys: list[str] = []
    after: str | None = ""
    while after is not None:
        page = service.get(f"/v1/rows?after={after}" if after else "/v1/rows")
        keys, after = keys + [row["key"] for row in page["rows"]], page["after"]
    return keys


@pytest.mark.by_turns(2, 1)
async def test_each_group_once_and_nothing_trained_that_failed(tmp_path: Path) -> None:
    model, trainer = policy(wrong=0.4), Trainer(tmp_path / "down")
    trainer.down.touch()
    (tmp_path / "grading.py").write_text(FAILS.format(down=str(trainer.down)))
    text = TEXT.replace("rewards: {", 'rewards: {steady: {fn: "grading.py:steady", weight: 0.5}, ')
    more = "serve: {concurrency: 32}\nbudget: {max_failures: 10000}\n"
    spec = spec_in(tmp_path, many(GROUPS, text) + more)
    end: dict[str, Any] | None = None
    async with model.running() as url:
        service = await asyncio.to_thread(Served, spec)
        keys = await asyncio.to_thread(all_keys, service)
        for number in range(MOST_READERS):
            name = named(url, version=trainer.version)
            asked = {"rows": keys, "n": MEMBERS, "batch": "all", "policy": name}
            async with trainer.training(service):
                reading = asyncio.create_task(asyncio.to_thread(trainer.read, service, DIES_AFTER.get(number), asked))
                if number == KILLED:
                    await asyncio.sleep(4)
                    await asyncio.to_thread(service.kill)
                end = await reading
            if number == KILLED:
                assert end is None
                service = await asyncio.to_thread(Served, spec)
            if end is not None and not end["dropped"]:
                break
        with service:
            assert await asyncio.to_thread(service.terminate) == 0
    assert end == {"end": True, "groups": GROUPS, "dropped": 0}
    assert trainer.dropped > 0, "some groups failed for good, and were played when they were asked for again"
    require_whole(trainer, keys)
    first = {(one.ids[0], one.logprobs[0]) for one in model.log}
    assert all(sequence[0] in first for sequence in trainer.sampled())
    recorded = [json.loads(line) for line in (tmp_path / "outputs/sums/rollouts/rollouts.jsonl").open()]
    final = [(line["group"], line["index"]) for line in recorded if line["state"] == "scored"]
    assert len(final) == len(set(final)) == GROUPS * MEMBERS, "each member was scored once"


def require_whole(trainer: Trainer, keys: list[str]) -> None:
    """Each row's group was taken once, whole and scored, with the versions of its weights."""
    assert len(keys) == len(trainer.got) == GROUPS
    assert {line["row_key"] for line in trainer.got.values()} == set(keys)
    for line in trainer.got.values():
        assert line["provenance"]["exact"]
        assert [one["error"] for one in line["rollouts"]] == [None] * MEMBERS
        assert {one["score"] for one in line["rollouts"]} <= {0.5, 1.5}
    versions = {tuple(line["weights"]) for line in trainer.got.values()}
    assert len(versions) > 3, "the weights moved meanwhile"
    assert all(oldest <= newest for oldest, newest in versions)
