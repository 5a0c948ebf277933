"""A run directory holds one run, survives a torn line, and lets one process in."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from hermes_rl.errors import RunError, UserError
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.journal import Journal
from hermes_rl.spec.fingerprint import fingerprint
from hermes_rl.spec.load import load_spec, parse_spec
from hermes_rl.spec.model import Spec


@pytest.fixture
def spec() -> Spec:
    return load_spec("terminal-files")


def other_spec() -> Spec:
    return parse_spec("name: terminal-files\ndataset: {items: [{a: 1}]}\nprompt: {user: other}\n")


def test_a_torn_last_line_is_cut_off_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": ')
    journal = Journal(path)
    journal.append({"a": 3})
    journal.close()
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_keep_replaces_the_lines_and_appending_goes_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "lines.jsonl")
    journal.append({"a": 1})
    journal.keep([{"a": 7}])
    journal.append({"a": 8})
    assert [line["a"] for line in journal.read()] == [7, 8]
    journal.close()


def test_a_number_that_is_no_json_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "lines.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        journal.append({"score": float("nan")})
    journal.close()
    assert (tmp_path / "lines.jsonl").read_text() == ""


def test_a_full_disk_is_a_failed_run_that_names_the_file() -> None:
    journal = Journal(Path("/dev/full"))
    with pytest.raises(RunError, match="/dev/full cannot be written"):
        journal.append({"a": 1})


def test_the_default_directory_is_named_by_what_defines_a_rollout(spec: Spec) -> None:
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
def test_the_default_directory_says_which_model_played(model: str, name: str) -> None:
    policy = json.dumps({"base_url": "http://h/v1", "model": model})
    spec = parse_spec(
        f"dataset: {{items: [{{a: 1}}], eval: only}}\nprompt: {{user: x}}\nservers: {{policy: {policy}}}\n"
    )
    directory = RunDirectory.choose(spec, "evaluate", None)
    assert directory.path == Path("outputs/spec") / f"evaluate-{name}-{fingerprint(spec, 'evaluate')}"


def test_another_run_is_refused_and_a_fresh_one_lies_beside(spec: Spec, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with RunDirectory.choose(spec, "process", out) as directory:
        directory.describe(spec, {})
        directory.journal("rollouts.jsonl").append({"id": "a"})
    RunDirectory.choose(spec, "process", out)
    with pytest.raises(UserError, match="holds a run of something else"):
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
    with pytest.raises(UserError, match="cannot be written"):
        RunDirectory.choose(spec, "process", tmp_path / "file" / "run").__enter__()


def test_an_unreadable_run_json_is_named(spec: Spec, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json cannot be read"):
        RunDirectory.choose(spec, "process", tmp_path)


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\nnonsense\n{"a": 2}\n')
    journal = Journal(path)
    with pytest.raises(UserError, match=r"lines\.jsonl:2: this line is no JSON object"):
        list(journal.read())
    journal.close()


def test_a_run_that_failed_before_its_first_rollout_gives_its_place_to_the_corrected_spec(
    spec: Spec, tmp_path: Path
) -> None:
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
