"""A SPEC that is a folder or a repository: what is shown, asked, remembered and recorded."""

from __future__ import annotations

import json
import os
import pty
import select
import time
from pathlib import Path

import pytest

from hermes_rl.cli.main import status
from hermes_rl.errors import UserError
from hermes_rl.spec.load import load_spec
from tests.commands import Command, environment
from tests.repositories.gits import ENVIRONMENT, REWARDS, SPEC, commit, git, repository


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = repository(tmp_path / "origin")
    git(folder, "tag", "v1")
    return folder


def test_a_folder_is_the_one_spec_in_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository(here / "adding", {**ENVIRONMENT, "compose.yaml": "services: {}\n", ".hidden.yaml": SPEC})
    assert status(["validate", "./adding"]) == 0
    assert status(["run", "adding", "process", "--demo", "--quiet", "--out", "out"]) == 0
    assert json.loads(Path("out/run.json").read_text())["spec"] == "adding/adding.yaml"
    assert load_spec(here / "adding").name == "adding"
    (here / "adding" / "other.yml").write_text(SPEC)
    capsys.readouterr()
    assert status(["render", "./adding"]) == 2
    assert "adding has 2 specs: name one of adding/adding.yaml, adding/other.yml" in capsys.readouterr().err
    assert status(["play", ".", "--demo"]) == 2
    assert "has no spec" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["x" * 5000, "a\0b", "nothing/here/at/all", ""])
def test_invalid_spec_name_is_reported_without_a_traceback(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["run", word, "process", "--demo"]) == 2
    assert "there is no spec" in capsys.readouterr().err


def test_python_file_is_refused_as_a_spec(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("game.py").write_text("class Game: ...\n")
    assert status(["run", "game.py", "process"]) == 2
    assert "game.py is Python code, not a spec: name the YAML file" in capsys.readouterr().err


def test_repository_needs_trust_for_each_content(
    origin: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, first = f"git+file://{origin}", git(origin, "rev-parse", "HEAD")
    assert status(["validate", f"{address}@v1"]) == 2
    said = capsys.readouterr().err
    assert f"v1 is the commit {first}" in said
    assert "rewards.py: 2 lines" in said
    assert "adding.yaml: 5 lines" in said
    assert "no terminal to ask: add --trust" in said
    with pytest.raises(UserError, match="has not been confirmed"):
        load_spec(f"{address}@v1")
    assert status(["run", f"{address}@v1", "process", "--demo", "--quiet", "--out", "out", "--trust"]) == 0
    recorded = json.loads(Path("out/run.json").read_text())
    assert recorded["spec"] == f"{address}@{first}#adding.yaml"
    assert recorded["repository"]["commit"] == first
    digest = recorded["repository"]["digest"]
    assert f"sha256 {digest}" in capsys.readouterr().err
    for command in (["validate"], ["render"], ["play", "--demo"], ["doctor"]):
        status([command[0], f"{address}@v1", *command[1:]])
        assert "has not been confirmed" not in capsys.readouterr().err
    assert load_spec(f"{address}@v1").repository == recorded["repository"]
    commit(origin, {"rewards.py": REWARDS + "# more\n"})
    git(origin, "tag", "-f", "v1")
    assert status(["run", f"{address}@v1", "process", "--demo", "--quiet", "--out", "other"]) == 2
    assert "rewards.py: 3 lines" in capsys.readouterr().err
    assert status(["validate", f"{address}@{first}"]) == 0


def test_without_a_revision_the_commit_is_said_and_how_to_pin_it(
    origin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = git(origin, "rev-parse", "HEAD")
    assert status(["validate", f"git+file://{origin}", "--trust"]) == 0
    assert f"To use it again: git+file://{origin}@{first}" in capsys.readouterr().err
    origin.rename(origin.with_name("gone"))
    assert status(["validate", f"git+file://{origin}@{first}"]) == 0
    assert status(["validate", f"git+file://{origin}"]) == 2
    assert f"here already: git+file://{origin}@{first}" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 2)])
def test_a_terminal_is_asked_once(origin: Path, answer: str, code: int) -> None:
    command = ("validate", f"git+file://{origin}@v1")
    assert _on_a_terminal(command, answer) == (code, True)
    if code == 0:
        assert _on_a_terminal(command, "") == (0, False)


def _on_a_terminal(command: tuple[str, ...], answer: str) -> tuple[int, bool]:
    """Return the status, and whether it asked."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r+b", 0) as terminal:
        process = Command(*command, cwd=Path.cwd(), env=environment(), streams=(terminal, terminal, terminal))
    shown, asked, end = b"", False, time.monotonic() + 60
    try:
        while time.monotonic() < end:
            if not select.select([ours], [], [], 1)[0]:
                continue
            try:
                shown += os.read(ours, 4096)
            except OSError:  # it has ended
                break
            if not asked and b"Do you trust it?" in shown:
                asked = True
                os.write(ours, answer.encode() + b"\n")
        return process.wait(10), asked
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)


def test_environment_of_a_repository_is_selected_after_a_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = {f"envs/{name}/{file}": text for name in ("a", "b") for file, text in ENVIRONMENT.items()}
    origin = repository(tmp_path / "several", {**several, "envs/b/other.yaml": SPEC})
    address = f"git+file://{origin}@main"
    assert status(["validate", f"{address}#envs/a", "--trust"]) == 0
    assert status(["validate", f"{address}#envs/b/other.yaml"]) == 0
    capsys.readouterr()
    for inside, said in (("", "has no spec"), ("#envs/b", "#envs/b/adding.yaml, "), ("#envs/c", "has no envs/c")):
        assert status(["validate", address + inside]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "files",
    [
        {"adding.yaml": SPEC.replace("rewards.py:", "../outside.py:")},
        {"adding.yaml": SPEC.replace(SPEC.splitlines()[0], "dataset: {path: json, data_files: /etc/rows.jsonl}")},
        {"adding.yaml": "extends: ../outside.yaml\n"},
    ],
)
def test_a_spec_of_a_repository_names_files_of_it_alone(
    tmp_path: Path, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    origin = repository(tmp_path / "origin", {**ENVIRONMENT, **files})
    status(["validate", f"git+file://{origin}", "--trust"])
    found = next((tmp_path / "cache/hermes-rl/environments").glob("origin-*"))
    (found / "outside.py").write_text(REWARDS)
    (found / "outside.yaml").write_text(SPEC)
    capsys.readouterr()
    assert status(["validate", f"git+file://{origin}"]) == 2
    assert "names files of it alone" in capsys.readouterr().err


def test_set_runs_a_trusted_repository(origin: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = "{servers.policy.type: scripted, dataset.eval: only}"
    text = f"set: {{name: all, specs: ['git+file://{origin}@v1', ./mine], models: [{{name: m, set: {policy}}}]}}\n"
    (here / "set.yaml").write_text(text)
    (here / "mine").mkdir()
    (here / "mine" / "own.yaml").write_text(SPEC)
    (here / "mine" / "rewards.py").write_text(REWARDS)
    assert status(["validate", "set.yaml"]) == 2
    assert f"set.yaml:1:26: git+file://{origin}@" in (said := capsys.readouterr().err)
    assert "has not been confirmed" in said
    assert status(["validate", f"git+file://{origin}@v1", "--trust"]) == 0
    assert status(["run", "set.yaml", "evaluate", "--quiet"]) == 0
    assert {path.parent.name for path in Path("outputs/all").glob("*/m")} == {"adding", "own"}
