"""The client of Atropos' trajectory API, against a real run-api and against one that answers badly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import pytest
from aiohttp import web

from hermes_rl.errors import RunError
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.deliveries import DeliveryLog, content_of
from hermes_rl.runs.journal import Journal
from hermes_rl.trainers.atropos import AtroposTrainer
from hermes_rl.trainers.base import GroupRefused, Registered, Registration
from tests.env.canned import group
from tests.env.trainer import trajectory_api
from tests.http_servers import listening
from tests.rollouts.worlds import row
from tests.trainers.run_api import Answer, FaultyTrainer, Network, RunApi

ONE = Group("one", row(), [])


async def train(url: str, batch_size: int = 8) -> None:
    """A trainer registers and asks for its first batch."""
    registration = {
        "wandb_group": "g", "wandb_project": "p", "batch_size": batch_size, "max_token_len": 64, "checkpoint_dir": "",
        "save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 5,
    }  # fmt: skip
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        async with session.post(f"{url}/register", json=registration):
            pass
        async with session.get(f"{url}/batch"):
            pass


def client(url: str, **more: Any) -> AtroposTrainer:
    return AtroposTrainer(url, **{"total_steps": 5, "batches_ahead": 50, **more})


@pytest.mark.slow
async def test_groups_reach_a_real_api_and_are_counted() -> None:
    async with trajectory_api() as url:
        await train(url)
        trainer, log = client(url), DeliveryLog(None, "atropos")
        answer = await trainer.register(Registration("canned", 2, 100), log)
        assert (answer.longest, answer.project, answer.run_name) == (63, "p", "canned_0")
        assert (await trainer.state()).wants == 200
        await trainer.send(ONE, [group(0.0, 1.0)])
        layers = [{**group(0.0, 1.0), "layer": number} for number in range(2)]
        await trainer.send(ONE, layers)
        state = await trainer.state()
        assert (state.wants, state.queued, state.step, state.finished) == (197, 3, 0, False)
        await trainer.close()


@pytest.mark.slow
async def test_a_refusal_of_the_api_is_said_with_its_reason() -> None:
    """BaseEnv names the status alone, in a log line, and goes on."""
    async with trajectory_api() as url:
        await train(url)
        trainer = client(url)
        await trainer.register(Registration("canned", 2, 100), DeliveryLog(None, "atropos"))
        with pytest.raises(GroupRefused, match=r"422.*Message must have 'role' and 'content' fields"):
            await trainer.send(ONE, [group(0.0, 1.0, messages=[[{"content": "a role is missing"}]] * 2)])
        await trainer.close()


@pytest.mark.slow
async def test_groups_of_one_of_other_environments_are_counted() -> None:
    """/status-env leaves out the groups of others where all have one member."""
    async with trajectory_api() as url:
        await train(url)
        one, other = client(url), client(url)
        for trainer in (one, other):
            await trainer.register(Registration("canned", 1, 100), DeliveryLog(None, "atropos"))
        for trainer, count in ((one, 1), (other, 3)):
            for _ in range(count):
                await trainer.send(ONE, [group(1.0)])
        state = await one.state()
        assert (state.wants, state.queued) == (400 - 4, 1)
        for trainer in (one, other):
            await trainer.close()


@pytest.mark.slow
async def test_the_weight_of_an_environment_is_its_share() -> None:
    """BaseEnv tells its own servers' semaphores, which no call here goes through."""
    async with trajectory_api() as url:
        await train(url)
        trainers = [client(url) for _ in range(3)]
        for trainer, weight in zip(trainers, (1.0, 3.0, -1.0), strict=True):
            await trainer.register(Registration("canned", 2, 100, weight), DeliveryLog(None, "atropos"))
        shares = [(await trainer.state()).share for trainer in trainers]
        assert shares == [0.25, 0.75, 1.0], "-1 is outside of what is shared"
        for trainer in trainers:
            await trainer.close()


def sending(log: DeliveryLog, name: str, made: dict[str, Any]) -> Group:
    """Say that a group is about to leave, as serve does."""
    log.sending(name, content_of(made["tokens"], made["scores"]))
    return Group(name, row(), [])


