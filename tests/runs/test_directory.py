"""A run directory holds one run, survives a torn line, and lets one process in."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hermes_rl.errors import RunError, UserError
from hermes_rl.runs.directory import RunDirectory, refusal
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.provenance import seconds_of
from hermes_rl.spec.fingerprint import fingerprint
from hermes_rl.spec.load import load_spec, parse_spec
from hermes_rl.spec.model import Spec


@pytest.fixture
def spec() -> Spec:
    return load_spec("terminal-files")


def other_spec() -> Spec:
    return parse_spec("name: terminal-files\ndataset: {items: [{a: 1}]}\nprompt: {user: other}\n")


def test_torn_last_record_is_removed_and_the_rest_remains(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": ')
    journal = Journal(path)
    journal.append({"a": 3})
    journal.close()
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize("text", ["bread\nmilk", "bread", '{"my": "settings"}', "[1, 2]"])
def test_unrelated_file_is_refused_and_unchanged(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    journal = Journal(path)
    with pytest.raises(UserError, match=r"notes\.txt:\d: this line"):
        list(journal.read("group"))
    journal.close()
    assert path.read_text() == text


def test_append_to_an_unrelated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("bread")
    journal = Journal(path)
    with pytest.raises(UserError, match=r"notes\.txt"):
        journal.append({"a": 1})
    journal.close()
    assert path.read_text() == "bread"


@pytest.mark.parametrize("torn", ['{"a": 2', "{", "\0\0\0"])
def test_torn_record_is_ignored_and_removed_by_the_next_write(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n' + torn)
    journal = Journal(path)
    assert not journal.empty
    assert list(journal.read("a")) == [{"a": 1}]
    assert journal.read_at(journal.append({"a": 3})) == {"a": 3}
    journal.close()
    assert path.read_text() == '{"a": 1}\n{"a":3}\n'


def test_a_file_of_nothing_but_a_torn_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": ')
    journal = Journal(path)
    assert journal.empty
    journal.append({"a": 1})
    assert not journal.empty
    journal.close()


def test_complete_last_record_without_a_newline_is_retained(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}')
    journal = Journal(path)
    begin = journal.append({"a": 2})
    journal.close()
    assert path.read_text() == '{"a": 1}\n{"a":2}\n'
    assert begin == len('{"a": 1}\n')


@pytest.mark.parametrize("name", ["spec.yaml", "run.json"])
def test_directory_with_an_unrelated_spec_or_run_file_is_refused(spec: Spec, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"name": "mine"}')
    with pytest.raises(UserError, match=rf"{name}.*was not written by a run"):
        RunDirectory.choose(spec, "process", tmp_path)


def test_lock_file_of_another_program_keeps_its_content(spec: Spec, tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("of another program")
    with RunDirectory.choose(spec, "process", tmp_path):
        pass
    assert (tmp_path / ".lock").read_text() == "of another program"


def test_keep_replaces_the_records_and_appending_continues(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "lines.jsonl")
    journal.append({"a": 1})
    journal.keep([{"a": 7}])
    journal.append({"a": 8})
    assert [line["a"] for line in journal.read()] == [7, 8]
    journal.close()


def test_a_number_that_json_cannot_hold_is_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "lines.jsonl")
    begin = journal.append({"score": math.nan, "rewards": [{"value": -math.inf}, 0.5], "big": 10**400})
    assert journal.read_at(begin) == {"score": None, "rewards": [{"value": None}, 0.5], "big": 10**400}
    journal.close()


def test_a_full_disk_is_a_failed_run_that_names_the_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rollouts.jsonl")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # Python ignores the signal, so that writing fails
    try:
        with pytest.raises(RunError, match=r"rollouts\.jsonl cannot be written"):
            journal.append({"a": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_default_directory_name_contains_the_rollout_fingerprint(spec: Spec) -> None:
    directory = RunDirectory.choose(spec, "process", None)
    assert directory.path == Path("outputs/terminal-files") / f"process-scripted-{fingerprint(spec, 'process')}"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B-Instruct-2507"),
        ("/models/my model/", "my-model"),
        ("qwen3:4b", "qwen3-4b"),
        ("x" * 300, "x" * 60),
        ("..", "openai"),
        ("größe", "gr-e"),
    ],
)
def test_default_directory_name_contains_the_model(model: str, name: str) -> None:
    policy = json.dumps({"base_url": "http://h/v1", "model": model})
    spec = parse_spec(
        f"dataset: {{items: [{{a: 1}}], eval: only}}\nprompt: {{user: x}}\nservers: {{policy: {policy}}}\n"
    )
    directory = RunDirectory.choose(spec, "evaluate", None)
    assert directory.path == Path("outputs/spec") / f"evaluate-{name}-{fingerprint(spec, 'evaluate')}"


def test_different_run_is_refused_and_fresh_uses_a_new_directory(spec: Spec, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with RunDirectory.choose(spec, "process", out) as directory:
        directory.describe(spec, {})
        directory.journal("rollouts.jsonl").append({"id": "a"})
    RunDirectory.choose(spec, "process", out)
    with pytest.raises(UserError, match="contains a run of another spec"):
        RunDirectory.choose(other_spec(), "process", out)
    assert RunDirectory.choose(other_spec(), "process", out, fresh=True).path == tmp_path / "run-2"


def test_a_second_process_on_the_directory_is_refused(spec: Spec, tmp_path: Path) -> None:
    first = RunDirectory.choose(spec, "process", tmp_path / "run")
    with first, pytest.raises(UserError, match="another run is using"):
        RunDirectory.choose(spec, "process", tmp_path / "run").__enter__()
    with RunDirectory.choose(spec, "process", tmp_path / "run"):
        pass


def test_a_directory_that_cannot_be_made_is_named(spec: Spec, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in ("file", "file/run"):
        with pytest.raises(UserError) as caught:
            RunDirectory.choose(spec, "process", tmp_path / out).__enter__()
        assert (
            str(caught.value)
            == f"{tmp_path / out} cannot be a folder: {tmp_path / 'file'} is a file; choose another --out"
        )


@pytest.mark.parametrize(
    ("number", "way"),
    [
        (errno.EACCES, "Permission denied; choose another --out, or one whose folder you may write in"),
        (errno.EROFS, "Read-only file system; choose another --out"),
        (errno.ENOSPC, "No space left on device; make room there, or choose another --out"),
        (errno.ENAMETOOLONG, "File name too long; choose another --out"),
    ],
)
def test_write_error_is_reported_with_a_matching_hint(number: int, way: str) -> None:
    told = refusal(Path("x"), OSError(number, os.strerror(number)))
    assert str(told) == f"x cannot be written: {way}"


def test_an_unreadable_run_json_is_named(spec: Spec, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json cannot be read"):
        RunDirectory.choose(spec, "process", tmp_path)


def test_record_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\nnonsense\n{"a": 2}\n')
    journal = Journal(path)
    with pytest.raises(UserError, match=r"lines\.jsonl:2: this line is not a JSON object"):
        list(journal.read())
    journal.close()


def test_directory_without_rollouts_is_reused_by_a_corrected_spec(spec: Spec, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with RunDirectory.choose(spec, "process", out) as directory:
        directory.describe(spec, {})
    (out / "rollouts.jsonl").write_text("")
    assert RunDirectory.choose(other_spec(), "process", out).path == out


def test_a_file_of_lines_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    first = Journal(path)
    first.append({"a": 1})
    first.keep([{"a": 2}])
    with pytest.raises(UserError, match=r"another run is using .*lines\.jsonl"):
        Journal(path)
    first.close()
    second = Journal(path)
    assert list(second.read("a")) == [{"a": 2}]
    second.close()


def test_keep_may_take_what_is_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "lines.jsonl")
    for number in range(4):
        journal.append({"a": number})
    journal.keep(line for line in journal.read() if line["a"] % 2)
    assert [line["a"] for line in journal.read()] == [1, 3]
    journal.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]


def test_a_line_without_a_key_that_is_needed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"b": 1}\n')
    journal = Journal(path)
    with pytest.raises(UserError, match=r"lines\.jsonl:2: this line has no 'a'"):
        list(journal.read("a"))
    journal.close()


def test_a_file_system_without_locks_is_said_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with RunDirectory(tmp_path / "run") as directory:
        directory.write_json("run.json", {})
    assert "is on a file system without locks" in caplog.text


def test_a_run_of_an_earlier_form_is_refused_by_name(tmp_path: Path) -> None:
    spec = load_spec("terminal-files")
    (tmp_path / "rollouts.jsonl").write_text('{"id": "row:0-0"}\n')
    (tmp_path / "run.json").write_text(json.dumps({"fingerprint": fingerprint(spec, "process")}))
    with pytest.raises(UserError, match=r"earlier version of hermes-rl \(format 1 .* --fresh"):
        RunDirectory.choose(spec, "process", tmp_path)
    (tmp_path / "rollouts.jsonl").write_text("")
    assert RunDirectory.choose(spec, "process", tmp_path).path == tmp_path


def test_entries_that_threads_add_at_the_same_time_all_remain(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    names = [f"entry {number}" for number in range(100)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: directory.add({name: 1}), names))
    assert directory.read_run_info().keys() == set(names)


def test_run_json_survives_surrogates_nan_and_huge_numbers(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.write_json(
        "run.json", {"failed": {"\ud83d is half, \u4e2d is whole": 1}, "nan": math.nan, "big": 10**400}
    )
    assert directory.read_run_info() == {"failed": {"\ud83d is half, \u4e2d is whole": 1}, "nan": None, "big": 10**400}
    json.loads((tmp_path / "run" / "run.json").read_bytes().decode("utf-8"), parse_constant=pytest.fail)


@pytest.mark.parametrize("text", ['{"a": ' + "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_what_no_run_has_written_is_said_and_not_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json cannot be read"):
        RunDirectory(tmp_path).read_run_info()
    (tmp_path / "lines.jsonl").write_text('{"b": 1}\n' + text + "\n")
    journal = Journal(tmp_path / "lines.jsonl")
    with pytest.raises(UserError, match=r"lines\.jsonl:2: this line is not a JSON object"):
        list(journal.read())
    journal.close()


def test_resumed_run_keeps_its_first_start_and_total_seconds(tmp_path: Path, spec: Spec) -> None:
    with RunDirectory(tmp_path / "run", "f") as directory:
        directory.describe(spec, {"started": "2026-11-01T10:00:00.000Z"})
        directory.add({"ended": "2026-11-01T10:00:10.000Z"})
        (directory.path / "rollouts.jsonl").write_text("{}\n")
        directory.describe(spec, {"started": "2026-11-01T12:00:00.000Z"})
        told = directory.read_run_info()
        assert (told["started"], told["resumed"]) == ("2026-11-01T10:00:00.000Z", "2026-11-01T12:00:00.000Z")
        assert told["seconds_before"] == 10.0 and "ended" not in told
        killed = seconds_of("2026-11-01T12:00:05.000Z")
        assert killed is not None
        os.utime(directory.path / "rollouts.jsonl", (killed, killed))
        directory.describe(spec, {"started": "2026-11-01T14:00:00.000Z"})
        assert directory.read_run_info()["seconds_before"] == 15.0
