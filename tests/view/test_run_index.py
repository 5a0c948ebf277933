"""What a viewer keeps of runs is bounded, and a search goes on where it stopped."""

from __future__ import annotations

import json
import weakref
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.analysis.record import RunRecord
from hermes_rl.errors import UserError
from hermes_rl.view import query, run_index
from hermes_rl.view.query import RolloutQuery
from hermes_rl.view.run_index import RunIndex
from tests.analysis.recorded import recorded, write_run


def several(folder: Path, count: int, rollouts: int) -> RunIndex:
    for place in range(count):
        write_run(folder / f"run{place}", [recorded(f"{one}") for one in range(rollouts)])
    return RunIndex([folder])


def names(run_index: RunIndex) -> list[str]:
    while (found := run_index.runs())["reading"]:
        pass
    return [run["run"] for run in found["runs"]]


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[RunRecord]]:
    """All indexes that were made, of which some may be in memory."""
    made: list[weakref.ref[RunRecord]] = []

    class Noted(RunRecord):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            made.append(weakref.ref(self))

    monkeypatch.setattr(run_index, "RunRecord", Noted)
    return made


def kept(records: list[weakref.ref[RunRecord]]) -> list[str]:
    """The directories of the runs whose index is in memory."""
    return [record.path.name for made in records if (record := made()) is not None]


def test_the_indexes_of_runs_that_were_not_looked_at_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[weakref.ref[RunRecord]]
) -> None:
    monkeypatch.setattr(run_index, "MOST_INDEXED", 25)
    runs = several(tmp_path, 6, 10)
    for name in names(runs) * 2:
        assert runs.overview(name)[1]["rollouts"] == 10
        assert len(runs.rollouts(name, {})["rollouts"]) == 10
        assert len(kept(records)) <= 3
        assert name.rpartition("-")[0] in kept(records)
    assert [run["rollouts"] for run in runs.runs()["runs"]] == [10] * 6


def test_run_index_bounds_cached_sort_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[weakref.ref[array[int]]] = []
    chosen = RolloutQuery.chosen

    def noted(self: RolloutQuery, *arguments: Any) -> array[int]:
        order = chosen(self, *arguments)
        orders.append(weakref.ref(order))
        return order

    monkeypatch.setattr(RolloutQuery, "chosen", noted)
    runs = several(tmp_path, 1, 10)
    (name,) = names(runs)
    for place in range(3 * run_index.ORDERED):
        runs.rollouts(name, {"least": str(place / 100)})
    assert [order() is not None for order in orders].count(True) == run_index.ORDERED
    assert len(orders) == 3 * run_index.ORDERED


def test_large_run_is_listed_before_it_is_read_completely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "SLICE", 10)
    monkeypatch.setattr(run_index, "READING", 0.0)
    runs = several(tmp_path, 1, 35)
    (run,) = runs.runs()["runs"]
    read = []
    while True:
        _, found = runs.overview(run["run"])
        read.append(found["rollouts"])
        if found["read"] == 1:
            break
    assert read[0] == 10 and read[-1] == 35
    assert runs.rollout(run["run"], "34:0-0")["score"] == 1.0


def test_rollout_beyond_the_part_already_read_is_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "SLICE", 10)
    monkeypatch.setattr(run_index, "READING", 0.0)
    runs = several(tmp_path, 1, 50)
    (run,) = runs.runs()["runs"]
    assert runs.rollout(run["run"], "49:0-0")["row_key"] == "49"
    with pytest.raises(UserError, match="no rollout 'none'"):
        runs.rollout(run["run"], "none")


def test_long_search_continues_with_the_next_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "PATIENCE", 0.0)
    runs = several(tmp_path, 1, 20)
    (name,) = names(runs)
    found, cursor, asked = [], "", 0
    while cursor is not None:
        page = runs.rollouts(name, {"text": "what is 1", "cursor": cursor})
        found += [one["row_key"] for one in page["rollouts"]]
        cursor, asked = page["cursor"], asked + 1
    assert found == ["1", *map(str, range(10, 20))]
    assert asked > 10


@pytest.mark.parametrize("text", ["Ünïcode", 'with "quotes"', "two\nlines", "tab\there", "back\\slash", "\u2028"])
def test_text_search_matches_the_original_characters(tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path / "run", [recorded("a"), recorded("b", text=f"before {text} behind")])
    record = RunRecord(run)
    record.refresh()
    asked = RolloutQuery(text=text)
    places, _ = asked.page(record, asked.chosen(record), 0, 50)
    assert [record.rollouts[place].row_key for place in places] == ["b"]


def test_a_tool_that_failed_is_found_by_its_name(tmp_path: Path) -> None:
    line = recorded("a")
    line["tool_calls"].append({"turn": 1, "id": "c2", "name": "read_file", "seconds": 0.1, "error": "gone"})
    error = {"turn": 1, "tool_name": "read_file", "arguments": "{}", "error": "gone", "tool_result": "gone"}
    line["tool_errors"] = [error]
    record = RunRecord(write_run(tmp_path / "run", [line, recorded("b")]))
    record.refresh()
    assert record.rollouts[0].tools == (("read_file", 1, 1), ("terminal", 1, 0))
    for asked, count in (
        (RolloutQuery(tool="read_file", tool_errors=True), 1),
        (RolloutQuery(tool="terminal", tool_errors=True), 0),
    ):
        assert len(asked.chosen(record)) == count


