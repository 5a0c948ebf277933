"""What went wrong in a run: the cause that cost the most points is named first, with the rollouts that show it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.analysis.findings import RunFinding, Scoring, find, findings_of, reason_of, to_read_first
from hermes_rl.analysis.record import RunRecord
from hermes_rl.analysis.report import write_report_or_say
from hermes_rl.view.query import RolloutQuery
from tests.analysis.recorded import recorded, write_run
from tests.commands import hermes

WEIGHTS = {"solved": 0.7, "cites": 0.3, "allowed": None}
GRADING = {
    "scoring": {
        "weightings": [
            {"name": name, "weight": weight or 1.0, "gate": weight is None} for name, weight in WEIGHTS.items()
        ]
    }
}
LEVELS = ("easy", "medium", "hard")


class Generated:
    """A run of 18 rows in 4 epochs of 4 rollouts, with rows of different difficulty and everyday faults."""

    def __init__(self, folder: Path, seed: int, fault: Callable[[random.Random, dict[str, Any]], None]) -> None:
        chance = random.Random(seed)
        lines = [
            self._line(chance, f"row-{row}", row, epoch, index, fault)
            for epoch in range(4)
            for row in range(18)
            for index in range(4)
        ]
        self.record = RunRecord(write_run(folder, lines, mode="process", grading=GRADING))
        (folder / "spec.yaml").write_text("name: asking\nevaluate: {success_threshold: 0.9}\n")
        self.record.refresh()

    @staticmethod
    def _line(
        chance: random.Random, key: str, row: int, epoch: int, index: int, fault: Callable[..., None]
    ) -> dict[str, Any]:
        made = {
            "row": row, "epoch": epoch, "level": LEVELS[row % 3], "solved": 0.85 - 0.12 * (row % 3), "cites": 0.8,
            "allowed": 0.99, "stop": "finished", "errors": 0, "topic": f"topic {row % 5}",
        }  # fmt: skip
        if chance.random() < 0.04:
            made |= {"stop": "max_turns", "solved": 0.1}
        if chance.random() < 0.05:
            made["errors"] = 1  # of three calls, without an effect
        fault(chance, made)
        rewards = {name: float(chance.random() < made[name]) for name in WEIGHTS}
        score = (0.7 * rewards["solved"] + 0.3 * rewards["cites"]) * rewards["allowed"]
        line = recorded(key, index, score, size=4)
        line |= {"id": f"{key}:{epoch}-{index}", "group": f"{key}:{epoch}", "epoch": epoch, "stop_reason": made["stop"]}
        line["rewards"] = {name: {"value": value, "reason": f"{name} is {value}"} for name, value in rewards.items()}
        line["tool_calls"] = [{"turn": 1, "id": f"c{call}", "name": "search", "seconds": 0.1} for call in range(3)]
        line["tool_errors"] = [
            {"turn": 1, "tool_name": "search", "arguments": "{}", "error": "timeout", "tool_result": ""}
        ] * made["errors"]
        if index == 0:
            line["row"] = {"question": key, "level": made["level"], "topic": made["topic"], "answer": str(row)}
        return line


def tool(chance: random.Random, made: dict[str, Any]) -> None:
    if chance.random() < 0.35:
        made |= {"errors": 2, "solved": 0.25, "cites": 0.4}


def category(chance: random.Random, made: dict[str, Any]) -> None:
    if made["level"] == "hard":
        made |= {"solved": 0.0}


def reward(chance: random.Random, made: dict[str, Any]) -> None:
    if made["epoch"] >= 2:
        made["solved"] *= 0.5


def gate(chance: random.Random, made: dict[str, Any]) -> None:
    made["allowed"] = 0.7


def timeout(chance: random.Random, made: dict[str, Any]) -> None:
    if chance.random() < 0.3:
        made |= {"stop": "timeout", "solved": 0.05, "cites": 0.1}


CAUSES = {
    tool: ("tool", "search"),
    category: ("category", "level=hard"),
    reward: ("drop", "solved"),
    gate: ("gate", "allowed"),
    timeout: ("stop_reason", "timeout"),
}


def test_findings_name_the_known_cause_first_in_18_of_20_runs(tmp_path: Path) -> None:
    named = []
    for seed in range(4):
        for fault, cause in CAUSES.items():
            found = findings_of(Generated(tmp_path / f"{fault.__name__}-{seed}", seed, fault).record)
            named.append((found[0].kind, found[0].subject) == cause)
            assert [finding.cost for finding in found] == sorted((each.cost for each in found), reverse=True)
    assert len(named) == 20 and sum(named) >= 18


@pytest.mark.parametrize("fault", CAUSES)
def test_finding_filter_selects_its_rollouts(tmp_path: Path, fault: Callable[..., None]) -> None:
    record = Generated(tmp_path / "run", 11, fault).record
    for finding in findings_of(record):
        query = RolloutQuery.from_parameters(dict(finding.filter))
        chosen = {record.rollouts[place].id for place in query.chosen(record)}
        assert finding.example in chosen
        assert len(chosen) >= finding.rollouts


def test_findings_of_a_run_without_a_fault_are_small(tmp_path: Path) -> None:
    for seed in range(5):
        found = findings_of(Generated(tmp_path / f"calm-{seed}", seed, lambda chance, made: None).record)
        assert not [each for each in found if each.cost > 0.05], found


def summaries(lines: list[dict[str, Any]], folder: Path) -> RunRecord:
    record = RunRecord(write_run(folder, lines))
    record.refresh()
    return record


def first(record: RunRecord, **scoring: Any) -> list[RunFinding]:
    return find(list(record.counting()), Scoring(**scoring), record.categories, str)


def test_findings_call_no_row_unsolved_after_one_rollout(tmp_path: Path) -> None:
    lines = [recorded(f"row {row}", 0, float(row % 2)) for row in range(40)]
    kinds = [finding.kind for finding in first(summaries(lines, tmp_path / "run"))]
    assert kinds == ["reward"]


def test_findings_do_not_blame_a_tool_for_hard_rows(tmp_path: Path) -> None:
    lines = []
    for row in range(12):
        for index in range(8):
            line = recorded(f"row {row}", index, float(index % 4 == 0) if row < 6 else 1.0, size=8)
            if row < 6 and index % 2:  # a call fails in every other rollout of the hard rows, and changes nothing
                line["tool_errors"] = [{"turn": 1, "tool_name": "terminal", "arguments": "", "error": "no"}]
                line["score"] = float(index % 4 == 1)
            lines.append(line)
    assert [each.cost for each in first(summaries(lines, tmp_path / "run")) if each.kind == "tool"] == []


def test_findings_are_empty_without_graded_rollouts(tmp_path: Path) -> None:
    assert first(summaries([recorded("a", score=None)], tmp_path / "run")) == []
    assert first(summaries([], tmp_path / "empty")) == []


def test_categories_exclude_expected_answers(tmp_path: Path) -> None:
    lines = [recorded(f"row {row}", 0, float(row % 2)) for row in range(6)]
    for place, line in enumerate(lines):
        line["row"] = {"question": "q", "answer": str(place % 2), "label": str(place % 2), "half": place % 2}
    assert summaries(lines, tmp_path / "run").categories["row 1"] == {"question": "q", "half": "1"}


def test_rollouts_to_read_first_are_of_different_kinds(tmp_path: Path) -> None:
    lines = [recorded(f"row {row}", 0, 0.5) for row in range(9)]
    for place, line in enumerate(lines):
        line["rewards"] = {"a": {"value": place % 2, "reason": "no a"}, "b": {"value": 1 - place % 2, "reason": "no b"}}
        line["stop_reason"] = "finished" if place < 6 else "max_turns"
    record = summaries(lines, tmp_path / "run")
    chosen = to_read_first(record.rollouts, Scoring())
    reasons = {reason_of(rollout, Scoring()) for rollout in chosen}
    assert len({(rollout.stop_reason, reason_of(rollout, Scoring())) for rollout in chosen}) == len(chosen) == 4
    assert reasons == {"a: no a", "b: no b"}


def test_show_and_run_json_have_the_findings(tmp_path: Path) -> None:
    run = Generated(tmp_path / "run", 3, timeout).record.path
    told = hermes("show", str(run), cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    end = told.stdout[told.stdout.rindex("what went wrong") :]
    assert "stopped with timeout" in end.splitlines()[1]
    write_report_or_say(run, print)
    entries = json.loads((run / "run.json").read_text())["findings"]
    assert (entries[0]["kind"], entries[0]["subject"]) == ("stop_reason", "timeout")
    assert entries[0]["filter"] == {"stop_reason": "timeout"}
    shown = json.loads(hermes("show", str(run), "--json", cwd=tmp_path).stdout)
    assert shown["findings"][0]["text"] == entries[0]["text"]