@pytest.mark.slow
@pytest.mark.parametrize("arrives", [True, False])
async def test_doubtful_group_is_located_in_the_shared_queue_of_the_api(tmp_path: Path, arrives: bool) -> None:
    async with trajectory_api() as url:
        await train(url)
        one, other = client(url), client(url)
        log = DeliveryLog(Journal(tmp_path / "deliveries.jsonl"), "atropos")
        log.registered((await one.register(Registration("one", 2, 100), log)).session)
        await other.register(Registration("other", 2, 100), DeliveryLog(None, "atropos"))
        log.step(0, 0, {})
        await one.send(sending(log, "first", group(0.0, 1.0)), [group(0.0, 1.0)])
        log.has("first")
        for _ in range(3):
            await other.send(ONE, [group(1.0, 0.0)])
        second = sending(log, "second", group(0.5, 1.0))
        if arrives:
            await one.send(second, [group(0.5, 1.0)])
        log.close()
        await one.close()  # killed: nobody has heard whether it arrived
        again, log = client(url), DeliveryLog(Journal(tmp_path / "deliveries.jsonl"), "atropos")
        answer = await again.register(Registration("one", 2, 100), log)
        assert (answer.arrived, answer.lost) == (("second",) if arrives else (), ())
        for trainer in (again, other):
            await trainer.close()


@pytest.mark.slow
async def test_reconnected_environment_regains_its_complete_share() -> None:
    async with trajectory_api() as url:
        await train(url)
        log = DeliveryLog(None, "atropos")
        for _ in range(3):
            trainer = client(url)
            log.registered((await trainer.register(Registration("canned", 2, 100), log)).session)
            assert (await trainer.state()).share == 1.0, "what it was before takes no part any more"
            await trainer.close()


@pytest.mark.slow
async def test_a_group_that_does_not_fit_into_a_batch_is_refused_at_once() -> None:
    async with trajectory_api() as url:
        await train(url, batch_size=4)
        trainer = client(url)
        with pytest.raises(RunError, match="a group of 8 rollouts does not fit into the trainer's batch of 4"):
            await trainer.register(Registration("canned", 8, 100), DeliveryLog(None, "atropos"))
        await trainer.close()


