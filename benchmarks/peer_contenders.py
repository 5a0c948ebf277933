"""The conversations of `runs.py` by other frameworks, each in an environment of its own that has it installed.

Written from their documentation as their users would write it: the same prompt and tool, a score per rollout, results
in a file. Neither needs hermes-rl, and their dependencies do not fit beside ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loop_contenders import PROMPT, noop
from report import say
from runs_contenders import FLIPS, SIZE, Contender, Run, Tally, measure


async def verifiers(options: argparse.Namespace, folder: Path) -> Run:
    """verifiers 0.1: a ToolEnv with a rubric, four rollouts per example, results saved."""
    import verifiers as vf  # type: ignore[import-not-found]
    from datasets import Dataset
    from openai import AsyncOpenAI

    drawn = random.Random(0)

    async def done(completion: Any) -> float:
        return float(drawn.random() < FLIPS)

    dataset = Dataset.from_list([{"prompt": PROMPT, "answer": str(n)} for n in range(options.groups)])
    env = vf.ToolEnv(dataset=dataset, eval_dataset=dataset, tools=[noop], max_turns=50, rubric=vf.Rubric([done]))
    client = AsyncOpenAI(base_url=options.url, api_key="none")

    async def run(tally: Tally) -> None:
        def ended(*_: Any) -> None:
            tally.ended.append(time.monotonic())

        results = await env.evaluate(
            vf.OpenAIChatCompletionsClient(client), "bench", sampling_args={"temperature": 1.0},
            rollouts_per_example=SIZE, max_concurrent=options.concurrency,
            results_path=folder, save_results=True, on_start=lambda *_: None, on_progress=ended,
        )  # fmt: skip
        assistant_messages = [[m for m in one["completion"] if m["role"] == "assistant"] for one in results["outputs"]]
        tally.turns = sum(map(len, assistant_messages))
        scores = [one["reward"] for one in results["outputs"]]
        groups = [scores[start : start + SIZE] for start in range(0, len(scores), SIZE)]
        tally.useful = sum(len(set(group)) > 1 for group in groups)

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