def test_run_in_use_keeps_its_index_while_another_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[weakref.ref[RunRecord]]
) -> None:
    monkeypatch.setattr(run_index, "MOST_INDEXED", 0)
    runs = several(tmp_path, 2, 3)
    one, other = names(runs)
    shown_previews = run_index.shown_previews

    def meanwhile(record: RunRecord, *arguments: Any) -> Any:
        assert runs.overview(other)[1]["rollouts"] == 3
        return shown_previews(record, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run_index, "shown_previews", meanwhile)
        assert len(runs.rollouts(one, {})["rollouts"]) == 3
    assert kept(records) == [one.rpartition("-")[0]]
    made = len(records)
    runs.rollouts(one, {})
    assert len(records) == made, "it is not read again"
    runs.overview(other)
    assert kept(records) == [other.rpartition("-")[0]]


def test_requests_at_once_are_all_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "MOST_INDEXED", 0)
    runs = several(tmp_path, 3, 40)
    wanted = names(runs) * 10
    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda name: len(runs.rollouts(name, {})["rollouts"]), wanted)
        assert list(answers) == [40] * len(wanted)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("north", ["plain", "called"]),
        ("orth", ["plain", "broken", "called"]),
        ("a\nORTH", ["broken"]),
        ('the "gate"', ["called"]),
        ("two\nlines", ["called"]),
        ("\\north", []),
        ("prompt_length", []),
    ],
)
def test_a_search_reads_what_was_said_and_not_how_it_is_written(tmp_path: Path, text: str, rows: list[str]) -> None:
    called = recorded("called")
    called["messages"][1]["tool_calls"][0]["function"]["arguments"] = json.dumps(
        {"to": "far North", "why": 'the "gate"', "more": "two\nlines"}
    )
    lines = [recorded("plain", text="go north"), recorded("broken", text="a\north"), called]
    record = RunRecord(write_run(tmp_path / "run", lines))
    record.refresh()
    asked = RolloutQuery(text=text)
    places, _ = asked.page(record, asked.chosen(record), 0, 50)
    assert [record.rollouts[place].row_key for place in places] == rows


def test_lines_of_lists_name_the_row_and_the_answer(tmp_path: Path) -> None:
    lines = [recorded(str(row), size=2, index=index, text=f"It is {index}.") for row in range(2) for index in (1, 0)]
    for line in lines[1::2]:
        line["row"] = {"level": "hard", **line["row"]}
    runs = RunIndex([write_run(tmp_path / "run", lines)])
    (name,) = names(runs)
    listed = runs.rollouts(name, {})["rollouts"]
    assert [(one["label"], one["answer"]) for one in listed] == [
        ("0", "It is 1."), ("0", "It is 0."), ("1", "It is 1."), ("1", "It is 0."),
    ]  # fmt: skip
    rows = runs.rows(name, {})["rows"]
    assert [(row["label"], row["question"]) for row in rows] == [("0", "What is 0?"), ("1", "What is 1?")]


def test_a_line_without_a_conversation_or_a_row_is_listed_all_the_same(tmp_path: Path) -> None:
    silent, called, alone = recorded("a", score=None), recorded("b"), recorded("c", index=1, size=2)
    silent |= {"messages": [], "turns": 0, "row": None}
    del called["messages"][2:]
    runs = RunIndex([write_run(tmp_path / "run", [silent, called, alone])])
    listed = runs.rollouts(names(runs)[0], {})["rollouts"]
    assert [(one["label"], one["answer"]) for one in listed] == [
        ("a", ""), ("b", 'terminal {"command": "ls"}'), ("c", "It is done."),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        ({}, ["1", "2", "3", "4", "5"]),
        ({"failed": "1"}, ["2", "4"]),
        ({"sort": "score"}, ["2", "4", "1", "3", "5"]),
        ({"least": "0.6"}, ["1", "3", "5"]),
        ({"text": "what is 5"}, ["5"]),
        ({"backwards": "1"}, []),
        ({"text": "nowhere"}, []),
    ],
)
def test_the_next_rollout_follows_the_filter(
    tmp_path: Path, asked: dict[str, str], rows: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "PATIENCE", 0.0)
    lines = [recorded(str(row), score=1.0 if row % 2 else row / 8) for row in range(6)]
    runs = RunIndex([write_run(tmp_path / "run", lines)])
    (name,) = names(runs)
    seen, at, cursor = [], "0:0-0", ""
    while True:
        beside = runs.neighbour(name, at, {**asked, "cursor": cursor})
        cursor = beside["cursor"] or ""
        if beside["id"] is not None:
            at = beside["id"]
            seen.append(at.partition(":")[0])
        elif not cursor:
            break
    assert seen == rows
    if seen:  # and back again
        assert runs.neighbour(name, at, {**asked, "backwards": "1", "failed": ""})["id"] != at


def test_failed_and_retried_attempts_are_counted(tmp_path: Path) -> None:
    lines = [*(recorded("a", score=None, attempt=attempt) for attempt in range(8)), recorded("a", attempt=8)]
    runs = RunIndex([write_run(tmp_path / "run", lines)])
    names(runs)
    (run,) = runs.runs()["runs"]
    assert (run["failed"], run["failed_attempts"], run["attempts"]) == (0, 8, 9)


def test_duration_of_a_run_is_the_recorded_one_after_copying(tmp_path: Path) -> None:
    times = {"started": "2026-11-01T10:00:00.000+00:00", "ended": "2026-11-01T10:00:10.500+00:00"}
    write_run(tmp_path / "copied", [recorded("a")], **times)
    write_run(tmp_path / "killed", [recorded("a")], started=times["started"])
    again = {"resumed": "2026-11-01T12:00:00.000Z", "seconds_before": 10.5, "ended": "2026-11-01T12:00:01.000Z"}
    write_run(tmp_path / "resumed", [recorded("a")], **{**times, **again})
    runs = RunIndex([tmp_path])
    names(runs)
    assert {Path(run["path"]).name: run["seconds"] for run in runs.runs()["runs"]} == {
        "copied": 10.5,
        "killed": None,
        "resumed": 11.5,
    }
