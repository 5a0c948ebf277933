"""Budgets of tokens and cost hold over starts, failures and cancellations; what is reported is what the server saw."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_rl.errors import RunError
from hermes_rl.runs.evaluate import run_evaluate
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import load_spec
from tests.runs.counting_server import COST, CountingServer, counting_server
from tests.waiting import until

SPEC = """
dataset: {items: [ITEMS], eval: {fraction: 0.5}}
prompt: {user: "Roll, row {{ n }}."}
tools: [{python: "code.py:roll"}]
rewards:
  word: {fn: "code.py:word"}
  judged: {fn: llm_judge, args: {rubric: "It is kind."}}
agent: {max_turns: 4}
on_stop: {length: drop, max_turns: mask}
servers:
  policy: {type: openai, base_url: "URL/policy/v1", model: m}
  judge: {type: openai, base_url: "URL/judge/v1", model: m}
"""
CODE = '''
def roll(n: int) -> str:
    """Roll.

    Args:
        n: a number.
    """
    return str(n)

def word(result):
    return {"whole": 1.0, "half": 0.5, "third": 1 / 3}.get(result.final_response.split(" ")[0], 0.0)
'''


def write_spec(folder: Path, server: CountingServer, spec: str = SPEC, **sections: Any) -> Path:
    """Write the spec with further sections, and its code; return the path of the spec."""
    items = ", ".join(f"{{n: {number}}}" for number in range(40))
    written = yaml.safe_load(spec.replace("ITEMS", items).replace("URL", server.url)) | sections
    (folder / "spec.yaml").write_text(yaml.safe_dump(written, sort_keys=False))
    (folder / "code.py").write_text(CODE)
    return folder / "spec.yaml"


async def run(folder: Path, server: CountingServer, mode: Any, spec: str = SPEC, **sections: Any) -> dict[str, Any]:
    """Run the spec with further sections until it ends, if only by its budget, and return its run.json."""
    loaded = load_spec(write_spec(folder, server, spec, **sections), mode=mode, environ={})
    launch = RunOptions(mode, folder / "out", progress=Progress(quiet=True))
    try:
        await (run_process if mode == "process" else run_evaluate)(loaded, launch)
    except RunError as error:
        assert "budget.max" in str(error)
    described: dict[str, Any] = json.loads((folder / "out" / "run.json").read_text())
    return described


def same(usage: dict[str, dict[str, float]], server: CountingServer) -> None:
    """Require that each request is in run.json; a reply on its way to a rollout that was cancelled is not answered."""
    assert usage.keys() == {call.role for call in server.calls}
    for role, counts in usage.items():
        sent = server.used(role)
        for which in (counts, sent):
            which.pop("seconds", None)
        missed = sent["calls"] - counts["calls"]
        assert counts["calls"] + counts.pop("unanswered", 0) >= sent["calls"] + sent.pop("unanswered", 0)
        if missed:
            assert all(0 <= sent[name] - counts.get(name, 0) <= missed * 1000 for name in sent)
        else:
            assert counts == pytest.approx(sent)


@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("bound", ["max_cost", "max_tokens"])
async def test_a_budget_is_exceeded_by_the_calls_in_flight_at_most(tmp_path: Path, bound: str, number: int) -> None:
    draw, mode = random.Random(f"{bound} {number}"), ("process", "evaluate")[number % 2]
    in_flight, most = draw.choice([1, 8, 32]), {"max_cost": COST, "max_tokens": 600.0}[bound]
    size = {"process": {"groups": 50, "group_size": 4}, "evaluate": {"rollouts": 4}}[mode]
    async with counting_server(fails=0.05) as server:
        for share in (0.3, 1.0):  # the second start goes on with what the first one has left
            limit = round(most * draw.randint(20, 60) * share, 2 if bound == "max_cost" else None)
            sections = {mode: {"concurrency": in_flight, **size}, "budget": {bound: limit}}
            usage = (await run(tmp_path, server, mode, **sections))["usage"]
            same(usage, server)
            spent = usage["policy"]["prompt_tokens"] + usage["policy"]["completion_tokens"]
            if bound == "max_cost":
                spent = sum(counts.get("cost", 0.0) for counts in usage.values())
            assert limit <= spent < limit + most * in_flight + 1e-9


AFTERWARDS = """
rewards:
  word: {fn: "code.py:word"}
  afterwards: {fn: "afterwards.py:afterwards", isolate: none}
process: {groups: 1, group_size: 1}
"""
AFTERWARDS_CODE = """
import asyncio, contextvars, functools, pathlib, threading, time

HERE = pathlib.Path(__file__).parent

def afterwards(result, judge):
    def ask():
        while not (HERE / "ended").exists():
            time.sleep(0.01)
        try:
            asyncio.run(judge.chat([{"role": "user", "content": "Is it good?"}]))
        finally:
            (HERE / "asked").touch()

    threading.Thread(target=THREAD).start()
    return 0.0
"""
THREADS = ("functools.partial(contextvars.copy_context().run, ask)", "ask")
"""Targets of threads: in the context of the reward, and in none."""


@pytest.mark.parametrize("thread", THREADS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # what its call raises
async def test_no_model_is_called_after_the_end_of_a_run(tmp_path: Path, thread: str) -> None:
    (tmp_path / "afterwards.py").write_text(AFTERWARDS_CODE.replace("THREAD", thread))
    async with counting_server() as server:
        usage = (await run(tmp_path, server, "process", **yaml.safe_load(AFTERWARDS)))["usage"]
        (tmp_path / "ended").touch()
        await until(lambda: (tmp_path / "asked").exists())
        same(usage, server)
        assert {call.role for call in server.calls} == {"policy"}
