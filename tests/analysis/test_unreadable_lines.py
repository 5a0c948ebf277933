"""A line that cannot be read costs its rollout alone, in everything that reads a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hermes_rl.analysis.record import RunRecord
from hermes_rl.cli.main import status
from hermes_rl.runs.journal import write_atomically
from hermes_rl.values import write_message
from tests.analysis.recorded import recorded, write_run

COMPACT, SPACED = (",", ":"), (", ", ": ")
DAMAGES: dict[str, Callable[[str], str]] = {
    "a conversation that is no JSON": lambda line: line.replace("[{", "[{{", 1),
    "a message that is a number": lambda line: line.replace("[{", "[5, {", 1),
    "a conversation that is nested": lambda line: line.replace("[{", "[" + "[" * 3000 + "]" * 3000 + ", {", 1),
    "a message without a role": lambda line: line.replace('"role"', '"rule"', 1),
    "half of a character": lambda line: line.replace("What is", "What \udcff is", 1),
}


def damaged(folder: Path, damage: Callable[[str], str], separators: tuple[str, str]) -> Path:
    """Return a run of three rows, of which the middle one's line is damaged."""
    run = write_run(folder / "run", [recorded(row) for row in "abc"])
    lines = [json.dumps(recorded(row), separators=separators) for row in "abc"]
    assert damage(lines[1]) != lines[1]
    lines[1] = damage(lines[1])
    text = "".join(f"{line}\n" for line in lines)
    (run / "rollouts.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    return run


@pytest.mark.parametrize("separators", [COMPACT, SPACED], ids=["compact", "spaced"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_line_costs_its_rollout_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str, separators: tuple[str, str]
) -> None:
    run = damaged(tmp_path, DAMAGES[damage], separators)
    named = f"skipped unreadable records of {run}/rollouts.jsonl: 1 rollout: b:0-0 ("
    assert status(["report", str(run)]) == 0
    assert named in capsys.readouterr().err
    assert "b:0-0 (" in (run / "report.html").read_text() and "What is c?" in (run / "report.html").read_text()
    assert status(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    assert named in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a:0-0.json", "c:0-0.json"]
    other = write_run(tmp_path / "other", [recorded(row, score=0.5) for row in "abc"])
    for command in (
        ["audit", str(run)],
        ["show", str(run), "--no-pager"],
        ["compare", str(run), str(other), "--no-pager"],
    ):
        assert status(command) == 0, command
    assert status(["show", str(run), "b:0-0"]) == 2
    assert "the line of rollout 'b:0-0' cannot be read" in capsys.readouterr().err


def test_push_drops_a_damaged_record_and_reports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = damaged(tmp_path, DAMAGES["a message that is a number"], COMPACT)
    assert status(["push", str(run), str(tmp_path / "pushed")]) == 0
    assert "1 rollout: b:0-0 (it has 'messages' in a form that no run writes)" in capsys.readouterr().err


def test_record_that_is_not_json_is_reported_by_line_number(tmp_path: Path) -> None:
    run = damaged(tmp_path, lambda line: line[:40], COMPACT)
    record = RunRecord(run)
    record.refresh()
    assert record.excluded.endswith("rollouts.jsonl: 1 line: number 2")
    assert [rollout.id for rollout in record.rollouts] == ["a:0-0", "c:0-0"]


def test_conversation_is_found_in_a_line_as_runs_write_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [])
    write_atomically(run / "rollouts.jsonl", write_message(recorded("a")) + b"\n")
    record = RunRecord(run)
    record.refresh()
    assert record.messages("a:0-0") == recorded("a")["messages"]
