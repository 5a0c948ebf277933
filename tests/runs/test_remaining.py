"""Dry run, sets of runs, store and modes agree about the remaining rollouts, whatever was killed."""

from __future__ import annotations

import asyncio
import json
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hermes_rl.analysis.dry_run import dry_run, nothing_left
from hermes_rl.analysis.record import RunRecord
from hermes_rl.analysis.summary import summarise
from hermes_rl.rollouts.rollout import RolloutState
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.evaluate import run_evaluate
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.remaining import left_to_play
from hermes_rl.runs.setup import RunOptions
from hermes_rl.runs.store import ROLLOUTS, WAITING, RolloutStore
from hermes_rl.spec.load import parse_spec
from hermes_rl.spec.model import Mode
from tests.thorough import examples

SPEC = """
name: left
dataset: {{generator: "rows.py:rows", limit: {rows}, eval: {eval}}}
prompt: {{user: "{{{{ q }}}}"}}
rewards: {{{reward}}}
solution: {{turns: [{{say: "{{{{ q }}}}"}}]}}
servers: {{policy: {{type: scripted, error_rate: 0.5}}}}
agent: {{temperature: 1.0}}
evaluate: {{rollouts: {size}, agent: {{temperature: 1.0}}}}
process: {{groups: {rows}, group_size: {size}}}
"""
REWARDS = {False: 'exact_match: {args: {target: "{{ q }}"}}', True: 'ranks: {fn: "rows.py:ranks"}'}
CODE = """
def rows(*, seed, split):
    for number in range(8):
        yield {"q": f"row {number}"}

def ranks(group):
    return [float(place) for place, _ in enumerate(group)]
"""
LIVES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.floats(0, 1)), min_size=2, max_size=4)
"""Rows that are asked for, rollouts of each, and how much of its record a start of the run leaves behind."""


def played(folder: Path) -> set[str]:
    """Return the rollouts of all whole lines, one without its newline included, and those that wait for their group."""
    texts = [file.read_text("utf-8") for name in (ROLLOUTS, WAITING) if (file := folder / name).exists()]
    ids = set[str]()
    for line in "\n".join(texts).split("\n"):
        with suppress(ValueError):  # a torn line
            ids.add(json.loads(line)["id"])
    return ids


async def live(
    folder: Path, mode: Mode, compared: bool, lives: list[tuple[int, int, float]], *, newline_only: bool
) -> None:
    (folder / "rows.py").write_text(CODE)
    launch = RunOptions(mode, folder / "run", environ={}, progress=Progress(quiet=True))
    file = folder / "run" / ROLLOUTS
    for rows, size, left_behind in lives:
        # An evaluation may ask for more rollouts, or fewer. What is written, or was compared, is of one size.
        size = lives[0][1] if mode == "process" or compared else size
        text = SPEC.format(
            rows=rows, size=size, reward=REWARDS[compared], eval="only" if mode == "evaluate" else "null"
        )
        spec = parse_spec(text, folder=folder)
        foretold = await dry_run(spec, launch)
        before = played(file.parent)
        graded = not foretold.rescored and not foretold.rejudged  # members are compared with as many others
        assert await nothing_left(spec, launch) == (foretold.exists and foretold.play == 0 and graded)
        await (run_evaluate(spec, launch) if mode == "evaluate" else run_process(spec, launch))
        assert len(played(file.parent) - before) == foretold.play
        assert (await dry_run(spec, launch)).play == 0
        assert await nothing_left(spec, launch)
        store = RolloutStore(RunDirectory(folder / "run"), size, compared=compared)
        try:
            assert sum(map(store.complete, store.groups)) >= rows
        finally:
            store.close()
        if mode == "evaluate":
            record = RunRecord(folder / "run")
            record.refresh()
            shown = summarise(record)
            results = json.loads((folder / "run" / "metrics.json").read_text())["results"]["all"]
            if shown.rows == rows:  # rows beyond the limit are shown
                assert (shown.rollouts, shown.score.mean) == (rows * size, pytest.approx(results["eval/mean_reward"]))
            assert len((folder / "run" / "samples.jsonl").read_text().splitlines()) == rows * size
        end = int(left_behind * file.stat().st_size)
        if newline_only:
            end = file.read_bytes().find(b"\n", max(0, end - 1))
        with file.open("r+b") as torn:
            torn.truncate(end)


def play(mode: Mode, compared: bool, lives: list[tuple[int, int, float]], *, newline_only: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(live(Path(folder), mode, compared, lives, newline_only=newline_only))


@pytest.mark.parametrize("mode", ["evaluate", "process"])
@pytest.mark.parametrize("compared", [False, True])
def test_remaining_estimate_matches_the_rollouts_that_run(mode: Mode, compared: bool) -> None:
    play(mode, compared, [(4, 4, 1.0), (5, 2, 0.5), (2, 3, 0.8), (5, 4, 1.0)])


@pytest.mark.parametrize("mode", ["evaluate", "process"])
def test_record_without_newline_counts_as_complete(mode: Mode) -> None:
    play(mode, False, [(4, 3, 0.5), (4, 3, 0.3), (5, 3, 1.0)], newline_only=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=examples(40), deadline=None, phases=[Phase.generate])  # each example takes a second
@given(st.sampled_from(["evaluate", "process"]), st.booleans(), LIVES)
def test_remaining_estimate_matches_random_run_histories(
    mode: Mode, compared: bool, lives: list[tuple[int, int, float]]
) -> None:
    play(mode, compared, lives)


def test_members_that_an_earlier_start_asked_for_count_for_nothing() -> None:
    scored, failed, excluded = RolloutState.SCORED, RolloutState.FAILED, RolloutState.EXCLUDED
    assert left_to_play({0: scored, 1: scored, 2: failed}, 2, compared=False) == []
    assert left_to_play({2: scored, 1: failed}, 2, compared=False) == [0, 1]
    assert left_to_play({1: excluded}, 3, compared=False) == [0, 2]
    assert left_to_play({1: excluded}, 3, compared=True) == []
    assert left_to_play({3: excluded}, 3, compared=True) == [0, 1, 2]
