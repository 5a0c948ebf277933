"""Calling rewards: what they are given, that they never block the loop, that what fails is a failure."""

from __future__ import annotations

import asyncio
import functools
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypedDict

import pytest

from hermes_rl.errors import AgentFault, JudgeFailure, NotYetAvailable, RewardFailure, SandboxFailure, UserError
from hermes_rl.scoring.reward_function import RewardFunction, call_reward
from hermes_rl.servers.usage import Meter, begin_call
from hermes_rl.stop_reasons import StopReason
from tests.waiting import until

if TYPE_CHECKING:
    from hermes_rl.nowhere import Missing  # type: ignore[import-not-found]

HERE = Path(__file__).name


def reward(function: Callable[..., Any]) -> RewardFunction:
    return RewardFunction.from_function("mine", function)


async def result_of(function: Callable[..., Any], **arguments: Any) -> Any:
    returned, _ = await call_reward(reward(function), arguments)
    return returned


# ------------------------------------------------------------------ what it is given


def test_it_gets_what_it_names_of_the_rollout() -> None:
    def mine(item: Any, judge: Any, *, target: str) -> float:
        return 0.0

    assert reward(mine).select_parameters({"item": 1, "result": 2, "judge": 3}) == {"item": 1, "judge": 3}


def test_arguments_are_coerced_to_their_annotations() -> None:
    def mine(*, text: str, number: float, count: int, flag: bool, names: list[str], free) -> float:  # type: ignore[no-untyped-def]
        return 0.0

    given = {"text": 0.5, "number": "1.5", "count": "3", "flag": "true", "names": ["a", 1], "free": "3"}
    assert reward(mine).arguments(given) == {
        "text": "0.5",
        "number": 1.5,
        "count": 3,
        "flag": True,
        "names": ["a", "1"],
        "free": "3",
    }


def test_annotation_that_cannot_be_hashed_is_checked() -> None:
    def mine(*, count: Annotated[int, {"unit": "tokens"}]) -> float:
        return 0.0

    assert reward(mine).arguments({"count": "3"}) == {"count": 3}
    with pytest.raises(UserError, match="integer"):
        reward(mine).arguments({"count": "three"})


def test_an_argument_that_does_not_fit_is_the_users_mistake() -> None:
    def mine(*, count: int) -> float:
        return 0.0

    with pytest.raises(UserError, match="integer"):
        reward(mine).arguments({"count": "three"})


class Call(TypedDict):
    name: str
    times: NotRequired[int]


def test_arguments_of_typed_dicts_have_their_keys_alone() -> None:
    def mine(*, calls: list[Call], first: Call | None = None) -> float:
        return 0.0

    fitting = {"calls": [{"name": "f", "times": "2"}, {"name": "g"}]}
    assert reward(mine).arguments(fitting) == {"calls": [{"name": "f", "times": 2}, {"name": "g"}]}
    wrong: list[dict[str, Any]] = [{"calls": [{"name": "f", "args": 1}]}, {"calls": [{}]}, {"first": {"nam": "f"}}]
    for each in wrong:
        with pytest.raises(UserError, match=rf"rewards\.mine\.args\.{next(iter(each))}: the template gives"):
            reward(mine).arguments(each)


def test_unknown_reward_argument_error_names_the_known_ones() -> None:
    def mine(result: Any, *, target: str) -> float:
        return 0.0

    with pytest.raises(UserError, match=r"no argument 'taget'; its arguments: target"):
        reward(mine).require_takes({"taget": 1}, ())


def test_reward_argument_must_not_shadow_a_rollout_value() -> None:
    def mine(result: Any, **others: Any) -> float:
        return 0.0

    assert reward(mine).arguments({"anything": 1}) == {"anything": 1}
    with pytest.raises(UserError, match="'result'"):
        reward(mine).require_takes({"result": 1}, ())


def test_annotations_for_type_checkers_only_do_not_matter() -> None:
    def mine(ctx: Missing, *, count: int, odd: Missing = None) -> float:
        return 0.0

    assert reward(mine).arguments({"count": "3", "odd": "x"}) == {"count": 3, "odd": "x"}


def test_a_partial_function_is_a_reward() -> None:
    def mine(*, count: int, target: str) -> float:
        return 0.0

    assert reward(functools.partial(mine, target="x")).arguments({"count": "3"}) == {"count": 3}


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(UserError, match="'mine'"):
        reward(3)  # type: ignore[arg-type]


def test_context_and_group_are_recognized_by_name() -> None:
    def plain(item: Any, **others: Any) -> float:
        return 0.0

    def with_both(ctx: Any, group: Any) -> list[float]:
        return []

    assert (reward(plain).uses_context, reward(plain).group_level) == (False, False)
    assert (reward(with_both).uses_context, reward(with_both).group_level) == (True, True)


# ------------------------------------------------------------------ how it runs


async def test_agent_fault_is_raised_unchanged() -> None:
    def mine() -> float:
        raise AgentFault("the artifact is a folder")

    with pytest.raises(AgentFault, match="the artifact is a folder"):
        await result_of(mine)


