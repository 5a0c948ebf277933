"""Any trainer behind the seam gets every group once, whoever dies; evaluations miss no step; back-pressure is kept."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hermes_rl.errors import RunError, SandboxFailure, ToolServerFailure
from hermes_rl.rollouts.rollout import Encoder, RolloutKey
from hermes_rl.runs.deliveries import DELIVERIES, DeliveryLog
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.run import Plan, Run
from hermes_rl.runs.store import RolloutStore
from hermes_rl.runs.training import TrainingMetrics
from hermes_rl.threads import end_tasks
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.trainers.base import GroupRefused, Registered, Registration, TrainerState
from hermes_rl.trainers.checks import Checks
from hermes_rl.trainers.serving import IN_VAIN, Hooks, Serving, closed
from tests.rollouts.worlds import Policy, World, rows
from tests.trainers.collects import Collects
from tests.waiting import until


def by_index(key: RolloutKey) -> float:
    return float(key.index)


async def serve(
    trainer: Any,
    folder: Path,
    world: World | None = None,
    *,
    hooks: Any = None,
    count: int = 5,
    made: type[Serving] = Serving,
    drop_uniform: bool = False,
    **checks: Any,
) -> World:
    """Serve a stub world of so many rows to a trainer, with its record in a folder."""
    world = world or World(on_grade=by_index)
    with (
        RunDirectory(folder) as directory,
        closing(RolloutStore(directory, 2)) as store,
        closing(DeliveryLog(directory.journal(DELIVERIES), trainer.name)) as log,
    ):
        encoder = Encoder(load_tokenizer(None))
        run = Run(
            world, rows(count), Plan(size=2, concurrency=8, drop_uniform=drop_uniform), store=store, encoder=encoder
        )
        registration = Registration("world", 2, 100)
        await made(run, trainer, registration, log, Checks(2, **checks), hooks or Hooks()).play()
    return world


@asynccontextmanager
async def serving(trainer: Any, folder: Path, world: World | None = None, **how: Any) -> AsyncIterator[None]:
    """Serve beside the block, at whose end a run that has not ended is cancelled."""
    task = asyncio.create_task(serve(trainer, folder, world, **how))
    try:
        yield
        assert not task.done()
    finally:
        await end_tasks([task])


class Looked(Collects):
    """Its state counts the looks that are made at it, and a test waits for more of them."""

    looks = 0

    def look(self) -> None:
        self.looks += 1

    async def looked(self, times: int) -> None:
        end = self.looks + times
        await until(lambda: self.looks >= end)


def got(trainer: Collects) -> list[str]:
    return [group.id for group, _ in trainer.groups]


async def test_trainer_receives_complete_groups_until_its_last_step(tmp_path: Path) -> None:
    trainer = Collects(steps=4, batch=3)
    world = await serve(trainer, tmp_path)
    assert len(trainer.groups) >= 12
    for group, (line,) in trainer.groups:
        assert line["scores"] == group.scores == [0.0, 1.0]
        assert [len(tokens) for tokens in line["tokens"]] == [len(mask) for mask in line["masks"]]
        assert group.provenance is not None
    assert world.opened == world.closed


async def test_a_trainer_that_dies_and_comes_back_gets_every_group_once(tmp_path: Path) -> None:
    trainer, world, deaths = Collects(steps=10, batch=3, dies=(4, 9, 17, 26)), World(on_grade=by_index), 0
    while len(trainer.groups) < 30:
        try:
            await serve(trainer, tmp_path, world)
        except RunError as error:
            assert "the trainer has died" in str(error)
            deaths += 1
    assert deaths == 4
    assert max(Counter(got(trainer)).values()) == 1, "nothing twice"
    passes = Counter(group.id.partition(":")[0] for group, _ in trainer.groups)
    assert max(passes.values()) - min(passes.values()) <= 2, "no row was left behind"
    ids = [line["id"] for line in _lines(tmp_path / "rollouts.jsonl")]
    assert len(ids) == len(set(ids)), "nothing was played twice"


async def test_groups_missing_at_the_trainer_are_sent_again_but_not_run_again(tmp_path: Path) -> None:
    trainer, world = Collects(steps=3, batch=2), World(on_grade=by_index)
    await serve(trainer, tmp_path, world)
    before = got(trainer)
    trainer.forgets, trainer.steps = 2, 6
    await serve(trainer, tmp_path, world)
    assert set(before) <= set(got(trainer)), "what was lost came again"
    ids = [line["id"] for line in _lines(tmp_path / "rollouts.jsonl")]
    assert len(ids) == len(set(ids)), "nothing was played again"


def _lines(path: Path) -> list[dict[str, Any]]:
    import json

    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_another_trainer_receives_recorded_groups_of_the_run(tmp_path: Path) -> None:
    first, second, world = Collects(steps=3), Collects(steps=3), World(on_grade=by_index)
    second.name = "another"  # type: ignore[misc]
    await serve(first, tmp_path, world)
    with closing(RolloutStore(RunDirectory(tmp_path), 2)) as store:
        there = {group for group in store.groups if store.complete(group)}
    await serve(second, tmp_path, world)
    assert len(there.intersection(got(second))) >= min(len(there), len(got(second)))
    assert max(Counter(got(second)).values()) == 1


@pytest.mark.parametrize(
    ("cause", "way", "how"),
    [
        ("uniform", "serve.drop_uniform: false", {"world": World(on_grade=lambda key: 1.0), "drop_uniform": True}),
        ("too_long", "serve.on_too_long to truncate", {"longest": 1}),
    ],
)
async def test_serving_ends_when_groups_in_a_row_are_of_no_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cause: str, way: str, how: dict[str, Any]
) -> None:
    trainer = Collects(steps=1)
    with pytest.raises(RunError, match=rf"last {IN_VAIN} groups were of no use .*\({IN_VAIN} {cause}\).*{way}"):
        await serve(trainer, tmp_path, **how)
    assert trainer.groups == []
    (told,) = [
        record for record in caplog.records if "was not sent" in record.message and record.levelname == "WARNING"
    ]
    assert f"({cause})" in told.message and way in told.message


async def test_sent_group_resets_the_count_of_unusable_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One group of four is sent; groups in flight end in any order, so far more than three may follow it.
    monkeypatch.setattr("hermes_rl.trainers.serving.IN_VAIN", 24)
    world = World(on_grade=lambda key: float(key.index and key.row.key == "row0"))
    trainer = Collects(steps=4, batch=3)
    await serve(trainer, tmp_path, world, count=4, drop_uniform=True)
    assert len(trainer.groups) >= 12


async def test_stale_groups_are_excluded_counted_and_never_sent(tmp_path: Path) -> None:
    excluded: list[str] = []

    class Stepping(Hooks):
        async def excluded(self, group: Any, cause: str, detail: str) -> None:
            excluded.append(cause)

    trainer = Collects(steps=1)
    async with serving(trainer, tmp_path, hooks=Stepping(), max_staleness=1):
        await until(lambda: len(excluded) >= 20)
    assert trainer.groups == [], "a stub server tells no version of its weights"
    assert set(excluded) == {"stale"}
    log = RunDirectory(tmp_path).journal(DELIVERIES)
    with closing(DeliveryLog(log, "collects")) as recorded:
        assert set(recorded.excluded.values()) == {"stale"}


async def test_staleness_is_counted_when_the_trainer_takes_the_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights are at version 3 while groups are sent, and twelve versions further when a batch is full."""

    class Waits(Collects):
        async def state(self) -> TrainerState:
            step = min(1, len(self.groups) // 4)  # also where this is asked late, when more groups have been sent
            return TrainerState(step, 8, len(self.groups) - 4 * step, finished=step == 1, version=3 + 12 * step)

        async def send(self, group: Any, lines: list[dict[str, Any]]) -> None:
            await super().send(group, lines)
            await asyncio.sleep(0.02)

    class Certified(Serving):
        async def _prepare(self, group: Any) -> None:
            await super()._prepare(group)
            for line in self._lines[group.id]:
                line["provenance"] = {"exact": True, "problems": [], "oldest": self.state.version}

    class Noting(Hooks):
        def __init__(self) -> None:
            self.counts = TrainingMetrics()

        async def arrived(self, ages: Any, stale: int) -> None:
            self.counts.add_arrivals(ages, stale)

    hooks, trainer = Noting(), Waits(steps=1)
    await serve(trainer, tmp_path, hooks=hooks, made=Certified, max_staleness=2)
    metrics = hooks.counts.take()
    assert metrics["train/staleness_max"] == 12
    assert 0 < metrics["train/staleness_mean"] <= 12
    assert metrics["train/groups_stale_on_arrival"] >= 3, "the last one may be on its way at that moment"
    assert "groups were too old when the trainer took them at step 1: up to 12 versions old" in caplog.text
    assert "train/staleness_max" not in hooks.counts.take(), "each group is counted once"


@pytest.mark.parametrize("looks_while_sending", [0, 3])
async def test_groups_run_only_while_the_trainer_requests_more(
    looks_while_sending: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_rl.trainers.serving.LOOK", 0.01)

    class Full(Looked):
        async def state(self) -> TrainerState:
            self.look()
            return TrainerState(0, wants=3 - len(self.groups))

        async def send(self, group: Any, lines: list[dict[str, Any]]) -> None:
            await self.looked(looks_while_sending)
            await super().send(group, lines)

    trainer, world = Full(steps=1), World(on_grade=by_index)
    async with serving(trainer, tmp_path, world):
        await until(lambda: len(trainer.groups) >= 3)
        await trainer.looked(20)
    assert len(trainer.groups) == 3
    assert world.policy.calls == 6


async def test_rows_that_fail_again_and_again_end_the_run_with_the_cause(tmp_path: Path) -> None:
    def broken(key: RolloutKey) -> float:
        raise SandboxFailure("no space left")

    with pytest.raises(RunError, match=r"every row is quarantined.*no space left"):
        await serve(Collects(steps=1), tmp_path, World(on_grade=broken), count=2)


def raised(error: BaseException) -> Any:
    async def method(*_: object) -> Any:
        raise error

    return method


def returned(answer: Callable[[], Any]) -> Any:
    async def method(*_: object) -> Any:
        return answer()

    return method


@pytest.mark.parametrize(
    ("name", "method", "said"),
    [
        ("register", raised(KeyError("x")), "register raised KeyError: 'x'"),
        ("register", returned(lambda: None), "register returned None, not a Registered"),
        ("register", lambda *_: Registered(), "register raised TypeError: object Registered can't be used in 'await'"),
        ("state", raised(ZeroDivisionError("by zero")), "state raised ZeroDivisionError: by zero"),
        ("state", returned(lambda: {"step": 1}), "state returned {'step': 1}, not a TrainerState"),
        (
            "state",
            returned(lambda: TrainerState(0, wants=float("nan"))),
            "wants is nan; expected an integer below 2**63 in size",
        ),  # type: ignore[arg-type]
        ("state", returned(lambda: TrainerState("3", wants=1)), "step is '3'; expected an integer below 2**63 in size"),  # type: ignore[arg-type]
        (
            "state",
            returned(lambda: TrainerState(0, wants=1, share=float("nan"))),
            "share is nan; expected a number from 0 to 1",
        ),
        (
            "state",
            returned(lambda: TrainerState(0, wants=np.array([1, 2]))),
            "wants is array([1, 2]); expected an integer",
        ),  # type: ignore[arg-type]
        ("state", returned(lambda: TrainerState(-1, wants=1)), "step is -1, and below 0"),
        ("state", returned(lambda: TrainerState(10**30, wants=1)), "; expected an integer below 2**63 in size"),
        ("state", returned(lambda: TrainerState(0, 1, finished="no")), "finished is 'no'; expected True or False"),  # type: ignore[arg-type]
        ("state", raised(GroupRefused("late", "no room")), "state raised GroupRefused: late: no room"),
        ("state", raised(SystemExit(0)), "state raised RuntimeError: SystemExit: 0"),
        ("register", returned(lambda: Registered(lost="abc")), "lost is 'abc'; expected a tuple of group ids"),  # type: ignore[arg-type]
        ("register", returned(lambda: Registered(arrived=(1,))), "arrived is (1,); expected a tuple of group ids"),  # type: ignore[arg-type]
        ("register", returned(lambda: Registered(session={1})), "Object of type set is not JSON serializable"),
        ("register", returned(lambda: Registered(longest=0)), "longest is 0; expected at least 1"),
        (
            "register",
            returned(lambda: Registered(longest=50.5)),
            "longest is 50.5; expected an integer below 2**63 in size",
        ),  # type: ignore[arg-type]
        ("register", returned(lambda: Registered(project=5)), "project is 5; expected a text"),  # type: ignore[arg-type]
        ("send", raised(OSError("gone")), "send raised OSError: gone"),
        ("send", raised(ToolServerFailure("gone")), "send raised ToolServerFailure: gone"),
        ("send", raised(asyncio.CancelledError()), "send raised CancelledError"),
    ],
)
async def test_what_a_trainers_code_does_wrong_ends_the_run_with_its_name(
    name: str, method: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Collects(steps=1)
    monkeypatch.setattr(trainer, name, method)
    with pytest.raises(RunError, match=re.escape("trainer collects: ") + ".*" + re.escape(said)):
        await serve(trainer, tmp_path)


async def test_numbers_of_numpy_are_whole_numbers(tmp_path: Path) -> None:
    class Numpy(Collects):
        async def register(self, registration: Any, log: DeliveryLog) -> Registered:
            return replace(await super().register(registration, log), longest=np.int64(100))

        async def state(self) -> TrainerState:
            state = await super().state()
            step, wants = np.int64(state.step), np.int8(127)
            return TrainerState(step, wants, finished=step >= self.steps, version=step)  # type: ignore[arg-type]

    trainer = Numpy(steps=3)
    await serve(trainer, tmp_path)
    assert len(trainer.groups) >= 3


async def test_trainer_may_change_what_it_was_sent(tmp_path: Path) -> None:
    class Consumes(Collects):
        async def send(self, group: Any, lines: list[dict[str, Any]]) -> None:
            await super().send(group, list(lines))
            lines.clear()
            group.rollouts.clear()

    trainer = Consumes(steps=3)
    await serve(trainer, tmp_path)
    assert len(trainer.groups) >= 3


async def test_groups_that_were_never_sent_are_not_recorded_as_received(tmp_path: Path) -> None:
    trainer = Collects(steps=2)
    named = Registered(lost=("other",), arrived=("another",))
    trainer.register = returned(lambda: named)  # type: ignore[method-assign]
    await serve(trainer, tmp_path)
    with RunDirectory(tmp_path) as directory, closing(DeliveryLog(directory.journal(DELIVERIES), "collects")) as log:
        assert set(log.delivered) == set(got(trainer))


async def test_send_that_suppresses_its_cancellation_delays_the_end_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hermes_rl.threads.LEAVING", 0.1)
    sending, leave = asyncio.Event(), asyncio.Event()

    class Stubborn(Collects):
        async def send(self, group: Any, lines: list[dict[str, Any]]) -> None:
            sending.set()
            while not leave.is_set():
                with suppress(asyncio.CancelledError):
                    await leave.wait()

    async with serving(Stubborn(steps=1), tmp_path):
        await sending.wait()
    assert "trainer collects: send, still running 0.1 s after its cancellation" in caplog.text
    leave.set()


@pytest.mark.parametrize("error", [OSError("gone"), SystemExit(0), asyncio.CancelledError()])
async def test_trainer_that_cannot_be_closed_does_not_fail_a_run(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Collects(steps=1)
    trainer.close = raised(error)  # type: ignore[method-assign]
    await closed(trainer)
    assert ("trainer collects: close failed: " in caplog.text) == (not isinstance(error, asyncio.CancelledError))


async def test_trainer_whose_close_hangs_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hermes_rl.trainers.serving.CLOSING", 0.1)
    trainer = Collects(steps=1)
    trainer.close = asyncio.Event().wait  # type: ignore[assignment, method-assign]
    await closed(trainer)
    assert "trainer collects: close failed: TimeoutError" in caplog.text


async def test_unlimited_demand_of_a_stalled_trainer_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_rl.trainers.serving.OUTBOX", 3)
    monkeypatch.setattr("hermes_rl.trainers.serving.LOOK", 0.01)

    class Greedy(Looked):
        async def state(self) -> TrainerState:
            self.look()
            return TrainerState(0, wants=10**9)

        async def send(self, group: Any, lines: list[dict[str, Any]]) -> None:
            await asyncio.Event().wait()

    trainer, world = Greedy(steps=1), World(on_grade=by_index)
    async with serving(trainer, tmp_path, world):
        await until(lambda: world.policy.calls >= 2 * 4)
        await trainer.looked(50)
    assert world.policy.calls <= 2 * (1 + 3 + 4), "of one that is sent, three that wait, and four in flight"


class Steps(Collects):
    """A trainer whose step jumps from one look to the next."""

    def __init__(self, *steps: int) -> None:
        super().__init__(steps=1)
        self.left = list(steps)
        self.now = 0

    async def state(self) -> TrainerState:
        self.now = self.left.pop(0) if self.left else self.now
        return TrainerState(self.now, wants=0, finished=not self.left)


class Evaluates(Hooks):
    """Notes at which steps it was called; an evaluation takes as long as the gate is closed."""

    def __init__(self, every: int, gate: asyncio.Event | None = None) -> None:
        self.evaluate_every = every
        self.seen: list[int] = []
        self.steps: list[tuple[int, int]] = []
        self.gate = gate

    async def evaluate(self, step: int) -> None:
        self.seen.append(step)
        if self.gate is not None:
            await self.gate.wait()

    async def stepped(self, before: int, now: int) -> None:
        self.steps.append((before, now))
        if self.gate is not None and now == 5:
            self.gate.set()


@pytest.mark.parametrize(
    ("every", "steps", "evaluated"),
    [
        (1, [0, 1, 2, 3, 4], [1, 2, 3, 4]),
        (3, [0, 1, 2, 3, 4, 5, 6], [3, 6]),
        (3, [0, 3, 6, 9], [3, 6, 9]),
        (3, [0, 2, 4, 8, 9], [4, 8, 9]),
        (3, [0, 8, 8, 9], [8, 9]),
        (0, [0, 1, 2, 3], []),
        (-1, [0, 1, 2, 3], []),
    ],
)
async def test_a_multiple_that_is_reached_or_passed_is_evaluated_once(
    every: int, steps: list[int], evaluated: list[int], tmp_path: Path
) -> None:
    hooks = Evaluates(every)
    await serve(Steps(*steps), tmp_path, hooks=hooks)
    assert hooks.seen == evaluated
    assert [now for _, now in hooks.steps] == sorted(set(steps[1:]) - {0})


async def test_an_evaluation_that_is_due_while_another_one_runs_follows_it(tmp_path: Path) -> None:
    hooks = Evaluates(2, asyncio.Event())
    await serve(Steps(0, 2, 4, 5, 5), tmp_path, hooks=hooks)
    assert hooks.seen == [2, 4]


@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_evaluation_share_controls_groups_started_during_evaluation(share: float, tmp_path: Path) -> None:
    gate = asyncio.Event()
    hooks = Evaluates(1, gate)
    hooks.evaluation_share = share

    class One(Looked):
        async def state(self) -> TrainerState:
            self.look()
            enough = len(self.groups) >= 40
            if enough:
                gate.set()
            return TrainerState(1 if self.groups else 0, wants=50, finished=enough)

    trainer, world = One(steps=9), World(on_grade=by_index, policy=Policy(delay=0.05))
    if share:
        await asyncio.wait_for(serve(trainer, tmp_path, world, hooks=hooks), 100)
    else:
        async with serving(trainer, tmp_path, world, hooks=hooks):
            await until(lambda: hooks.seen)
            await trainer.looked(20)
    assert hooks.seen == [1]
    assert (len(trainer.groups) >= 40) == bool(share)
