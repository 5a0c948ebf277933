"""The blocking twin: the same results, from threads, inside a running loop, and nothing left behind."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from hermes_rl import GroupRefused, Policy, Sampled, Sampling, StopReason, open_env, sync
from hermes_rl.api import environment
from hermes_rl.api.environment import Env
from hermes_rl.api.groups import Groups
from hermes_rl.api.session import Session
from hermes_rl.api.sync import SyncEnv, SyncGroups, SyncSession
from hermes_rl.errors import UserError
from tests.api.summing import TEXT, Sampler, sampled, spec_in, trained
from tests.waiting import until_blocking

EARLIER = set[threading.Thread]()
"""Those of other tests, of which some keep an environment open."""


@pytest.fixture(autouse=True)
def earlier() -> None:
    EARLIER.update(threading.enumerate())


def loops() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "hermes-rl-sync" and each not in EARLIER]


def test_sync_env_in_a_forked_process_raises_an_error_that_names_spawn(tmp_path: Path) -> None:
    """It waited for ever, as the thread of the loop stays behind in a fork."""
    with sync(open_env(spec_in(tmp_path))) as env:
        child = os.fork()
        if child == 0:
            try:
                env.status()
            except UserError as error:
                os._exit(7 if "`spawn`" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not env.status().phases


def test_forked_process_may_leave_the_block(tmp_path: Path) -> None:
    with sync(open_env(spec_in(tmp_path))) as env:
        child = os.fork()
        if child == 0:
            env.__exit__(None, None, None)
            os._exit(0)
        try:
            until_blocking(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
        finally:
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
        assert status == 0
        assert env.run(env.rows()[0], Sampler().policy()).score == 1.0


def test_what_belongs_to_a_process_cannot_be_pickled(tmp_path: Path) -> None:
    opened = open_env(spec_in(tmp_path))
    with sync(opened) as env, env.session(env.rows()[0]) as session:
        for one in (env, opened, session, env.groups(2, Sampler().policy())):
            for copied in (pickle.dumps, copy.deepcopy):
                with pytest.raises(UserError, match="cannot be copied or pickled: make one in each process"):
                    copied(one)
    refused = pickle.loads(pickle.dumps(GroupRefused("late", "no room")))
    assert (refused.cause, refused.detail, str(refused)) == ("late", "no room", "late: no room")


def test_policy_function_that_exits_is_a_failed_attempt(tmp_path: Path) -> None:
    async def leaves(ids: list[int], sampling: Sampling) -> Sampled:
        sys.exit(3)

    with sync(open_env(spec_in(tmp_path))) as env:
        rollout = env.run(env.rows()[0], Policy.sampling(leaves, None), retries=0)
        assert "the policy's function raised RuntimeError: SystemExit: 3" in str(rollout.error)
        assert env.run(env.rows()[0], Sampler().policy()).score == 1.0


def test_every_call_has_a_blocking_twin(tmp_path: Path) -> None:
    sampler = Sampler(version=1)
    policy = sampler.policy()
    with sync(open_env(spec_in(tmp_path))) as env:
        assert len(loops()) == 1
        rows = list(env.rows())
        assert env.row(rows[0].key) == rows[0]
        assert env.prompt(rows[0])[0]["role"] == "system"
        assert env.tools(rows[0])[0]["function"]["name"] == "add"
        rollouts = [env.run(rows[0], policy, sampling={"temperature": 0.5})]
        rollouts += env.run_group(rows[1], 2, policy).rollouts
        groups = env.groups(2, policy, rows=rows)
        rollouts += [rollout for group in groups for rollout in group.rollouts]
        assert groups.excluded == {}
        with env.groups(1, policy) as endless:
            rollouts += next(endless).rollouts
        with env.session(rows[0]) as session:
            turn = session.start()
            assert turn is not None
            assert session.step("The sum is 3.") is None
            assert session.done
            assert session.rollout is not None
            assert session.rollout.score == 1.0
        with pytest.raises(UserError, match="at least 1 rollout"):
            env.groups(0)
        with pytest.raises(UserError, match="no row with the key"):
            env.run("nothing", policy)
    assert loops() == []
    assert [rollout.score for rollout in rollouts] == [1.0] * len(rollouts)
    assert set(trained(rollouts)) <= set(sampled(sampler.answers))
    with pytest.raises(UserError, match="is not open"):
        env.run(rows[0], policy)


@pytest.mark.parametrize(("blocking", "original"), [(SyncEnv, Env), (SyncGroups, Groups), (SyncSession, Session)])
def test_each_blocking_call_has_the_name_of_the_call_that_it_waits_for(blocking: type, original: type) -> None:
    own = {name: member.__doc__ or "" for name, member in vars(blocking).items() if not name.startswith("_")}
    twins = {name: f"See `{original.__name__}.{name}`" for name, text in own.items() if text.startswith("See ")}
    assert twins
    for name, start in twins.items():
        assert own[name].startswith(start)
        assert hasattr(original, name)


def test_threads_may_call_at_the_same_time(tmp_path: Path) -> None:
    with sync(open_env(spec_in(tmp_path))) as env, ThreadPoolExecutor(4) as pool:
        policy = Sampler().policy()
        found = list(pool.map(lambda row: env.run(row, policy).score, [*env.rows(), *env.rows()]))
    assert found == [1.0] * 8


ROWS = """
import itertools
import time


