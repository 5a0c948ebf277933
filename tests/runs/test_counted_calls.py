"""Each call to a model is in run.json, whatever made it and whatever ended what made it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_rl import open_env
from hermes_rl.errors import RunError
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.runs.evaluate import run_evaluate
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.regrade import regrade
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.overrides import parse_extra_args
from tests.commands import program
from tests.runs.counting_server import counting_server
from tests.runs.processes import workers_of
from tests.runs.test_budgets import AFTERWARDS, AFTERWARDS_CODE, THREADS, run, same, write_spec
from tests.waiting import until

QUESTION = [{"role": "user", "content": "Is it good?"}]
THREADED = """
import asyncio
from concurrent.futures import ThreadPoolExecutor

def threaded(result, judge):
    ask = lambda word: asyncio.run(judge.chat([{"role": "user", "content": word}]))
    with ThreadPoolExecutor(3) as pool:
        return len(list(pool.map(ask, ("one", "two", "three")))) / 3
"""
OWN_CODE = """
from hermes_rl import compile_spec, load_spec

QUESTION = [{"role": "user", "content": "What comes next?"}]

class Mine(compile_spec(load_spec("spec.yaml"))):
    async def setup(self):
        await self.server.chat_completion(messages=QUESTION)
        await super().setup()

    async def get_next_item(self):
        await self.server.chat_completion(messages=QUESTION)
        return await super().get_next_item()

    async def postprocess_histories(self, group):
        await self.server.chat_completion(messages=QUESTION)
        return group

Mine.cli()
"""


def usage_in(folder: Path) -> dict[str, dict[str, float]]:
    usage: dict[str, dict[str, float]] = json.loads((folder / "run.json").read_text())["usage"]
    return usage


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_calls_of_threads_that_a_reward_starts_are_counted(tmp_path: Path, workers: int) -> None:
    (tmp_path / "threaded.py").write_text(THREADED)
    rewards = {"threaded": {"fn": "threaded.py:threaded", "isolate": "none"}}
    process = {"groups": 1, "group_size": 2, "workers": workers}
    async with counting_server() as server:
        same((await run(tmp_path, server, "process", rewards=rewards, process=process))["usage"], server)
        assert sum(call.role == "judge" for call in server.calls) >= 6


async def test_calls_of_an_environments_methods_are_counted(tmp_path: Path) -> None:
    async with counting_server() as server:
        write_spec(tmp_path, server, process={"groups": 1, "group_size": 2})
        done = await asyncio.to_thread(program, OWN_CODE, "process", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        same(usage_in(next(tmp_path.rglob("run.json")).parent), server)


async def test_requests_that_a_killed_worker_had_sent_are_counted(tmp_path: Path) -> None:
    async with counting_server() as server:
        server.held = asyncio.Event()
        path = write_spec(tmp_path, server, process={"groups": 2, "group_size": 2, "concurrency": 4, "workers": 2})
        launch = RunOptions("process", tmp_path / "out", progress=Progress(quiet=True))
        running = asyncio.create_task(run_process(load_spec(path, mode="process", environ={}), launch))
        await until(lambda: running.done() or server.in_flight == 4)
        for worker in workers_of(os.getpid()):
            os.kill(worker, signal.SIGKILL)
        server.held.set()
        await running
        usage = usage_in(tmp_path / "out")
        assert usage["policy"]["unanswered"] >= 4
        same(usage, server)


async def fail_to_resume(folder: Path) -> None:
    changed = parse_extra_args((), ["rewards.judged.args.rubric=It is short."])
    spec = load_spec(folder / "spec.yaml", overrides=changed, mode="evaluate", environ={})
    await run_evaluate(spec, RunOptions("evaluate", folder / "out", progress=Progress(quiet=True)))


async def fail_to_regrade(folder: Path) -> None:
    changed = parse_extra_args((), ["rewards.judged.args.rubric=It is short."])
    await regrade(folder / "out", changed, {}, progress=Progress(quiet=True))


@pytest.mark.parametrize("grade", [fail_to_resume, fail_to_regrade])
async def test_calls_of_a_regrading_that_fails_are_counted(tmp_path: Path, grade: Any) -> None:
    async with counting_server() as server:
        await run(tmp_path, server, "evaluate", evaluate={"rollouts": 1})
        before = len(server.calls)
        server.unreadable = True
        with pytest.raises(RunError, match="could not be regraded"):
            await grade(tmp_path)
        assert len(server.calls) > before
        await until(lambda: not server.in_flight)
        same(usage_in(tmp_path / "out"), server)


@pytest.mark.parametrize("thread", THREADS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # what its call raises
async def test_no_model_is_called_after_an_environment_has_closed(tmp_path: Path, thread: str) -> None:
    (tmp_path / "afterwards.py").write_text(AFTERWARDS_CODE.replace("THREAD", thread))
    async with counting_server() as server:
        path = write_spec(tmp_path, server, **yaml.safe_load(AFTERWARDS))
        async with open_env(path, record=tmp_path / "record") as env:
            await env.run(env.rows()[0])
        (tmp_path / "ended").touch()
        await until(lambda: (tmp_path / "asked").exists())
        same(usage_in(tmp_path / "record"), server)
        assert {call.role for call in server.calls} == {"policy"}


async def test_call_of_a_thread_does_not_end_with_another_thread(tmp_path: Path) -> None:
    """As a regrade makes them: no rollout has told the models on which event loop they live."""
    async with counting_server() as server:
        server.held = asyncio.Event()
        spec = load_spec(write_spec(tmp_path, server), environ={})
        async with CompiledSpec(spec, {}) as compiled:
            judge: Any = compiled.grader.roles["judge"]

            async def leave_after_another_has_asked() -> None:
                asking = asyncio.ensure_future(judge.chat(QUESTION))
                await until(lambda: server.in_flight == 2)
                asking.cancel()

            first = asyncio.create_task(asyncio.to_thread(asyncio.run, leave_after_another_has_asked()))
            await until(lambda: server.in_flight == 1)
            second = asyncio.create_task(asyncio.to_thread(asyncio.run, judge.chat(QUESTION)))
            await first
            server.held.set()
            assert "score" in await second
