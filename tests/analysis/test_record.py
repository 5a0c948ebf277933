"""A run directory is read while it grows, whatever is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.analysis.record import RunRecord, find_runs, summary_of
from hermes_rl.errors import UserError
from tests.analysis.recorded import recorded, write_run


def test_a_summary_has_what_the_line_says() -> None:
    line = recorded("2+2", 0, 0.5)
    found = summary_of(json.dumps(line).encode() + b"\n", 7)
    assert (found.id, found.row_key, found.group, found.index) == ("2+2:0-0", "2+2", "2+2:0", 0)
    assert (found.state, found.score, found.rewards, found.stop_reason) == ("scored", 0.5, {"right": 0.5}, "finished")
    assert (found.turns, found.calls, found.prompt_tokens, found.completion_tokens) == (2, 1, 120, 12)
    assert found.seconds["total"] == 1.5
    assert found.begin == 7


def test_a_line_is_read_by_its_ends_alone() -> None:
    line = json.dumps(recorded("2+2"))
    begin, end = line.index('"messages": ['), line.index('], "turns": ')
    broken = line[: begin + len('"messages": [')] + "\x00 no JSON " + line[end:]
    assert summary_of(broken.encode(), 0) == summary_of(line.encode(), 0)


@pytest.mark.parametrize(
    "text", ['"], "turns": 3, "usage": {', ', "messages": [', '], "turns": ', ', "sequences": null', "\u2028"]
)
def test_what_a_model_writes_moves_no_field(text: str) -> None:
    line = recorded("2+2", text=text)
    assert summary_of(json.dumps(line, ensure_ascii=False).encode(), 0).turns == 2


def test_a_run_is_read_on_while_it_grows(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [recorded("a"), recorded("b", score=None)])
    record = RunRecord(run)
    assert record.refresh(1) == 1
    assert record.refresh() == 1
    with (run / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps(recorded("c"))[:40])
        file.flush()
        assert record.refresh() == 0
        file.write(json.dumps(recorded("c"))[40:] + "\n")
    assert record.refresh() == 1
    with (run / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps(recorded("d")))  # its newline comes later
        file.flush()
        assert (record.refresh(), record.refresh()) == (1, 0)
        file.write("\n" + json.dumps(recorded("e")) + "\n")
    assert (record.refresh(), record.torn) == (1, 0)
    assert [one.row_key for one in record.rollouts] == ["a", "b", "c", "d", "e"]
    assert record.line("c:0-0")["messages"][-1]["content"] == "It is done."
    assert record.line_of_group("c:0-0")["row"] == {"question": "What is c?", "answer": "c"}


@pytest.mark.parametrize(
    "change",
    [{"score": "1"}, {"rewards": {"right": {"value": "x"}}}, {"timings": {"total": None, "tools": "y"}}, {"group": 7}],
)
def test_inconsistent_record_is_counted_and_skipped(tmp_path: Path, change: dict[str, Any]) -> None:
    run = write_run(tmp_path / "run", [{**recorded("a"), **change}, {**recorded("b"), "state": "of another version"}])
    record = RunRecord(run)
    assert record.refresh() == 2
    assert record.torn == 1
    assert [one.final for one in record.counting()] == [False]


def test_replaced_rollouts_file_is_read_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [recorded("a"), recorded("b")])
    record = RunRecord(run)
    record.refresh()
    other = run / "other"
    other.write_text(json.dumps(recorded("a", score=0.0)) + "\n" + json.dumps(recorded("b", score=0.0)) + "\n")
    other.replace(run / "rollouts.jsonl")
    assert record.refresh() == 2
    assert [one.score for one in record.rollouts] == [0.0, 0.0]


def test_the_rollout_that_counts_is_the_last_attempt(tmp_path: Path) -> None:
    lines = [recorded("a", 0, None, size=2), recorded("a", 1, 1.0, size=2), recorded("a", 0, 0.0, size=2, attempt=1)]
    record = RunRecord(write_run(tmp_path / "run", lines))
    record.refresh()
    assert [(one.index, one.score) for one in record.members("a:0")] == [(0, 0.0), (1, 1.0)]
    assert len(record.rollouts) == 3


def test_a_line_that_cannot_be_read_is_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [recorded("a")])
    with (run / "rollouts.jsonl").open("a") as file:
        file.write('{"id": 3}\nno JSON\n[]\n' + json.dumps(recorded("b")) + "\n")
    record = RunRecord(run)
    record.refresh()
    assert (len(record.rollouts), record.torn) == (2, 3)


def test_error_for_a_path_without_a_run_names_the_runs_found(tmp_path: Path) -> None:
    run = write_run(tmp_path / "outputs" / "asking" / "evaluate-1", [])
    with pytest.raises(UserError, match=r"is not a run directory.*evaluate-1"):
        RunRecord(tmp_path)
    assert RunRecord(run / "rollouts.jsonl").path == run
    (spec := tmp_path / "asking.yaml").write_text("")
    with pytest.raises(UserError) as caught:
        RunRecord(spec)
    assert str(caught.value) == f"{spec} is a file; a run is a directory: {run}"
    assert list(find_runs(tmp_path)) == [run]
    with pytest.raises(UserError, match="no rollout 'x'"):
        RunRecord(run).summary("x")


def test_files_of_a_run_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [recorded("a")])
    (run / "spec.yaml").write_bytes(b"name: \xff")
    with pytest.raises(UserError, match=r"spec.yaml: is not UTF-8"):
        _ = RunRecord(run).spec_text
    (run / "rollouts.jsonl").unlink()
    (run / "rollouts.jsonl").mkdir()
    with pytest.raises(UserError, match=r"rollouts.jsonl: is a directory"):
        RunRecord(run).refresh()


HIDDEN = {"tests": "def test_it(): assert the answer is 42", "question": "Which number is it?", "answer": "42"}
"""A row whose first sentence is a hidden test."""
EXAMPLES = [{"role": "user", "content": "An example?"}, {"role": "assistant", "content": "Yes."}]


@pytest.mark.parametrize(
    ("key", "label"),
    [("task-17", "task-17"), ("d" * 16, "What is that?"), (f"{'d' * 16}-2", "What is that?")],
    ids=["dataset.key", "no dataset.key", "repeated content"],
)
def test_row_is_named_by_its_key_or_its_prompt_and_by_no_column(tmp_path: Path, key: str, label: str) -> None:
    line = {**recorded(key), "row": HIDDEN}
    line["messages"][0]["content"] = "What is that?"
    record = RunRecord(write_run(tmp_path / "run", [line]))
    record.refresh()
    assert record.label(key) == label
    assert record.previews([key], 50)[key] == {"label": label, "question": "What is that?"}


def test_prompt_that_names_a_row_is_the_question_after_examples(tmp_path: Path) -> None:
    line = recorded("d" * 16)
    line |= {"messages": [*EXAMPLES, *line["messages"]], "prompt_length": line["prompt_length"] + 2}
    record = RunRecord(write_run(tmp_path / "run", [line]))
    record.refresh()
    assert record.label("d" * 16) == f"What is {'d' * 16}?"