def sums(*, seed, split):
    for number in itertools.count():
        if split == "eval" and number == 150:
            time.sleep(0.5)
        yield {"a": 1, "b": 2, "name": f"{split} {number}"}
"""


def test_threads_that_look_for_rows_at_the_same_time_all_find_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "SEARCHED", 200)
    (tmp_path / "rows.py").write_text(ROWS)
    text = TEXT.replace(TEXT.splitlines()[3], '  generator: "rows.py:sums"\n  key: name\n  eval: {split: eval}')
    with sync(open_env(spec_in(tmp_path, text))) as env, ThreadPoolExecutor(64) as threads:
        first, others = threads.submit(env.row, "train 1"), []
        while not first.done():
            others.append(threads.submit(env.row, "eval 1"))
            time.sleep(0.05)
        assert {other.result().key for other in others} == {"eval 1"}


async def test_sync_env_works_next_to_a_running_event_loop(tmp_path: Path) -> None:
    policy = Sampler().policy()
    async with open_env(spec_in(tmp_path)) as env:
        assert (await env.run(env.rows()[0], policy)).score == 1.0
        with pytest.raises(UserError, match="await the environment"):
            sync(env).run(env.rows()[0], policy)
        twin = sync(env)
        assert (await asyncio.to_thread(twin.run, env.rows()[0], policy)).score == 1.0
    with sync(open_env(spec_in(tmp_path))) as blocking:
        assert blocking.run(blocking.rows()[0], policy).score == 1.0, "the policy has gone over to another loop"


def test_closing_the_sync_env_cancels_the_waiting_run(tmp_path: Path) -> None:
    began, left = threading.Event(), threading.Event()

    async def hangs(ids: list[int], sampling: Sampling) -> Sampled:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        raise AssertionError

    def refused() -> None:
        with pytest.raises(UserError, match="was closed while"):
            env.run(env.rows()[0], Policy.sampling(hangs, None))

    with sync(open_env(spec_in(tmp_path))) as env:
        waiting = threading.Thread(target=refused)
        waiting.start()
        assert began.wait(30)
    assert left.wait(30)
    waiting.join(30)
    assert not waiting.is_alive()


@pytest.mark.parametrize("swallows", ["once", "always"])
def test_policy_that_swallows_cancellation_ends_with_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, swallows: str
) -> None:
    for module in ("hermes_rl.threads", "hermes_rl.api.sync"):
        monkeypatch.setattr(f"{module}.LEAVING", 0.1)
    began = threading.Event()

    async def stubborn(ids: list[int], sampling: Sampling) -> Sampled:
        began.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if swallows == "once":
                    return Sampled([1, 2], [-1.0, -1.0], "stop")

    def played() -> None:
        with suppress(UserError):
            env.run(env.rows()[0], Policy.sampling(stubborn, None))

    def closed() -> None:
        nonlocal env
        with sync(open_env(spec_in(tmp_path))) as env:
            threading.Thread(target=played, daemon=True).start()
            assert began.wait(30)

    env: SyncEnv
    closing = threading.Thread(target=closed, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive() and loops() == []
    assert ("stubborn, still running 0.1 s after its cancellation" in caplog.text) == (swallows == "always")


def test_policy_function_that_its_trainer_cancels_is_a_failed_attempt(tmp_path: Path) -> None:
    async def aborted(ids: list[int], sampling: Sampling) -> Sampled:
        raise asyncio.CancelledError

    with sync(open_env(spec_in(tmp_path))) as env:
        rollout = env.run(env.rows()[0], Policy.sampling(aborted, None))
    assert rollout.stop_reason is StopReason.SERVER_FAILURE and "was cancelled by its own code" in str(rollout.error)


def test_what_cannot_be_opened_leaves_no_thread(tmp_path: Path) -> None:
    env = open_env(spec_in(tmp_path), record=tmp_path / "code.py" / "inside")
    with pytest.raises(UserError, match="cannot be"), sync(env):
        pass
    assert loops() == []


def test_submit_starts_work_on_the_loop_without_blocking_the_caller(tmp_path: Path) -> None:
    env, policy = open_env(spec_in(tmp_path)), Sampler().policy()

    async def both() -> list[float | None]:
        rollouts = await asyncio.gather(*(env.run(row, policy) for row in list(env.rows())[:2]))
        return [rollout.score for rollout in rollouts]

    with sync(env) as blocking:
        assert blocking.comparing == []
        waiting = blocking.submit(asyncio.sleep(60))
        assert blocking.submit(both()).result(30) == [1.0, 1.0]
        assert waiting.cancel()
    with pytest.raises(UserError, match="is not open"):
        blocking.submit(both())
