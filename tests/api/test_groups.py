"""Iterating over groups: what is begun, what waits, and what is not handed out."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import Policy, Sampled, Sampling, open_env
from hermes_rl.api.groups import ENDED
from hermes_rl.errors import RunError, UserError
from tests.api.summing import COMPARED, TEXT, Sampler, spec_in


async def settled(sampler: Sampler) -> None:
    """Wait until no call has come for half a second: rollouts here wait for nothing but the loop and its threads."""
    still, seen = 0, len(sampler.asked)
    while still < 10:
        await asyncio.sleep(0.05)
        still, seen = still + 1 if len(sampler.asked) == seen else 0, len(sampler.asked)


def begun(sampler: Sampler) -> int:
    """Rollouts that have begun: their first prompt has no tool response."""
    shortest = min(len(ids) for ids, _ in sampler.asked) if sampler.asked else 0
    return sum(len(ids) < shortest + 20 for ids, _ in sampler.asked)


async def test_groups_start_only_while_they_are_iterated(tmp_path: Path) -> None:
    sampler = Sampler()
    async with open_env(spec_in(tmp_path)) as env:
        groups = env.groups(2, sampler.policy(), concurrency=4)
        await settled(sampler)
        assert sampler.asked == []
        await anext(groups)
        await settled(sampler)
        at_rest = begun(sampler)
        assert at_rest <= 4 + 2 * (ENDED + 1), "those in flight end, and those that began in the place of others"
        await settled(sampler)
        assert begun(sampler) == at_rest
        for _ in range(8):
            await anext(groups)
        assert begun(sampler) > at_rest
        await groups.close()
        with pytest.raises(StopAsyncIteration):
            await anext(groups)


@pytest.mark.parametrize("ahead", [1, 3])
async def test_groups_run_ahead_by_at_most_the_requested_number(tmp_path: Path, ahead: int) -> None:
    sampler = Sampler()
    async with open_env(spec_in(tmp_path)) as env:
        async with env.groups(1, sampler.policy(), concurrency=1, ahead=ahead) as groups:
            await anext(groups)
            for _ in range(50):
                await settled(sampler)
                if begun(sampler) > ahead:
                    break
            await settled(sampler)
            played = begun(sampler)
            most = 1 + ahead + ENDED + 1
            assert 1 + ahead <= played <= most, "one was taken, those ahead wait, the others were ending or in flight"
            await settled(sampler)
            assert begun(sampler) == played
        await settled(sampler)
        assert begun(sampler) == played


async def test_requested_rows_each_run_once(tmp_path: Path) -> None:
    async with open_env(spec_in(tmp_path)) as env:
        keys = [row.key for row in env.rows()][:3]
        given = [keys[0], env.row(keys[1]), keys[2], keys[0]]
        for ahead in (0, 2):
            found = [group async for group in env.groups(2, Sampler().policy(), rows=given, ahead=ahead)]
            assert sorted(group.row.key for group in found) == sorted([*keys, keys[0]])
            assert len({group.id for group in found}) == 4

        async def coming() -> Any:
            for row in env.rows():
                yield row

        assert len([group async for group in env.groups(1, Sampler().policy(), rows=coming())]) == 4
        with pytest.raises(UserError, match="no row with the key 'nothing'"):
            await anext(env.groups(1, Sampler().policy(), rows=["nothing"]))


async def test_all_rows_come_over_and_over(tmp_path: Path) -> None:
    async with open_env(spec_in(tmp_path)) as env:
        seen = []
        async with aclosing(_taken(env.groups(1, Sampler().policy(), concurrency=1), 9)) as groups:
            async for group in groups:
                seen.append(group.row.key)
    assert {seen.count(key) for key in set(seen)} == {2, 3}


async def _taken(groups: Any, count: int) -> Any:
    async with groups:
        for _ in range(count):
            yield await anext(groups)


async def test_uniform_groups_are_excluded_and_counted(tmp_path: Path) -> None:
    sampler = Sampler(wrong=0.3)
    async with open_env(spec_in(tmp_path)) as env:
        rows = [row for row in env.rows() for _ in range(5)]
        groups = env.groups(2, sampler.policy(), rows=rows, drop_uniform=True)
        found = [group async for group in groups]
    assert all(len(set(group.scores)) == 2 for group in found)
    assert groups.excluded["uniform"] == len(rows) - len(found) > 0
    for group in found:
        assert sorted(group.advantages("mean"), key=float) == [-0.5, 0.5]  # type: ignore[arg-type]
        assert sorted(group.advantages(), key=float) == [-1.0, 1.0]  # type: ignore[arg-type]


async def test_staleness_holds_when_a_group_is_handed_out(tmp_path: Path) -> None:
    sampler = Sampler()
    async with open_env(spec_in(tmp_path)) as env:
        policy = sampler.policy(version=0)
        async with env.groups(1, policy, concurrency=2, ahead=3, max_staleness=1) as groups:
            await anext(groups)
            for _ in range(50):
                await settled(sampler)
                if begun(sampler) >= 4:
                    break
            policy.version = 1
            await anext(groups)
            assert groups.excluded["stale"] == 0, "one version behind is allowed"
            policy.version = 2
            later = await anext(groups)
            assert groups.excluded["stale"] >= 2, "what waited was sampled with version 0"
            assert later.provenance is not None
            assert later.provenance.oldest is not None
            assert later.provenance.oldest >= 1
        unknown = env.groups(1, sampler.policy(), max_staleness=1)
        with pytest.raises(UserError, match="does not report the version"):
            await anext(unknown)


async def test_stale_recorded_group_runs_again_under_its_batch(tmp_path: Path) -> None:
    async def asked(version: int, sampler: Sampler) -> tuple[list[str], int]:
        async with open_env(spec_in(tmp_path), record=tmp_path / "run") as env:
            rows = list(env.rows())[:3]
            groups = env.groups(
                2, sampler.policy(version=version), rows=rows, max_staleness=1, batch="step-12", ahead=1
            )
            return sorted([group.id async for group in groups]), groups.excluded["stale"]

    first = await asked(0, Sampler())
    assert len(first[0]) == 3
    second = Sampler()
    assert await asked(1, second) == first, "one version behind is allowed"
    assert not second.asked
    anew = await asked(5, Sampler())
    assert anew[1] == 0
    assert len(anew[0]) == 3 and not set(anew[0]) & set(first[0])
    last = Sampler()
    assert await asked(5, last) == anew, "what was played anew is in the record too"
    assert not last.asked


async def test_group_with_exhausted_retries_is_returned_as_dropped(tmp_path: Path) -> None:
    async with open_env(spec_in(tmp_path)) as env:
        rows = list(env.rows())
        found = [group async for group in env.groups(2, Sampler(fails=1.0).policy(), rows=rows, retries=0)]
        assert [group.dropped for group in found] == ["server_failure"] * 4
        assert all(group.detail and group.scores == [] for group in found)
    text = TEXT + "budget: {max_failures: 1}\n"
    async with open_env(spec_in(tmp_path, text)) as env:
        with pytest.raises(RunError, match=r"more than budget\.max_failures"):
            async for _ in env.groups(2, Sampler(fails=1.0).policy(), retries=0):
                pass


async def test_the_specs_budget_ends_the_iteration(tmp_path: Path) -> None:
    text = TEXT + "budget: {max_tokens: 1500}\n"
    async with open_env(spec_in(tmp_path, text)) as env:
        found = [group async for group in env.groups(1, Sampler().policy(), concurrency=1)]
        with pytest.raises(RunError, match="a budget of the spec is used up"):
            await env.run(env.rows()[0], Sampler().policy())
    assert 1 <= len(found) < 20


async def test_leaving_the_loop_ends_what_is_in_flight(tmp_path: Path) -> None:
    hanging, reached, left = asyncio.Event(), asyncio.Event(), 0
    sampler = Sampler()

    async def half(ids: list[int], sampling: Sampling) -> Sampled:
        nonlocal left
        if len(sampler.asked) >= 6:
            try:
                reached.set()
                await hanging.wait()
            finally:
                left += 1
        return await sampler(ids, sampling)

    async with open_env(spec_in(tmp_path)) as env:
        async with env.groups(1, Policy.sampling(half, None), concurrency=4, ahead=2) as groups:
            await anext(groups)
            await reached.wait()
        assert left > 0
        ended = left
        await settled(sampler)
        assert left == ended
        async for _ in env.groups(1, sampler.policy(), ahead=1):
            break
        await settled(sampler)
        assert len([task for task in asyncio.all_tasks() if "pump" in repr(task)]) == 0, "a plain break ends it too"
        second = env.groups(1, Policy.sampling(half, None))
        waiting = asyncio.ensure_future(anext(second))
        await settled(sampler)
        with pytest.raises(UserError, match="another caller already waits"):
            await anext(second)
        waiting.cancel()


async def test_batch_requested_twice_concurrently_runs_once(tmp_path: Path) -> None:
    """Also where rewards compare the members, which then get one comparison."""
    for name, text in (("plain", TEXT), ("compared", COMPARED)):
        folder = tmp_path / name
        folder.mkdir()
        sampler = Sampler(wrong=0.5)
        async with open_env(spec_in(folder, text), record=folder / "record") as env:
            policy = sampler.policy()

            async def read(env: Any = env, policy: Policy = policy) -> dict[str, list[Any]]:
                groups = env.groups(4, policy, rows=env.rows(), batch="b")
                return {group.id: [one.messages for one in group.rollouts] + group.scores async for group in groups}

            one, two = await asyncio.gather(read(), read())
        assert one == two
        assert len(one) == 4
        lines = (folder / "record" / "rollouts.jsonl").read_text().splitlines()
        assert len(lines) == 4 * 4


async def test_invalid_arguments_are_reported_before_any_rollout_starts(tmp_path: Path) -> None:
    sampler = Sampler()
    async with open_env(spec_in(tmp_path)) as env:
        with pytest.raises(UserError, match="colour"):
            env.groups(2, sampler.policy(), sampling={"colour": 1})
        nowhere = Policy.chat(lambda messages, tools: None, tokenizer=tmp_path / "none")  # type: ignore[arg-type]
        with pytest.raises(UserError, match="none"):
            await env.groups(2, nowhere, rows=env.rows()).open()
        groups = await env.groups(2, sampler.policy(), rows=env.rows()).open()
        assert sampler.asked == []
        assert len([group async for group in groups]) == 4


async def test_groups_may_be_closed_by_two_at_once(tmp_path: Path) -> None:
    """Whoever waits for a group closes the iteration too, when somebody else's close has ended that wait."""
    async with open_env(spec_in(tmp_path)) as env:
        groups = env.groups(2, Sampler().policy(), concurrency=8)
        await anext(groups)

        async def iterate() -> None:
            async with groups:
                await anext(groups)

        iterating = asyncio.create_task(iterate())
        await asyncio.sleep(0)  # it has asked, and nothing was done for it yet
        await groups.close()
        (ended,) = await asyncio.gather(iterating, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError)