async def test_sync_async_and_awaitable_rewards_are_called() -> None:
    async def asynchronous(*, number: float) -> float:
        await asyncio.sleep(0)
        return number

    def returns_awaitable(*, number: float) -> Any:
        return asynchronous(number=number)

    assert await result_of(lambda number: number, number=0.5) == 0.5
    assert await result_of(asynchronous, number=0.5) == 0.5
    assert await result_of(returns_awaitable, number=0.5) == 0.5


async def test_a_reward_runs_off_the_main_thread_and_its_time_is_measured() -> None:
    def mine() -> bool:
        time.sleep(0.02)
        return threading.current_thread() is threading.main_thread()

    returned, seconds = await call_reward(reward(mine), {})
    assert (returned, seconds >= 0.02) == (False, True)


async def test_blocking_rewards_run_concurrently_off_the_event_loop() -> None:
    all_of_them = threading.Barrier(21)

    def sync_reward() -> float:
        all_of_them.wait(60)
        return 1.0

    async def async_reward() -> float:
        all_of_them.wait(60)  # blocking inside an async reward is what this is about
        return 1.0

    calls = [asyncio.create_task(result_of(function)) for function in (sync_reward, async_reward) for _ in range(10)]
    await until(lambda: all_of_them.n_waiting >= 20)
    all_of_them.wait(60)  # the loop is free, and they all wait beside each other
    assert await asyncio.gather(*calls) == [1.0] * 20


async def test_after_callback_runs_in_the_reward_thread_even_on_failure() -> None:
    done: list[str] = []

    def fine() -> float:
        done.append("reward")
        return 1.0

    def broken() -> float:
        raise ValueError("no")

    await call_reward(reward(fine), {}, after=lambda: done.append(threading.current_thread().name[:9]))
    with pytest.raises(RewardFailure):
        await call_reward(reward(broken), {}, after=lambda: done.append("after"))
    assert done == ["reward", "hermes-rl", "after"]


# ------------------------------------------------------------------ what goes wrong


def fails_by_value() -> float:
    raise ValueError("odd")


def fails_inside_a_library() -> float:
    return float(Path("/nowhere/at/all").stat().st_size)


def fails_by_exhausting() -> float:
    return float(next(iter([])))


def fails_by_exit() -> float:
    sys.exit(3)


def fails_by_cancelling() -> float:
    raise asyncio.CancelledError


def fails_by_interrupt() -> float:
    raise KeyboardInterrupt


async def fails_by_timeout() -> float:
    async with asyncio.timeout(0.001):
        await asyncio.sleep(5)
    return 1.0


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (fails_by_value, "ValueError: odd"),
        (fails_inside_a_library, "FileNotFoundError"),
        (fails_by_exhausting, "StopIteration"),
        (fails_by_exit, "SystemExit: 3"),
        (fails_by_cancelling, "CancelledError"),
        (fails_by_interrupt, "KeyboardInterrupt"),
        (fails_by_timeout, "TimeoutError"),
    ],
)
async def test_whatever_it_raises_is_a_failure_with_the_place_in_its_own_code(
    function: Callable[..., Any], kind: str
) -> None:
    with pytest.raises(RewardFailure) as caught:
        await asyncio.wait_for(result_of(function), 20)
    code = function.__code__
    place = str(caught.value).rpartition(f"{HERE}:")[2]
    assert f"reward 'mine' raised {kind}" in str(caught.value)
    assert code.co_firstlineno < int(place) <= code.co_firstlineno + 3
    assert caught.value.stop_reason is StopReason.REWARD_FAILURE


@pytest.mark.parametrize("failure", [JudgeFailure("no verdict"), SandboxFailure("gone")])
async def test_a_failure_from_inside_keeps_its_cause(failure: Any) -> None:
    async def mine() -> float:
        raise failure

    with pytest.raises(type(failure)) as caught:
        await result_of(mine)
    assert caught.value is failure


async def test_a_sandbox_that_the_agent_killed_is_a_fault_of_the_agent() -> None:
    def mine() -> float:
        raise SandboxFailure("the agent's commands killed the sandbox", stop_reason=StopReason.SANDBOX_KILLED)

    with pytest.raises(AgentFault, match="killed the sandbox"):
        await result_of(mine)


async def test_user_error_in_a_reward_is_not_a_reward_failure() -> None:
    def mine() -> float:
        raise NotYetAvailable("not there yet")

    with pytest.raises(NotYetAvailable, match="not there yet"):
        await result_of(mine)


async def test_reward_that_does_not_return_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr("hermes_rl.scoring.reward_function.PURE_SECONDS", 0.05)
    with pytest.raises(RewardFailure, match="did not return within"):
        await result_of(released.wait)
    released.set()


async def test_cancelled_reward_whose_thread_goes_on_calls_no_model() -> None:
    going, released, outcome = threading.Event(), threading.Event(), queue.SimpleQueue[BaseException | None]()

    def mine() -> None:
        going.set()
        released.wait()
        try:
            asyncio.run(begin_call("judge"))
        except BaseException as error:
            outcome.put(error)
            raise
        outcome.put(None)

    with Meter(asyncio.current_task()).counting() as meter:
        scoring = asyncio.create_task(result_of(mine))
        await asyncio.to_thread(going.wait)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        released.set()
        assert isinstance(await asyncio.to_thread(outcome.get), asyncio.CancelledError)
    current = asyncio.current_task()
    assert meter.record() == {} and current is not None and not current.cancelling()
