"""The conversations of `runs.py` by other frameworks, each in an environment of its own that has it installed.

Written from their documentation as their users would write it: the same prompt and tool, a score per rollout, results
in a file. Neither needs hermes-rl, and their dependencies do not fit beside ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loop_contenders import PROMPT, noop
from report import say
from runs_contenders import FLIPS, SIZE, Contender, Run, Tally, measure


async def verifiers(options: argparse.Namespace, folder: Path) -> Run:
    """verifiers 0.4: a taskset with a reward, four episodes per task, results saved. See `verifiers_tasks.py`."""
    from verifiers.v1.cli.eval.runner import run_eval  # type: ignore[import-not-found]
    from verifiers.v1.configs.cli.eval import EvalConfig  # type: ignore[import-not-found]
    from verifiers.v1.utils.loaders import resolve_env_config  # type: ignore[import-not-found]

    os.environ["BENCH_KEY"] = "none"
    module = {"id": "verifiers_tasks"}
    agent = {"harness": module, "runtime": {"type": "subprocess"}}
    config = EvalConfig(
        env=resolve_env_config({"taskset": {**module, "rows": options.groups}, "agent": agent}),
        model="bench", client={"type": "eval", "base_url": options.url, "api_key_var": "BENCH_KEY"},
        num_rollouts=SIZE, max_concurrent=options.concurrency, rich=None, push=False, output_dir=folder,
        run={"name": "bench"},
    )  # fmt: skip

    async def run(tally: Tally) -> None:
        episodes = await run_eval(config)
        tally.ended.append(time.monotonic())
        traces = [trace for episode in episodes for trace in episode.traces]
        assert all(trace.ok for trace in traces), traces[0].errors
        tally.turns = sum(trace.num_turns for trace in traces)
        scores: dict[str, set[float]] = {}
        for trace in traces:
            scores.setdefault(trace.task.data.id, set()).add(trace.rewards["done"].score)
        tally.useful = sum(len(group) > 1 for group in scores.values())

    return run


async def inspect(options: argparse.Namespace, folder: Path) -> Run:
    """Inspect: a task with `use_tools` and `generate`, a scorer, four epochs, its log."""
    from inspect_ai import Task  # type: ignore[import-not-found]
    from inspect_ai import eval as play  # type: ignore[import-not-found]
    from inspect_ai.dataset import MemoryDataset, Sample  # type: ignore[import-not-found]
    from inspect_ai.model import ChatMessageSystem, ChatMessageUser, get_model  # type: ignore[import-not-found]
    from inspect_ai.scorer import Score, mean, scorer  # type: ignore[import-not-found]
    from inspect_ai.solver import generate, use_tools  # type: ignore[import-not-found]
    from inspect_ai.tool import tool  # type: ignore[import-not-found]

    drawn = random.Random(0)

    @tool(name="noop")  # type: ignore[untyped-decorator]
    def nothing() -> Any:
        async def execute(note: str) -> str:
            """Do nothing.

            Args:
                note: what to note
            """
            return await noop(note)

        return execute

    @scorer(metrics=[mean()])  # type: ignore[untyped-decorator]
    def done() -> Any:
        async def score(state: Any, target: Any) -> Any:
            return Score(value=float(drawn.random() < FLIPS))

        return score

    prompt = [ChatMessageSystem(content=PROMPT[0]["content"]), ChatMessageUser(content=PROMPT[1]["content"])]
    task = Task(
        dataset=MemoryDataset([Sample(id=n, input=list(prompt)) for n in range(options.groups)]),
        solver=[use_tools(nothing()), generate()], scorer=done(), epochs=SIZE,
    )  # fmt: skip
    model = get_model("openai/bench", base_url=options.url, api_key="none", responses_api=False)

    async def run(tally: Tally) -> None:
        (log,) = await asyncio.to_thread(
            play, task, model=model, max_connections=options.concurrency, max_samples=options.concurrency,
            temperature=1.0, log_dir=str(folder), display="none",
        )  # fmt: skip
        assert log.status == "success", log.error
        tally.ended.append(time.monotonic())
        assistant_messages = [[m for m in one.messages if m.role == "assistant"] for one in log.samples]
        tally.turns = sum(map(len, assistant_messages))
        scores: dict[Any, set[float]] = {}
        for one in log.samples:
            scores.setdefault(one.id, set()).add(one.scores["done"].value)
        tally.useful = sum(len(group) > 1 for group in scores.values())

    return run


PEERS: dict[str, Contender] = {"verifiers": verifiers, "inspect": inspect}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=PEERS)
    parser.add_argument("url")
    parser.add_argument("groups", type=int)
    parser.add_argument("concurrency", type=int)
    given = parser.parse_args()
    package = {"inspect": "inspect_ai"}.get(given.contender, given.contender)
    measured = asyncio.run(measure(PEERS[given.contender], given))
    say(json.dumps({**measured, "version": version(package)}))
