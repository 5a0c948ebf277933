"""Fifty SIGKILLs at random moments over one run, with a server that fails a fifth of the calls: nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hermes_rl.data.rows import Row
from hermes_rl.rollouts.rollout import RolloutKey
from hermes_rl.runs.store import group_of_episode, other_seat
from hermes_rl.servers.base import drawn_seed
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.cli.test_run import lines
from tests.commands import environment
from tests.runs.faulty_model import FAULTS, FaultyModel, number_of

KILLS = 50
ROWS = 120
WAYS = ("calm", "rough")
FAULTY = 0.2
SPEC = """
dataset: {items: ITEMS, eval: EVAL}
prompt: {user: "Do {{ n }}"}
tools: [{python: "code.py:shout"}]
agent: {max_turns: 4, max_tokens: 50, temperature: 1.0}
rewards: {number: {fn: "code.py:number", range: [0, 1000]}, even: {fn: "code.py:even", weight: 0.5}}
servers: {policy: {type: openai, base_url: URL, model: faulty, tokenizer: TOKENIZER, timeout: 0.5}}
process: {groups: 200, group_size: 2, concurrency: 10}
evaluate: {rollouts: 4, concurrency: 10, success_threshold: 5}
"""
CODE = '''
def shout(text: str, times: int) -> str:
    """Shout."""
    return text.upper() * times

def number(result):
    return float(result.final_response.rsplit(" ", 1)[1])

def even(result):
    return number(result) % 2 == 0
'''


SEATS = """
agents: {ann: {}, bob: {message_template: "{{ seat }}: {{ text }}"}, cy: {train: false}}
schedule: {order: alternate, rounds: 2}
"""


def write_spec(folder: Path, url: str, *, evaluation: bool, rows: int) -> None:
    items = json.dumps([{"n": n % (rows - 5)} for n in range(rows)])  # five rows are there twice
    text = SPEC.replace("URL", url).replace("ITEMS", items).replace("TOKENIZER", str(small_tokenizer_path()))
    text = text.replace(", eval: EVAL", ", eval: only" if evaluation else "")
    (folder / "spec.yaml").write_text(text)
    (folder / "code.py").write_text(CODE)


def seed_of(line: Any, turn: int) -> int:
    """The sampling seed of a rollout's model call, from its line."""
    row = Row(key=line["row_key"], columns={}, index=0, digest="")
    key = RolloutKey(row, group_of_episode(line), line["index"], 1, seat=other_seat(line))
    seed = drawn_seed(key.seed(0), "turn", turn)
    assert seed is not None
    return seed


