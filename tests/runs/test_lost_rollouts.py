"""Lost rollouts are counted by cause, row and policy, and a row that stands out is reported."""

from __future__ import annotations

import io
import json
from pathlib import Path

from hermes_rl.data.rows import Row
from hermes_rl.rollouts.rollout import Rollout, RolloutKey
from hermes_rl.runs.failure_rates import ENOUGH, FailureRates
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import load_spec
from hermes_rl.stop_reasons import StopReason

SPEC = """
dataset: {items: [{n: 1}, {n: 2}, {n: 3}, {n: 4}], key: n}
prompt: {user: "{{ n }}"}
rewards: {picky: {fn: "picky.py:picky", args: {n: "{{ n }}"}}}
solution: {turns: [{say: done}]}
servers: {policy: {type: scripted, error_rate: 0, model: m}}
process: {group_size: 1, groups: 12, concurrency: 1}
"""
PICKY = """
def picky(result, n):
    if str(n) == "2": raise ValueError("it cannot be graded")
    return 1.0
"""


def attempt(row: str, stop_reason: StopReason) -> Rollout:
    return Rollout(RolloutKey(Row(row, {}, 0, ""), "g", 0, 1), 0, stop_reason=stop_reason)


async def test_row_with_repeated_failures_is_reported_with_its_failure_rate(tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(PICKY)
    (tmp_path / "spec.yaml").write_text(SPEC)
    said = io.StringIO()
    spec = load_spec(str(tmp_path / "spec.yaml"))
    summary, directory = await run_process(spec, RunOptions("process", out=tmp_path / "out", progress=Progress(said)))
    lost = json.loads((directory.path / "run.json").read_text())["failure_rates"]
    assert lost["causes"] == {"reward_failure": 6}
    assert lost["attempts"] == 12 + 6
    assert lost["failure_rate"] == round(6 / 18, 4)
    assert [(row["row_key"], row["attempts"], row["failure_rate"]) for row in lost["rows"]] == [("2", 6, 1.0)]
    assert sum(policy["attempts"] for policy in lost["policies"].values()) == 18
    assert "row 2 loses 100% of its rollouts (reward_failure: 6), the others 0%" in said.getvalue()
    assert "33.3% of the rollouts failed (reward_failure: 6)" in summary.failure_summary


def test_a_failure_that_all_rows_share_blames_none() -> None:
    losses = FailureRates()
    words = [losses.count(attempt(row, StopReason.SERVER_FAILURE)) for _ in range(ENOUGH) for row in "abc"]
    assert words == [None] * 3 * ENOUGH
    assert losses.all.failure_rate == 1.0


def test_failing_row_is_reported_once() -> None:
    losses = FailureRates()
    for _ in range(20):
        assert losses.count(attempt("good", StopReason.FINISHED)) is None
    told = [losses.count(attempt("bad", StopReason.SANDBOX_FAILURE)) for _ in range(3 * ENOUGH)]
    assert len([word for word in told if word]) == 1
    assert losses.by_row["bad"].attempts == 3 * ENOUGH
    assert "good" not in losses.by_row


def test_workers_that_died_are_not_blamed_on_the_agent() -> None:
    losses = FailureRates()
    for _ in range(20):
        losses.count(attempt("good", StopReason.FINISHED))
    told = list[str | None]()
    for _ in range(ENOUGH):
        lost = attempt("bad", StopReason.SANDBOX_FAILURE)
        lost.worker_died = True
        told.append(losses.count(lost))
    (word,) = filter(None, told)
    assert "loses 100% of its rollouts (worker_died: 6)" in word and "the workers that ran them died" in word
    assert "agent" not in word
    assert losses.by_row["bad"].causes == {"worker_died": ENOUGH}


def test_attempts_before_the_first_loss_count_too() -> None:
    losses = FailureRates()
    for stop_reason in (
        StopReason.FINISHED,
        StopReason.SANDBOX_KILLED,
        StopReason.CANCELLED,
        StopReason.STALE,
        StopReason.JUDGE_FAILURE,
    ):
        losses.count(attempt("a", stop_reason))
    assert losses.by_row["a"].record() == {"attempts": 3, "failure_rate": 0.3333, "causes": {"judge_failure": 1}}
