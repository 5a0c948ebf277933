"""`evaluate.group_by` reports metrics for each value of a column."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hermes_rl.cli.main import status
from hermes_rl.cli.run import evaluation_lines
from hermes_rl.errors import UserError
from hermes_rl.runs.evaluate import run_evaluate
from hermes_rl.runs.metrics import metrics_by, row_of
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.regrade import regrade
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import parse_spec
from hermes_rl.spec.model import Spec

TEXT = """
name: told-by
dataset:
  items:
    - {q: one, answer: "1", category: easy, level: 1}
    - {q: two, answer: "2", category: easy, level: 2}
    - {q: three, answer: other, category: hard, level: 2}
  eval: only
prompt: {user: "{{ q }}"}
solution: {turns: [{say: "{{ 1 if q == 'one' else 2 }}"}]}
rewards: {right: {fn: exact_match, args: {target: "{{ answer }}"}}}
servers: {policy: {type: scripted}}
evaluate: {rollouts: 2, group_by: [COLUMNS]}
"""


def spec_by(columns: str) -> Spec:
    return parse_spec(TEXT.replace("COLUMNS", columns))


def launch(folder: Path) -> RunOptions:
    return RunOptions("evaluate", folder, progress=Progress(quiet=True))


async def test_metrics_by_column_are_consistent_with_the_overall_metrics(tmp_path: Path) -> None:
    found, _ = await run_evaluate(spec_by("category, level"), launch(tmp_path / "run"))
    told = {name.removeprefix("eval/by/"): value for name, value in found.metrics.items() if "/by/" in name}
    assert (told["category/easy/mean_reward"], told["category/hard/mean_reward"]) == (1.0, 0.0)
    assert (told["level/1/mean_reward"], told["level/2/mean_reward"]) == (1.0, 0.5)
    assert (told["category/easy/pass@2"], told["category/hard/pass^2"]) == (1.0, 0.0)
    assert (told["category/easy/rows"], told["category/hard/rows"]) == (2.0, 1.0)
    assert found.metrics["eval/mean_reward"] == pytest.approx(2 / 3)
    assert "by/level/2/mean_reward 0.5000" in evaluation_lines(found)
    assert evaluation_lines(found)[0] == "mean reward 0.6667, 95 % interval 0.0438 to 0.9887"


def test_a_value_without_a_grade_has_counts_alone() -> None:
    line = {"score": None, "stop_reason": "server_failure", "error": "down", "state": "failed", "usage": {}, "turns": 0}
    line |= {"rewards": {}, "tool_calls": [], "tool_errors": [], "policy": None}
    graded = row_of([line | {"score": 1.0, "stop_reason": "finished", "state": "scored"}])
    told = metrics_by([graded, row_of([line])], "category", ["easy", "hard"], 1, 1.0)
    assert {name: value for name, value in told.items() if "/hard/" in name} == {
        "eval/by/category/hard/rows": 1.0,
        "eval/by/category/hard/ungraded": 1.0,
        "eval/by/category/hard/pass_count/1": 0.0,
    }
    assert told["eval/by/category/easy/mean_reward"] == 1.0


async def test_resume_and_regrade_report_the_same_metrics(tmp_path: Path) -> None:
    first, directory = await run_evaluate(spec_by("category"), launch(tmp_path / "run"))
    again, _ = await run_evaluate(spec_by("category"), launch(tmp_path / "run"))
    assert again.metrics == first.metrics
    (directory.path / "metrics.json").unlink()
    await regrade(directory.path, progress=Progress(quiet=True))
    assert json.loads((directory.path / "metrics.json").read_text())["results"]["all"] == first.metrics


async def test_a_column_that_the_rows_lack_is_found_by_validate_and_by_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_by("categry")
    told = "there is no column `categry`; did you mean `category`"
    (tmp_path / "spec.yaml").write_text(TEXT.replace("COLUMNS", "categry"))
    assert status(["validate", str(tmp_path / "spec.yaml")]) == 2
    said = capsys.readouterr()
    assert told in said.out + said.err
    with pytest.raises(UserError, match=r"row .* has no column `categry`; did you mean `category`"):
        await run_evaluate(spec, launch(tmp_path / "run"))