def answering(handle: Any) -> AbstractAsyncContextManager[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    return listening(app)


Reply: TypeAlias = tuple[int, str, *tuple[bytes, ...]]
"""Status, content type, and body; by default an empty object."""


def sent(*replies: Reply | Exception, took: bool = False) -> tuple[FaultyTrainer, Scripted]:
    """Return a client that is about to send the group `ONE`, and the network, which answers so before it works.

    Args:
        replies: statuses and content types of the first answers to a group, or what is raised instead of one.
        took: whether the API gets the groups all the same.
    """
    trainer = FaultyTrainer("http://api", total_steps=5)
    trainer.network = network = Scripted(replies, took)
    network.api("register-env", {"desired_name": "canned", "group_size": 2, "max_token_length": 9, "weight": 1.0})
    return trainer, network


class Scripted(Network):
    """A network whose answers to groups are given."""

    def __init__(self, replies: Sequence[Reply | Exception], took: bool) -> None:
        super().__init__(RunApi(batch_size=100), random.Random(0), 0.0)
        self.replies, self.took = list(replies), took

    def request(self, path: str, body: dict[str, Any]) -> Answer:
        if path != "scored_data" or not self.replies:
            return super().request(path, body)
        if self.took:
            super().request(path, body)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply[0], {"Content-Type": reply[1], "Retry-After": "0"}, b"".join(reply[2:]) or b"{}"


LOST = aiohttp.ServerDisconnectedError()


@pytest.mark.parametrize("took", [False, True])
@pytest.mark.parametrize(
    "reply",
    [
        (502, "text/html"),
        (500, "text/plain"),
        (200, "text/html"),
        LOST,
        TimeoutError(),
        (200, "application/json"),
        (200, "application/json", b'{"stat'),
    ],
    ids=str,
)
async def test_a_group_whose_request_failed_is_in_the_queue_once(
    reply: Reply | Exception, took: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_rl.trainers.atropos.PAUSE", 0.0)
    trainer, network = sent(reply, took=took)
    log = DeliveryLog(None, "atropos")
    await trainer.register(Registration("canned", 2, 100), log)
    await trainer.send(sending(log, "one", group(0.0, 1.0)), [group(0.0, 1.0)])
    assert len(network.api.queue) == 1
    assert log.repeated == (set() if took else {"one"}), "a request may still arrive where its group was not found"


@pytest.mark.parametrize("status", [408, 413, 425, 429])
async def test_a_busy_server_and_the_limits_of_a_proxy_cost_no_group(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_rl.trainers.atropos.PAUSE", 0.0)
    trainer, network = sent(*[(status, "text/html")] * 4)
    await trainer.send(ONE, [group(0.0, 1.0)])
    assert len(network.api.queue) == 1
    trainer, _ = sent(*[(status, "text/html")] * 5)
    with pytest.raises(RunError, match=r"was lost: scored_data failed 5 times.*same command again when it is back"):
        await trainer.send(ONE, [group(0.0, 1.0)])


async def test_password_of_the_address_is_not_shown() -> None:
    trainer = AtroposTrainer("http://user:secret@127.0.0.1:1", total_steps=5)
    with pytest.raises(RunError, match=r"the trajectory API at http://127\.0\.0\.1:1 was lost"):
        await trainer.register(Registration("canned", 2, 100), DeliveryLog(None, "atropos"))
    await trainer.close()


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_refusal_that_does_not_concern_the_group_ends_the_run(status: int) -> None:
    trainer, _ = sent((status, "application/json"))
    with pytest.raises(RunError, match=f"http://api/scored_data answered with status {status}"):
        await trainer.send(ONE, [group(0.0, 1.0)])


async def test_many_groups_in_a_row_that_the_api_refuses_end_the_run() -> None:
    trainer, _ = sent(*[(422, "application/json")] * 10)
    for _ in range(9):
        with pytest.raises(GroupRefused, match="422"):
            await trainer.send(ONE, [group(0.0, 1.0)])
    with pytest.raises(RunError, match=r"refused 10 groups in a row: .*422"):
        await trainer.send(ONE, [group(0.0, 1.0)])


async def test_one_failure_of_a_proxy_does_not_mean_that_the_queue_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups in the queue were sent again, and trained twice."""
    monkeypatch.setattr("hermes_rl.trainers.atropos.PAUSE", 0.0)

    class FailsOnce(Network):
        failed = False

        def request(self, path: str, body: dict[str, Any]) -> Answer:
            if path == "status-env" and not self.failed:
                self.failed = True
                return 502, {"Content-Type": "text/html"}, b""
            return super().request(path, body)

    api, log = RunApi(batch_size=100), DeliveryLog(None, "atropos")
    for start in range(2):
        trainer = FaultyTrainer("http://api", total_steps=5)
        trainer.network = FailsOnce(api, random.Random(0), 0.0)
        answer = await trainer.register(Registration("canned", 2, 100), log)
        assert answer.lost == ()
        log.registered(answer.session)
        await trainer.send(sending(log, str(start), group(start, 1.0)), [group(start, 1.0)])
        log.has(str(start))
        assert (await trainer.state()).queued == start + 1


@pytest.mark.parametrize("former", [{"numbers": [0], "name": "canned_0"}, 0])
async def test_environment_reconnects_to_a_restarted_api(former: object) -> None:
    """The API calls it what it called it before."""
    log = DeliveryLog(None, "atropos")
    log.registered(former)
    for name in ("a", "b", "c"):
        log.has(name)
    log.step(1, 1, {})
    trainer = FaultyTrainer("http://api", total_steps=5)
    trainer.network = Network(RunApi(step=1), random.Random(0), 0.0)
    answer = await trainer.register(Registration("canned", 2, 100), log)
    assert (answer.lost, answer.session) == (("c",), {"numbers": [0], "name": "canned_0"})
    assert (await trainer.state()).share == 1.0, "it is still connected"


@pytest.mark.parametrize("restarted", [False, True])
async def test_unrecorded_registration_does_not_hide_a_restarted_api(restarted: bool) -> None:
    """A process was killed when it had registered, so that the next number is one that the API of before would give."""
    log = DeliveryLog(None, "atropos")
    network = Network(RunApi(batch_size=100), random.Random(0), 0.0)

    async def start() -> tuple[FaultyTrainer, Registered]:
        trainer = FaultyTrainer("http://api", total_steps=5)
        trainer.network = network
        return trainer, await trainer.register(Registration("canned", 2, 100), log)

    trainer, answer = await start()
    log.registered(answer.session)
    await trainer.send(sending(log, "one", group(0.0, 1.0)), [group(0.0, 1.0)])
    log.has("one")
    if restarted:
        network.api = RunApi(batch_size=100)
    await start()
    _, answer = await start()
    assert answer.lost == (("one",) if restarted else ())
    assert log.repeated == ({"one"} if restarted else set())


async def test_groups_before_one_that_is_queued_twice_may_have_been_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is longer by one than what the log has sent, so the log takes a trained group for a queued one."""
    monkeypatch.setattr("hermes_rl.trainers.atropos.PAUSE", 0.0)
    log, trainer = DeliveryLog(None, "atropos"), FaultyTrainer("http://api", total_steps=5)
    trainer.network = network = Network(RunApi(), random.Random(0), 0.0)
    log.registered((await trainer.register(Registration("canned", 2, 100), log)).session)
    for name in ("a", "b", "c"):
        await trainer.send(sending(log, name, group(0.0, 1.0)), [group(0.0, 1.0)])
        log.has(name)
    log.repeat(["c"])
    network.api("scored_data", network.api.queue[-1])
    network.api.batch()
    state = await trainer.state()
    log.step(state.step, state.queued, {})
    network.api = RunApi(step=1)
    assert (await trainer.register(Registration("canned", 2, 100), log)).lost == ("b", "c")
    assert log.repeated == {"b", "c"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("current_step", 1e99), ("current_step", "3"), ("current_step", -1), ("env_weight", None), ("queue_size", True)],
)
async def test_an_answer_of_another_form_is_named(field: str, value: object) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"current_step": 2, field: value})

    async with answering(answer) as url:
        trainer = client(url)
        with pytest.raises(RunError, match=f"status-env: {field}: "):
            await trainer.state()
        await trainer.close()