class Lives:
    """The program, started again and again; see `many_lives`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def _ask(self, request: Any) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return int(await self._process.stdout.readline())

    async def start(self, *arguments: str) -> int:
        return await self._ask(list(arguments))

    async def end(self, pid: int) -> int:
        return await self._ask(pid)


@asynccontextmanager
async def lives(folder: Path) -> AsyncIterator[Lives]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.runs.many_lives", str(folder / "said.txt"),
        cwd=folder, env=environment(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield Lives(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def with_kills(folder: Path, model: FaultyModel, mode: str) -> int:
    """Kill the run `KILLS` times, then let it end; returns the calls that it may have to pay for again."""
    random = Random(5)
    allowed = killed = 0
    arguments = ("run", "spec.yaml", mode, "--out", "run", "--quiet")
    async with lives(folder) as program:
        while killed < KILLS:
            model.asked.clear()
            pid = await program.start(*arguments)
            if random.random() < 0.8:
                with suppress(TimeoutError):  # a run that has all its rollouts asks for nothing more
                    await asyncio.wait_for(model.asked.wait(), 2)
            await asyncio.sleep(random.uniform(0.0, 0.2))
            os.kill(pid, signal.SIGKILL)
            assert await program.end(pid) == -signal.SIGKILL, (folder / "said.txt").read_text()
            killed += 1
            allowed += in_flight(folder, model)
        status = await program.end(await program.start(*arguments))
    assert status == 0, (folder / "said.txt").read_text()[-2000:]
    return allowed


def in_flight(folder: Path, model: FaultyModel) -> int:
    """Calls that were answered for rollouts that are not on disk."""
    path = folder / "run" / "rollouts.jsonl"
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    on_disk = {seed_of(json.loads(line), turn) for line in whole for turn in (0, 1)}
    return sum(1 for seed, _ in model.answered if seed not in on_disk)


def repeated(model: FaultyModel) -> int:
    return sum(count - 1 for count in model.answered.values())


def check_rollouts(found: list[dict[str, Any]]) -> None:
    assert len({line["id"] for line in found}) == len(found)
    scored = [line for line in found if line["score"] is not None]
    assert len({line["id"].partition("r")[0] for line in scored}) == len(scored), "each rollout once"
    for line in scored:
        number = number_of(seed_of(line, 1))
        assert line["score"] == number + 0.5 * (number % 2 == 0), "no failure has made a score"


@pytest.mark.slow
@pytest.mark.by_turns(2, 0)
@pytest.mark.timeout(600)
async def test_process_writes_each_of_its_groups_once(tmp_path: Path) -> None:
    async with FaultyModel(faults=FAULTY) as model:
        write_spec(tmp_path, model.url, evaluation=False, rows=60)
        allowed = await with_kills(tmp_path, model, "process")
    groups, rollouts = lines(tmp_path / "run" / "groups.jsonl"), lines(tmp_path / "run" / "rollouts.jsonl")
    assert set(model.failed) == set(FAULTS)
    assert len({group["group"] for group in groups}) == len(groups) == 200
    check_rollouts(rollouts)  # type: ignore[arg-type]
    scores = {str(line["id"]).partition("r")[0]: line["score"] for line in rollouts if line["score"] is not None}
    for group in groups:
        assert group["scores"] == [scores[f"{group['group']}-{index}"] for index in range(2)]
        assert group["tokens"] and group["masks"]
    assert repeated(model) <= allowed, "only what was in flight is paid for again"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_an_episode_of_three_seats_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    async with FaultyModel(faults=FAULTY / 3) as model:
        write_spec(tmp_path, model.url, evaluation=False, rows=60)
        spec = (tmp_path / "spec.yaml").read_text().replace("groups: 200", "groups: 60")
        (tmp_path / "spec.yaml").write_text(spec + SEATS)
        await with_kills(tmp_path, model, "process")
    groups, rollouts = lines(tmp_path / "run" / "groups.jsonl"), lines(tmp_path / "run" / "rollouts.jsonl")
    assert model.failed.total() > 20
    assert len({line["id"] for line in rollouts}) == len(rollouts)
    episodes: dict[tuple[str, int, int], list[Any]] = {}
    for line in rollouts:
        episodes.setdefault((group_of_episode(line), line["index"], line["attempt"]), []).append(line)
    for members in episodes.values():
        assert [line["seat"]["name"] for line in members] == ["bob", "cy", "ann"]
        assert len({line["state"] for line in members}) == 1, "what fails one fails all"
    scored = {place: members for place, members in episodes.items() if members[0]["score"] is not None}
    assert len({place[:2] for place in scored}) == len(scored), "each episode once"
    assert len({(line["group"], line["layer"]) for line in groups}) == len(groups) == 120
    assert {tuple(line["seats"]) for line in groups} == {("ann", "ann"), ("bob", "bob")}
    scores = {
        f"{group}-{index}@{line['seat']['name']}": line["score"]
        for (group, index, _), members in scored.items()
        for line in members
    }
    for line in groups:
        assert line["scores"] == [scores[f"{line['group']}-{index}@{line['seats'][index]}"] for index in range(2)]


@pytest.mark.slow
@pytest.mark.by_turns(2, 1)
@pytest.mark.timeout(600)
async def test_evaluate_ends_with_the_numbers_of_a_run_that_nothing_disturbed(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    (tmp_path / "rough").mkdir()
    async with FaultyModel(faults=0.0, latency=0.0) as model:
        write_spec(tmp_path / "calm", model.url, evaluation=True, rows=ROWS)
        async with lives(tmp_path / "calm") as program:
            pid = await program.start("run", "spec.yaml", "evaluate", "--out", "run", "--quiet")
            assert await program.end(pid) == 0
    async with FaultyModel(faults=FAULTY) as model:
        write_spec(tmp_path / "rough", model.url, evaluation=True, rows=ROWS)
        allowed = await with_kills(tmp_path / "rough", model, "evaluate")
    calm, rough = (
        json.loads((tmp_path / way / "run" / "metrics.json").read_text())["results"] for way in ("calm", "rough")
    )
    assert calm == rough
    assert {"eval/pass@4", "eval/pass^4", "eval/reward/even"} <= set(rough["all"])
    check_rollouts(lines(tmp_path / "rough" / "run" / "rollouts.jsonl"))  # type: ignore[arg-type]
    samples = [
        [(sample["id"], sample["score"]) for sample in lines(tmp_path / way / "run" / "samples.jsonl")] for way in WAYS
    ]
    assert [(str(name).partition("r")[0], score) for name, score in samples[1]] == samples[0]
    assert repeated(model) <= allowed
