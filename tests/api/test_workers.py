"""`open_env` with workers: what they play is what this process would play, with policies that requests bring along."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hermes_rl
from hermes_rl import Group, Policy, Rollout, open_env
from hermes_rl.errors import UserError
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.api.summing import CODE, COMPARED, TEXT, Sampler, spec_in
from tests.runs.processes import workers_of
from tests.runs.test_workers import sleepers
from tests.servers.loopback_server import Loopback, completion, error
from tests.service.playing import policy as token_policy
from tests.service.served import SOLUTION

SCRIPTED = TEXT + "servers: {policy: {type: scripted, error_rate: 0.5}}\n" + SOLUTION
SECRET = "sk-that-nobody-may-read"


def told(rollout: Rollout) -> Any:
    """All of a rollout that no clock says."""
    return (
        rollout.id,
        rollout.seed,
        rollout.score,
        rollout.stop_reason,
        rollout.messages,
        {name: reward.value for name, reward in rollout.rewards.items()},
        [(one.prompt_ids, one.response_ids, one.mask, one.logprobs, one.weights) for one in rollout.examples()],
    )


def workers() -> list[int]:
    """The worker processes of this process."""
    return workers_of(os.getpid())


async def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------------- what is played


async def test_workers_produce_the_same_rollouts_as_one_process(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, SCRIPTED)
    played: list[dict[str, Any]] = []
    for number in (1, 2):
        before = set(workers())
        async with open_env(spec, record=tmp_path / str(number), workers=number) as env:
            assert len(set(workers()) - before) == (0 if number == 1 else 2)
            groups = [group async for group in env.groups(3, rows=env.rows(), batch="b")]
            alone = await env.run(env.rows()[0], group="alone", sampling={"max_turns": 1})
            deterministic = Policy.server("scripted", None, None)
            other = await env.run_group(env.rows()[1], 2, deterministic, group="other")
        assert set(workers()) == before, "no worker stays"
        assert all(group.provenance is not None and group.provenance.exact for group in [*groups, other])
        played.append({one.id: told(one) for group in [*groups, other] for one in group.rollouts} | {"-": told(alone)})
    assert played[0] == played[1]
    assert {group.scores.count(1.0) for group in groups} <= {1, 2}, "some deviate, by the seed"
    assert other.scores == [1.0, 1.0]
    assert alone.stop_reason == "max_turns"
    assert len((tmp_path / "2" / "rollouts.jsonl").read_text().splitlines()) == 4 * 3 + 1 + 2


async def test_rewards_that_compare_a_group_are_called_in_a_worker_too(tmp_path: Path) -> None:
    played: list[list[Any]] = []
    spec = spec_in(tmp_path, COMPARED + SCRIPTED[len(TEXT) :])
    for number in (1, 2):
        async with open_env(spec, record=tmp_path / str(number), workers=number) as env:
            [group] = [group async for group in env.groups(4, rows=[env.rows()[0]], batch="b")]
        async with open_env(spec, workers=number) as env:
            alone = await env.run(env.rows()[1])
        assert group.dropped is None
        assert all("longest" in one.rewards for one in [*group.rollouts, alone])
        assert all(one.line is None for one in [*group.rollouts, alone]), "no record is kept in memory twice"
        assert alone.score is not None
        played.append([told(one) for one in group.rollouts])
    assert played[0] == played[1]


def test_the_number_of_workers_is_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="workers is at least 1, not 0"):
        open_env(spec_in(tmp_path), workers=0)


async def test_servers_that_take_fewer_calls_than_there_are_workers_are_refused(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, TEXT + "servers: {policy: {type: scripted, max_concurrency: 1}}\n")
    with pytest.raises(UserError, match=r"servers\.policy\.max_concurrency is 1"):
        async with open_env(spec, workers=2):
            pass
    assert not workers()


async def test_workers_refuse_local_policy_functions_but_allow_sessions(tmp_path: Path) -> None:
    sampler = Sampler()

    async def chat(messages: Any, tools: Any) -> str:
        return "The sum is 3."

    async with open_env(spec_in(tmp_path), workers=2) as env:
        row = env.rows()[0]
        for policy in (sampler.policy(), Policy.chat(chat)):
            for play in (env.run(row, policy), env.run_group(row, 2, policy)):
                with pytest.raises(UserError, match=r"a function of this process.*serve the model"):
                    await play
            with pytest.raises(UserError, match="a function of this process"):
                env.groups(2, policy)
        assert not sampler.asked
        async with await env.session(row) as session:
            turn = await session.start()
            assert turn is not None
            assert await session.step("The sum is 3.") is None
            assert session.rollout is not None
            assert session.rollout.score == 1.0


@pytest.mark.slow
async def test_the_blocking_twin_has_workers_too(tmp_path: Path) -> None:
    def play() -> list[float]:
        with hermes_rl.sync(open_env(spec_in(tmp_path, SCRIPTED), workers=2)) as env:
            return env.run_group(env.rows()[0], 4).scores

    assert sorted(await asyncio.to_thread(play)) == [0.0, 0.0, 1.0, 1.0]
    assert not workers()


# ---------------------------------------------------------------------- deaths


async def test_a_worker_that_is_killed_costs_only_what_it_had(tmp_path: Path) -> None:
    model = token_policy()
    async with model.running() as url, open_env(spec_in(tmp_path), record=tmp_path / "run", workers=2) as env:
        policy = Policy.server("vllm", url, "tiny", tokenizer=str(small_tokenizer_path()), version=3)
        model.pause()
        asking = asyncio.create_task(_all(env, policy))
        await until(lambda: len(model.asked) >= 12)
        victim, other = workers()
        os.kill(victim, signal.SIGKILL)
        await until(lambda: env.status().died == 1)
        lost = env.status().lost
        assert 0 < lost < 12, "the other worker has the rest"
        model.resume()
        groups = await asking
        await until(lambda: env.status().workers == 2)
        assert other in workers()
        assert env.status().lost == lost
        assert {group.id for group in groups} == {f"{row.key}@b" for row in env.rows()}
        assert all(group.scores == [1.0] * 3 for group in groups)
        for group in groups:
            assert group.provenance is not None
            assert group.provenance.exact
            assert (group.provenance.oldest, group.provenance.newest) == (3, 3)
    sampled = {(tuple(one.ids), tuple(one.logprobs)) for one in model.log}
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        for sequence in rollout.sequences or ():
            assert sequence.sampled is not None
            for span in sequence.spans:
                assert (tuple(sequence.tokens[span.start : span.stop])) in {ids for ids, _ in sampled}
    assert not workers()


async def _all(env: hermes_rl.Env, policy: Policy) -> list[Group]:
    return [group async for group in env.groups(3, policy, rows=env.rows(), batch="b", concurrency=12)]


DEADLY = CODE.replace(
    "return a + b", "import os, signal; os.kill(os.getpid(), signal.SIGKILL) if a == 1 else None; return a + b"
)


async def test_rollout_that_kills_its_worker_fails_and_others_continue(tmp_path: Path) -> None:
    spec = spec_in(
        tmp_path, SCRIPTED.replace("error_rate: 0.5", "error_rate: 0").replace('add"}', 'add", isolate: none}')
    )
    (tmp_path / "code.py").write_text(DEADLY)
    async with open_env(spec, workers=2) as env:
        groups = {group.row.key: group async for group in env.groups(1, rows=env.rows(), concurrency=1)}
        deadly = groups.pop(env.rows()[0].key)
        assert (str(deadly.dropped), deadly.scores) == ("sandbox_failure", [])
        assert "a worker died while it had rollout" in str(deadly.detail)
        assert [group.scores for group in groups.values()] == [[1.0]] * 3
        assert (env.status().died, env.status().lost) == (3, 3)


async def test_dead_worker_is_not_retried_when_the_trainer_captures_tokens(tmp_path: Path) -> None:
    """A worker that dies has made calls that the trainer has captured already."""
    server = await Loopback().start()
    server.otherwise.delay = 60.0
    try:
        async with open_env(spec_in(tmp_path), workers=2) as env:
            endpoint = Policy.endpoint(server.url, "m", api_key=SECRET)
            playing = asyncio.create_task(env.run(env.rows()[0], endpoint, retries=0))
            await until(lambda: len(server.seen) == 1 and env.status().phases == {"model": 1})
            for pid in workers():
                os.kill(pid, signal.SIGKILL)
            rollout = await playing
            assert (rollout.score, str(rollout.stop_reason)) == (None, "sandbox_failure")
            assert len(server.seen) == 1
            server.otherwise = completion("The sum is 3.")
            await until(lambda: env.status().died == 2)
            once_more = await env.run(env.rows()[0], endpoint, retries=0)
            assert (once_more.score, once_more.no_tokens) == (1.0, "the trainer captures the tokens at its endpoint")
            assert {one.headers["Authorization"] for one in server.seen} == {f"Bearer {SECRET}"}
            await endpoint.close()
    finally:
        await server.stop()


async def test_connections_to_an_endpoint_end_with_its_rollout(tmp_path: Path) -> None:
    """There is an endpoint for each rollout, and a training run has a million of them."""
    server = await Loopback().start()
    server.otherwise = completion("The sum is 3.")
    try:
        async with open_env(spec_in(tmp_path), workers=2) as env:

            async def play(count: int) -> int:
                for _ in range(count):
                    endpoint = Policy.endpoint(server.url, "m")
                    assert (await env.run(env.rows()[0], endpoint, retries=0)).score == 1.0
                    await endpoint.close()
                return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in workers())

            before = await play(4)
            assert await play(40) < before + 10
    finally:
        await server.stop()


# ---------------------------------------------------------------------- what is given up


async def test_cancelled_run_ends_in_its_worker_too(tmp_path: Path) -> None:
    model = token_policy()
    async with model.running() as url, open_env(spec_in(tmp_path), workers=2) as env:
        policy = Policy.server("vllm", url, "tiny", tokenizer=str(small_tokenizer_path()), version=1)
        model.pause()
        playing = [asyncio.create_task(env.run(row, policy, group=row.key)) for row in env.rows()]
        await until(lambda: len(model.asked) >= 4 and sum(env.status().phases.values()) == 4)
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        await until(lambda: not env.status().phases, 5.0)
        asked = len(model.asked)
        model.resume()
        again = await env.run(env.rows()[0], policy, group=env.rows()[0].key)
        assert again.score == 1.0
        assert len(model.asked) == asked + again.turns, "nothing of what was given up goes on"
        assert (env.status().died, env.status().lost) == (0, 0)
        assert env.status().retries == {}


SLEEPS = """
dataset: {items: [{word: hello}]}
prompt: {user: "Say {{ word }}."}
toolsets: [terminal]
rewards: {right: {fn: exact_match, args: {target: "{{ word }}"}}}
servers: {policy: {type: scripted}}
solution: {turns: [{tools: [{name: terminal, args: {command: "sleep MARK"}}]}, {say: "{{ word }}"}]}
"""


async def test_a_sandbox_is_released_when_the_wait_for_its_rollout_is_over(tmp_path: Path) -> None:
    """Otherwise the same rollout, asked for again, would begin while its former self still acts."""
    mark = f"{os.getpid()}.125"
    async with open_env(spec_in(tmp_path, SLEEPS.replace("MARK", mark)), workers=2) as env:
        playing = asyncio.create_task(env.run(env.rows()[0]))
        await until(lambda: bool(sleepers(mark)))
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert not sleepers(mark)


async def test_closing_the_environment_cancels_rollouts_in_workers(tmp_path: Path) -> None:
    model = token_policy()
    async with model.running() as url:
        async with open_env(spec_in(tmp_path), workers=2) as env:
            policy = Policy.server("vllm", url, "tiny", tokenizer=str(small_tokenizer_path()), version=1)
            model.pause()
            playing = asyncio.create_task(env.run(env.rows()[0], policy))
            await until(lambda: len(model.asked) == 1)
        with pytest.raises(UserError, match="was closed while this was running"):
            await playing
    assert not workers()


# ---------------------------------------------------------------------- weights that move, and keys


@pytest.mark.slow
async def test_policy_version_and_model_updates_reach_calls_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, weights = token_policy(), {"version": 1, "model": "tiny-1"}
    async with model.running() as url, open_env(spec_in(tmp_path), workers=2) as env:
        policy = Policy.server(
            "vllm",
            url,
            lambda: str(weights["model"]),
            tokenizer=str(small_tokenizer_path()),
            version=lambda: int(str(weights["version"])),
        )
        model.pause()
        playing = [asyncio.create_task(env.run(row, policy)) for row in env.rows()]
        await until(lambda: len(model.asked) == 4)
        weights |= {"version": 2, "model": "tiny-2"}
        await env.sync_policies()
        model.resume()
        rollouts = await asyncio.gather(*playing)
        assert [one.examples(one=True)[0].weights for one in rollouts] == [(1, 2)] * 4
        assert [one["model"] for one in model.asked] == ["tiny-1"] * 4 + ["tiny-2"] * 4
        again = await env.run(env.rows()[0], policy)
        assert again.examples(one=True)[0].weights == (2, 2)
        plain = Policy.server("vllm", url, "tiny", tokenizer=str(small_tokenizer_path()), version=5)
        model.pause()
        asked = len(model.asked)
        late = asyncio.create_task(env.run(env.rows()[0], plain))
        await until(lambda: len(model.asked) > asked)
        looks, look = list[object](), Policy.get_weight_update

        def noted(policy: Policy) -> Any:
            looks.append(policy.version)
            return look(policy)

        monkeypatch.setattr(Policy, "get_weight_update", noted)
        plain.version = 6  # no word but this: the workers hear of it by themselves
        await until(lambda: looks.count(6) > 1)  # the first look was sent before the second one
        model.resume()
        assert (await late).examples(one=True)[0].weights == (5, 6)


async def test_a_server_that_tells_its_version_is_asked_by_the_worker(tmp_path: Path) -> None:
    model = token_policy()
    model.version = 9
    async with model.running() as url, open_env(spec_in(tmp_path), workers=2) as env:
        path = "/get_weight_version"
        policy = Policy.server("vllm", url, "tiny", tokenizer=str(small_tokenizer_path()), weights_path=path)
        rollout = await env.run(env.rows()[0], policy)
        assert rollout.examples(one=True)[0].weights == (9, 9)
        assert await policy.weights() == 9


@pytest.mark.parametrize("number", [1, 2])
async def test_version_in_worker_responses_updates_the_policy(tmp_path: Path, number: int) -> None:
    """vLLM tells it nowhere else, and what is too old is left out by it."""
    model, version = token_policy(), ["7"]
    model.faults = [lambda body: body.update(weight_version=version[0])] * 100
    async with model.running() as url, open_env(spec_in(tmp_path), workers=number) as env:
        policy = Policy.server("vllm", url, "tiny", tokenizer=str(small_tokenizer_path()))
        rows = [env.row(row.key) for row in env.rows()]
        async with env.groups(1, policy, rows=rows, max_staleness=1, concurrency=1) as groups:
            assert (await anext(groups)).provenance is not None
            assert await policy.weights() == 7
            version[0] = "9"
            oldest = [group.provenance.oldest async for group in groups if group.provenance is not None]
        assert await policy.weights() == 9
        assert oldest and set(oldest) <= {7, 9}


@pytest.mark.slow
async def test_a_key_travels_in_memory_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    server = await Loopback().start()
    server.answers = [error(500), error(500)]
    server.otherwise = completion("The sum is 3.")
    caplog.set_level("DEBUG", "hermes_rl")
    try:
        async with open_env(spec_in(tmp_path), record=tmp_path / "run", workers=2) as env:
            policy = Policy.server("openai", server.url, "m", api_key=SECRET, tokenizer=str(small_tokenizer_path()))
            assert SECRET not in repr(policy.describe())
            rollout = await env.run(env.rows()[0], policy)
            assert rollout.score == 1.0
            assert env.status().retries == {"policy": 2}
            for pid in workers():
                for name in ("cmdline", "environ"):
                    assert SECRET.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    finally:
        await server.stop()
    assert {one.headers["Authorization"] for one in server.seen} == {f"Bearer {SECRET}"}
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 3
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    assert SECRET not in caplog.text + "".join(capfd.readouterr())