async def test_one_wrong_answer_does_not_end_the_run() -> None:
    steps = iter([2_000_000_000, 2, 5, 5])

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"current_step": next(steps) if request.path == "/status-env" else 0})

    async with answering(answer) as url:
        trainer = client(url, total_steps=5)
        first, last = await trainer.state(), await trainer.state()
        assert (first.step, first.finished, last.step, last.finished) == (2, False, 5, True)
        await trainer.close()


async def test_an_api_that_was_restarted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_rl.trainers.atropos.PAUSE", 0.0)
    trainer = FaultyTrainer("http://api", total_steps=5)
    trainer.network = Network(RunApi(step=3), random.Random(0), 0.0)
    await trainer.register(Registration("canned", 2, 100), DeliveryLog(None, "atropos"))
    await trainer.state()
    trainer.network.api = RunApi(step=3)
    with pytest.raises(RunError, match=r"was lost: status 500.*Run the same command"):
        await trainer.state()
    trainer.network.api = RunApi(step=2)
    await trainer.register(Registration("another process", 2, 100), DeliveryLog(None, "atropos"))
    with pytest.raises(RunError, match="it was restarted at step 2"):
        await trainer.state()


JOINED = {"status": "success", "batch_size": 8, "max_token_len": 64}
"""What the API tells an environment that registers."""


@pytest.mark.parametrize(
    ("status", "least", "wants"),
    [
        ({"queue_size": 0}, None, 4),
        ({"queue_size": 3}, None, 1),
        ({"queue_size": 9}, None, -5),
        ({"queue_size": 9, "unallocated_fraction": 0.5, "self_queue_size": 1}, 0.5, 1),
    ],
)
async def test_what_the_queue_takes_is_what_is_wanted(status: dict[str, Any], least: float | None, wants: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({**JOINED, "current_step": 2, **status})

    async with answering(answer) as url:
        trainer = client(url, batches_ahead=1, min_batch_allocation=least, total_steps=100)
        await trainer.register(Registration("canned", 2, 100), DeliveryLog(None, "atropos"))
        assert (await trainer.state()).wants == wants
        await trainer.close()


@pytest.mark.parametrize(
    ("step", "queued", "finished", "wants_more"),
    [(3, 4, False, True), (3, 8, False, False), (4, 4, False, False), (4, 0, False, True), (5, 0, True, False)],
)
async def test_trainer_state_counts_its_queue_and_finishes_at_the_last_step(
    step: int, queued: int, finished: bool, wants_more: bool
) -> None:
    """An environment that ended with the queue would miss the evaluation of the last step."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({**JOINED, "current_step": step, "queue_size": queued, "self_queue_size": queued})

    async with answering(answer) as url:
        trainer = client(url)
        await trainer.register(Registration("canned", 2, 100), DeliveryLog(None, "atropos"))
        state = await trainer.state()
        assert (state.finished, state.wants > 0) == (finished, wants_more)
        await trainer.close()
