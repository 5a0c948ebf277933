"""`on_stop: {retries_exhausted: worst}`: a member that is given up stays in its group, in every file and trainer."""

from __future__ import annotations

import json
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

import hermes_rl
from hermes_rl.analysis.record import RunRecord
from hermes_rl.errors import SpecError, UserError
from hermes_rl.integrations.common import require_own_baseline
from hermes_rl.runs.process import ProcessSummary, run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import load_spec, parse_spec
from hermes_rl.spec.model import Spec
from tests.env.test_token_exact import tokenizer_folder

TEXT = """
name: lossy
dataset: {{items: [{{q: one}}, {{q: two}}]}}
prompt: {{user: "{{{{ q }}}}"}}
toolsets: [todo]
solution:
  turns:
    - {{say: "<think>\\nhm\\n</think>\\n\\nfirst", tools: [{{name: todo, args: {{todos: []}}}}]}}
    - {{say: "the answer is 7"}}
rewards: {{vetoed: {{fn: "vetoed.py:vetoed", isolate: none, range: [0, 9]}}}}
on_stop: {{retries_exhausted: {lost}}}
servers: {{policy: {{type: scripted, tokenizer: "{tokenizer}", model: m}}}}
process: {{groups: 2, group_size: 3, concurrency: 1, format: sft}}
"""
VETOED = """
import re
from pathlib import Path
from hermes_rl.errors import JudgeFailure

def vetoed(result, ctx):
    member = int(re.search(r"-(\\d)(r\\d)?(?!.*-)", ctx.task_id)[1])
    if member == int(Path(__file__).with_name("vetoes").read_text()):
        raise JudgeFailure("it cannot be graded")
    return float(member)
"""


def spec_of(folder: Path, lost: str, vetoes: int = 1) -> Spec:
    (folder / "vetoed.py").write_text(VETOED)
    (folder / "vetoes").write_text(str(vetoes))
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        tokenizer_folder(tokenizer, keeps_thinking=False)
    (folder / "spec.yaml").write_text(TEXT.format(lost=lost, tokenizer=tokenizer))
    return load_spec(folder / "spec.yaml")


async def play(folder: Path, lost: str = "worst", vetoes: int = 1) -> tuple[ProcessSummary, list[dict[str, Any]]]:
    launch = RunOptions("process", folder / "run", progress=Progress(quiet=True))
    summary, directory = await run_process(spec_of(folder, lost, vetoes), launch)
    return summary, [json.loads(line) for line in (directory.path / "groups.jsonl").read_text().splitlines()]


async def test_member_with_exhausted_retries_is_masked_and_scored_as_the_worst(tmp_path: Path) -> None:
    summary, lines = await play(tmp_path)
    assert (summary.written, summary.attempts, [line["scores"] for line in lines[::2]]) == (
        2,
        10,
        [[0.0, 0.0, 2.0]] * 2,
    )
    for line in lines:
        assert line["provenance"]["exact"]
        assert set(line["masks"][1]) == {-100}
        assert len(line["tokens"][1]) == 1
        assert line["overrides"][1] == {"set_advantage_to_zero": True}
    recorded = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    lost = [line for line in recorded if line["state"] == "retries_exhausted"]
    assert [(line["score"], line["attempt"], line["stop_reason"]) for line in lost] == [(None, 2, "judge_failure")] * 2
    assert all("it cannot be graded" in line["error"] for line in lost)
    told = json.loads((tmp_path / "run/run.json").read_text())["failure_rates"]
    assert told["members"] == {"ended": 6, "retries_exhausted": 2, "kept_as_worst": 2}
    assert {row["retries_exhausted"] for row in told["rows"]} == {1}
    assert (
        "2 of 6 members of groups had no retries left and 2 of them count as the worst of their group"
        in summary.failure_summary
    )
    trained = [json.loads(line) for line in (tmp_path / "run/sft.jsonl").read_text().splitlines()]
    assert {row["score"] for row in trained} == {0.0, 2.0}
    record = RunRecord(tmp_path / "run")
    record.refresh()
    assert sum(one.state == "retries_exhausted" for one in record.counting()) == 2


async def test_resumed_run_keeps_members_with_exhausted_retries(tmp_path: Path) -> None:
    _, lines = await play(tmp_path)
    again, same = await play(tmp_path)
    assert (again.existing, again.attempts, same) == (2, 0, lines)
    (tmp_path / "run/groups.jsonl").write_text(json.dumps(lines[0]) + "\n")
    mended, made = await play(tmp_path)
    in_order = partial(sorted, key=itemgetter("group"))  # groups are written as they end
    assert (mended.attempts, in_order(made)) == (0, in_order(lines)), "made from the rollouts"


async def test_members_with_exhausted_retries_run_again_if_no_longer_retained(tmp_path: Path) -> None:
    await play(tmp_path)
    changed, lines = await play(tmp_path, "drop", vetoes=9)
    assert all(len(line["scores"]) == 3 and None not in line["scores"] for line in lines)
    recorded = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    assert "retries_exhausted" not in {line["state"] for line in recorded}
    assert changed.attempts > 0


async def test_groups_of_the_python_api_count_lost_members(tmp_path: Path) -> None:
    async with hermes_rl.open_env(spec_of(tmp_path, "worst")) as env:
        (row, *_) = env.rows()
        group = await env.run_group(row, 3)
        assert group.dropped is None
        assert len(group.scores) == 3
        (lost,) = [one for one in group.rollouts if one.score is None]
        assert group.scores[lost.key.index] == min(group.scores)
        assert group.advantages()[lost.key.index] is None
        with pytest.raises(UserError, match=r"on_stop\.retries_exhausted is worst, and SkyRL compares"):
            require_own_baseline(env, "SkyRL")


@pytest.mark.parametrize(
    ("stop_reasons", "problem"),
    [
        ("{retries_exhausted: mask}", "a rollout whose retries are exhausted has no score: expected drop or worst"),
        ("{retries_exhausted: 0}", "expected drop or worst"),
        ("{max_turns: worst}", "`worst` is for `retries_exhausted`"),
        ("{sandbox_failure: worst}", "`worst` is for `retries_exhausted`"),
        ("{retry_exhausted: drop}", "did you mean `retries_exhausted`"),
    ],
)
def test_retries_exhausted_accepts_only_drop_or_worst(stop_reasons: str, problem: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse_spec(f"{{dataset: {{items: [{{q: 1}}]}}, prompt: {{user: x}}, on_stop: {stop_reasons}}}")
    assert problem in str(raised.value)
