"""Directories sent to other machines: what is sent, what is not, and that their paths work there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.runs import packaging
from hermes_rl.runs.packaging import pack, stage, unpack
from hermes_rl.spec.load import load_spec


def make(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def staged(folder: Path, into: Path, *secrets: bytes) -> tuple[set[str], list[str]]:
    into.mkdir()
    told: list[str] = []
    stage([folder], into, secrets, told.append)
    return {str(path.relative_to(into)) for path in into.rglob("*") if path.is_file()}, told


def test_generated_and_secret_files_are_not_packaged(tmp_path: Path) -> None:
    task = tmp_path / "task"
    make(task, code_dot_py="", data__rows_dot_jsonl="{}", keys_dot_env="K=1", _dot_hidden="", note="it is abc123")
    make(task, run__run_dot_json="{}", run__rollouts="", outputs__x="", _dot_git__config="", lib____init___dot_py="")
    (task / "run" / "rollouts.jsonl").write_text("")
    (task / "program").write_text("#!/bin/sh")
    (task / "program").chmod(0o755)
    found, told = staged(task, tmp_path / "into", b"abc123")
    assert {"0/code.py", "0/data/rows.jsonl", "0/program"} <= found
    assert not any(word in name for name in found for word in ("env", "hidden", "note", "run", "outputs", "git"))
    assert (tmp_path / "into/0/program").stat().st_mode & 0o777 == 0o755
    assert len(told) == 2 and "outputs stays" in told[0] and "note holds a key" in told[1]


def test_links_travel_as_what_they_lead_to(tmp_path: Path) -> None:
    make(tmp_path / "far", table="rows")
    make(tmp_path / "task", code_dot_py="")
    (tmp_path / "task" / "data").symlink_to(tmp_path / "far")
    (tmp_path / "task" / "again").symlink_to(tmp_path / "task")
    for name, other in ("ab", "ba"):
        make(tmp_path / "task" / name, file="")
        for number in range(2):
            (tmp_path / "task" / name / f"{number}").symlink_to(tmp_path / "task" / other)
    found, _ = staged(tmp_path / "task", tmp_path / "into")
    linked = {f"0/{path}/file" for path in ("a", "b", "a/0", "a/1", "b/0", "b/1")}
    assert found == {"0/code.py", "0/data/table", *linked}


def test_file_that_cannot_be_read_is_reported_and_not_packaged(tmp_path: Path) -> None:
    make(tmp_path / "task", code_dot_py="")
    (tmp_path / "task" / "memory").symlink_to("/proc/self/mem")
    found, (told,) = staged(tmp_path / "task", tmp_path / "into", b"key")
    assert found == {"0/code.py"} and "memory cannot be copied, so it stays on this machine: Input/output" in told


def test_oversized_directory_is_not_packaged_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "task", code_dot_py="", weights="x" * 2000)
    monkeypatch.setattr(packaging, "MOST_BYTES", 1000)
    found, told = staged(tmp_path / "task", tmp_path / "into")
    assert found == set()
    assert "too large to copy" in told[0] and "at the same path" in told[0]


def test_paths_of_a_spec_lead_to_where_its_folders_arrive(tmp_path: Path) -> None:
    task, base = tmp_path / "task", tmp_path / "base"
    make(base, base_dot_yaml="sandbox: {files: [{to: a, from: a_dot_txt}]}".replace("_dot_", "."), a_dot_txt="a")
    make(
        task,
        spec_dot_yaml="extends: ../base/base.yaml\ndataset: {items: [{n: 1}]}\nprompt: {user: 'Do {{ n }}'}\n"
        "rewards: {ours: {fn: 'code.py:ours'}}\nsolution: {turns: [{say: hi}]}\n",
        code_dot_py="def ours(result):\n    return 1\n",
    )
    spec = load_spec(task / "spec.yaml", mode="process", environ={}, demo=True)
    into = tmp_path / "into"
    into.mkdir()
    folders = stage(spec.folders, into, (), lambda _: None)
    assert set(folders) == {task, base}
    there = unpack(pack(spec, folders), into)
    at = {folder: into / str(number) for number, folder in enumerate(folders)}
    assert there.rewards["ours"].fn == f"{at[task]}/code.py:ours"
    assert there.sandbox.files[0].from_ == f"{at[base]}/a.txt" and Path(there.sandbox.files[0].from_).read_text() == "a"
    assert there.folder == at[task]
    assert there.prompt == spec.prompt


def test_paths_that_only_share_a_prefix_are_not_rewritten(tmp_path: Path) -> None:
    folder = tmp_path / "task"
    value = [f"{folder}2/x", "task", folder, str(folder), f"see {folder}/x", Path("/other")]
    there = unpack(pack(value, [folder]), Path("/new"))
    assert there == [f"{folder}2/x", "task", Path("/new/0"), "/new/0", f"see {folder}/x", Path("/other")]


def test_data_in_an_unpackaged_directory_is_reported(tmp_path: Path) -> None:
    make(
        tmp_path / "task",
        code_dot_py="",
        outputs__rows_dot_jsonl="{}",
        lib__outputs__rows="",
        lib__outputs__run__run_dot_json="{}",
    )
    found, told = staged(tmp_path / "task", tmp_path / "into")
    assert found == {"0/code.py", "0/lib/outputs/rows"}
    assert told == [
        f"{tmp_path / 'task' / 'outputs'} stays on this machine, as runs are written there; what the spec reads of it "
        "belongs into another folder"
    ]
