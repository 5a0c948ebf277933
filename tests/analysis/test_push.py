"""`hermes-rl push`: a run becomes a dataset of a hub in one commit, with nothing in it that is nobody's business."""

from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import yaml

import hermes_rl.analysis.push
import hermes_rl.repositories.hub
from hermes_rl.analysis.card import escape_markdown
from hermes_rl.analysis.push import dataset_at
from hermes_rl.cli.main import status
from hermes_rl.errors import UserError
from tests.analysis.recorded import recorded, write_run
from tests.analysis.writable_hub import READER, WRITER, WritableHub
from tests.repositories.gits import know_no_hub

ADDRESS = "hf://datasets/org/played"
FILES = {"README.md", "data/rollouts.parquet", "spec.yaml", "run.json", "report.html"}
SPEC = """
version: 1
name: saying
description: Say a word.
dataset: {items: [{word: one}, {word: two}, {word: three}]}
prompt: {user: "Say {{ word }}."}
rewards: {said: {fn: exact_match, args: {target: "{{ word }}"}}}
solution: {turns: [{say: "{{ word }}"}]}
servers: {policy: {type: scripted}}
process: {group_size: 2, groups: 3, format: parquet}
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WritableHub]:
    know_no_hub(monkeypatch, tmp_path)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    with WritableHub(tmp_path / "hub") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [recorded(row, index, float(index), size=2) for row in ("r0", "r1") for index in (0, 1)]
    return write_run(tmp_path / "run", lines)


def table(hub: WritableHub, dataset: str = "org/played") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(
        io.BytesIO(hub.files(dataset)["data/rollouts.parquet"])
    ).to_pylist()
    return rows


@pytest.mark.slow
def test_a_process_run_is_loaded_from_the_hub_as_the_run_wrote_it(
    hub: WritableHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "saying.yaml").write_text(SPEC)
    out = tmp_path / "out"
    assert status(["run", str(tmp_path / "saying.yaml"), "process", "--out", str(out), "--quiet"]) == 0
    assert status(["push", str(out), ADDRESS]) == 0
    assert f"{hub.url}/datasets/org/played" in capsys.readouterr().out
    assert {*hub.files("org/played")} == {*FILES, ".gitattributes"}
    assert len(hub.commits["org/played"]) == 1
    own = pyarrow.parquet.read_table(out / "rollouts.parquet").to_pylist()
    assert sorted(table(hub), key=lambda row: row["rollout"]) == sorted(own, key=lambda row: row["rollout"])
    assert all(row["tokens"] for row in own)
    code = (
        "import datasets, json; rows = datasets.load_dataset('org/played', split='train')\n"
        "print(json.dumps([[row['rollout'], row['score'], row['tokens']] for row in rows]))"
    )
    environ = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert sorted(loaded) == sorted([row["rollout"], row["score"], row["tokens"]] for row in own)


def test_an_evaluation_is_published_with_its_numbers(hub: WritableHub, tmp_path: Path) -> None:
    spec = SPEC.replace("three}]}", "three}], eval: only}") + "evaluate: {rollouts: 2}\n"
    (tmp_path / "saying.yaml").write_text(spec)
    out = tmp_path / "out"
    assert status(["run", str(tmp_path / "saying.yaml"), "evaluate", "--out", str(out), "--quiet"]) == 0
    assert status(["push", str(out), "hf://org/played"]) == 0
    files = hub.files("org/played")
    assert files["metrics.json"] == (out / "metrics.json").read_bytes()
    assert "- `metrics.json`" in files["README.md"].decode()
    lines = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) > 1
    expected = {line["id"]: (line["score"], [one["content"] for one in line["messages"]]) for line in lines}
    found = {row["rollout"]: (row["score"], [one["content"] for one in row["messages"]]) for row in table(hub)}
    assert found == expected


def test_push_publishes_counting_rollouts_with_their_record_fields(hub: WritableHub, tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", [recorded("r0", 0, None), recorded("r0", 0, 1.0, attempt=1), recorded("r1", 0, 0.5)]
    )
    (run / "spec.yaml").write_text("name: asking\non_stop: {finished: mask}\n")
    assert status(["push", str(run), ADDRESS]) == 0
    first, second = table(hub)
    assert (first["rollout"], first["score"], first["reward/right"]) == ("r0:0-0r1", 1.0, 1.0)
    assert (second["row_key"], second["score"], second["prompt_tokens"]) == ("r1", 0.5, 120)
    assert first["masked"]
    assert json.loads(first["tools"])[0]["function"]["name"] == "terminal"
    assert json.loads(first["messages"][1]["tool_calls"])[0]["function"]["arguments"] == '{"command": "ls"}'


def test_push_writes_a_dataset_card_with_usage_and_statistics(hub: WritableHub, run: Path) -> None:
    assert status(["push", str(run), ADDRESS]) == 0
    card = hub.files("org/played")["README.md"].decode()
    about = yaml.safe_load(card.split("---\n")[1])
    assert about["pretty_name"] == "asking"
    assert about["tags"] == ["hermes-rl", "reinforcement-learning"]
    assert about["size_categories"] == ["n<1K"]
    (config,) = about["configs"]
    assert config["data_files"] == [{"split": "train", "path": "data/rollouts.parquet"}]
    assert 'datasets.load_dataset("org/played", split="train")' in card
    assert "| rollouts | 4, of which 4 have a score |" in card
    assert "| mean score | 0.500, 95 % interval 0.079 to 0.921 |" in card
    assert "metrics.json" not in card


def test_texts_of_others_are_shown_in_the_card_and_not_obeyed(hub: WritableHub, tmp_path: Path) -> None:
    bad = "x\x1b[31m |\n---\n<script>alert(1)</script> [a](http://b) " + "y" * 10_000
    run = write_run(tmp_path / "run", [recorded("r0")], name=bad, policy=[{"type": "vllm", "model": bad}])
    (run / "spec.yaml").write_text(json.dumps({"name": "n", "description": bad}))
    assert status(["push", str(run), ADDRESS]) == 0
    card = hub.files("org/played")["README.md"].decode()
    assert card.split("\n").count("---") == 2
    about, body = card.removeprefix("---\n").split("\n---\n")
    assert yaml.safe_load(about)["pretty_name"].startswith("x\\u001b[31m | --- <script>")
    assert "\x1b" not in card
    assert "<script" not in body
    assert "](" not in body
    assert "x\\\\u001b" in body
    assert max(map(len, card.split("\n"))) < 4000
    assert escape_markdown("a|b_c") == r"a\|b\_c"


@pytest.mark.parametrize(("words", "private"), [([], True), (["--private"], True), (["--public"], False)])
def test_pushed_dataset_is_private_unless_public_is_requested(
    hub: WritableHub, run: Path, words: list[str], private: bool
) -> None:
    assert status(["push", str(run), ADDRESS, *words]) == 0
    (asked,) = hub.created
    assert (asked["organization"], asked["name"], asked["type"]) == ("org", "played", "dataset")
    assert ("org/played" in hub.private) is private


@pytest.mark.parametrize(("before", "after", "said"), [
    ("--public", "--private", "exists and is public"), ("--private", "--public", "exists and is private"),
])  # fmt: skip
def test_a_dataset_that_other_eyes_see_than_is_asked_for_is_left_alone(
    hub: WritableHub, run: Path, before: str, after: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["push", str(run), ADDRESS, before]) == 0
    assert status(["push", str(run), ADDRESS, after]) == 2
    assert said in capsys.readouterr().err
    assert len(hub.commits["org/played"]) == 1


def test_a_second_push_replaces_our_files_in_one_commit_and_leaves_others(
    hub: WritableHub, run: Path, tmp_path: Path
) -> None:
    (run / "metrics.json").write_text("{}")
    assert status(["push", str(run), ADDRESS]) == 0
    folder = hub.dataset("org/played")
    (folder / "mine.txt").write_text("mine")
    (folder / ".gitignore").write_text("*.parquet\nreport.html\n")  # which would leave our files out
    other = write_run(tmp_path / "other", [recorded("r7", 0, 1.0), recorded("r8", 0, 0.0), recorded("r9", 0, 0.0)])
    assert status(["push", str(other), ADDRESS]) == 0
    assert len(hub.commits["org/played"]) == 2
    assert {*hub.files("org/played")} == {*FILES, ".gitattributes", ".gitignore", "mine.txt"}
    assert {row["row_key"] for row in table(hub)} == {"r7", "r8", "r9"}
    assert hub.files("org/played")["mine.txt"] == b"mine"
    assert len(hub.created) == 1


@pytest.mark.parametrize("place", ["rollout", "spec.yaml", "run.json", "metrics.json"])
def test_nothing_is_published_where_a_file_holds_a_secret(
    hub: WritableHub, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = 'sk-"quoted\\"<&>-secret'
    monkeypatch.setenv("SERVICE_API_KEY", secret)
    run = write_run(tmp_path / "run", [recorded("r0", text=f"It is {secret}." if place == "rollout" else "Done.")])
    if place != "rollout":
        before = json.loads((run / place).read_text()) if place == "run.json" else {"name": "n"}
        (run / place).write_text(json.dumps({**before, "header": f"Bearer {secret}"}))
    assert status(["push", str(run), ADDRESS]) == 2
    said = capsys.readouterr().err
    assert ("data/rollouts.parquet (rollout r0:0-0)" if place == "rollout" else place) in said
    assert "SERVICE_API_KEY" in said
    assert secret not in said
    assert hub.created == []
    assert hub.asked == []


def test_a_secret_of_several_lines_is_found_in_the_spec(
    hub: WritableHub, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "-----BEGIN KEY-----\n" + "it's a long one, of many words " * 9 + "\n-----END KEY-----"
    monkeypatch.setenv("PRIVATE_KEY", secret)
    (run / "spec.yaml").write_text(yaml.safe_dump({"name": "n", "sandbox": {"files": {"key": secret}}}))
    assert status(["push", str(run), ADDRESS]) == 2
    assert "spec.yaml would hold the value of the variable PRIVATE_KEY" in capsys.readouterr().err
    assert hub.asked == []


def test_the_token_of_the_hub_is_a_secret_whatever_its_variable_is_called(
    hub: WritableHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("MINE", WRITER)
    run = write_run(tmp_path / "run", [recorded("r0", text=WRITER)])
    assert status(["push", str(run), ADDRESS, "--token-env", "MINE"]) == 2
    assert "the hub's token" in capsys.readouterr().err
    clean = write_run(tmp_path / "clean", [recorded("r0")])
    assert status(["push", str(clean), ADDRESS, "--token-env", "MINE"]) == 0


@pytest.mark.parametrize(("token", "said"), [
    (None, "there is no token for the hub"),
    ("hf_nobodynobodynobody", "does not accept the token (Invalid credentials in Authorization header)"),
    (READER, "the token may not write org/played"),
])  # fmt: skip
def test_push_without_write_access_reports_the_reason(
    hub: WritableHub, run: Path, token: str | None, said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.delenv("HF_TOKEN")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    assert status(["push", str(run), ADDRESS]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert token is None or token not in told
    assert hub.created == []


@pytest.mark.parametrize(("path", "code", "result", "said"), [
    ("/api/repos/create", 409, 2, "does not give the name org/played (it is not to be)"),
    ("/api/repos/create", 500, 1, "is out of reach or busy"),
    ("/api/datasets/org/played/commit", 403, 2, "org/played was created; run the same command again"),
    ("/api/datasets/org/played/commit", 400, 1, "did not take org/played"),
])  # fmt: skip
def test_a_hub_that_refuses_leaves_nothing_half_done(
    hub: WritableHub, run: Path, path: str, code: int, result: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refused[path] = code
    assert status(["push", str(run), ADDRESS]) == result
    assert said in capsys.readouterr().err
    assert hub.commits == {}
    hub.refused.clear()
    assert status(["push", str(run), ADDRESS]) == 0
    assert len(hub.commits["org/played"]) == 1


def test_a_hub_that_is_out_of_reach_is_named(run: Path, hub: WritableHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["push", str(run), ADDRESS, "--endpoint", "http://127.0.0.1:1/"]) == 1
    assert "http://127.0.0.1:1 is out of reach" in capsys.readouterr().err
    assert hub.asked == []


@pytest.mark.parametrize("path", ["/api/datasets/org/played", "/api/repos/create", "/api/datasets/org/played/commit"])
def test_a_hub_that_says_nothing_is_not_waited_for_for_ever(
    run: Path, hub: WritableHub, path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (hermes_rl.analysis.push, hermes_rl.repositories.hub):
        monkeypatch.setattr(module, "ANSWER", 2.0)
    hub.silent = path
    assert status(["push", str(run), ADDRESS]) == 1
    hub.over.set()
    assert f"{hub.url} is out of reach" in capsys.readouterr().err
    assert hub.commits == {}


def test_push_refuses_a_run_that_is_still_running(
    run: Path, hub: WritableHub, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert status(["push", str(run), ADDRESS]) == 2
    assert "is still running" in capsys.readouterr().err
    assert hub.asked == []


def test_a_run_without_a_score_is_not_published(
    tmp_path: Path, hub: WritableHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["push", str(write_run(tmp_path / "run", [recorded("r0", 0, None)])), ADDRESS]) == 2
    assert "has no rollout with a score" in capsys.readouterr().err
    assert hub.asked == []


def test_a_dry_run_lists_the_files_and_shows_the_card(
    run: Path, hub: WritableHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert status(["push", str(run), ADDRESS, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in FILES)
    assert "run.log" not in said
    assert 'load_dataset("org/played"' in said
    assert hub.asked == []


@pytest.mark.parametrize("address", [
    "org/played", "hf://played", "hf://datasets/played", "hf://models/org/played", "hf://spaces/org/played",
    "hf://datasets/org/played/more", "hf://org/played@main", "hf://org/a--b", "hf://org/..", "hf://models/played",
])  # fmt: skip
def test_push_refuses_an_address_that_is_not_a_hub_dataset(address: str) -> None:
    with pytest.raises(UserError, match="is not a dataset of a hub"):
        dataset_at(address)


def test_addresses_name_datasets_with_and_without_their_kind() -> None:
    assert dataset_at("hf://datasets/org/na.me_1") == dataset_at("hf://org/na.me_1/") == "org/na.me_1"


def test_a_folder_gets_what_a_hub_would_and_is_loaded_as_a_dataset(
    run: Path, hub: WritableHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    folder = tmp_path / "kept" / "played"
    assert status(["push", str(run), str(folder)]) == 0
    assert f'load_dataset("{folder}", split="train")' in capsys.readouterr().out
    assert hub.asked == [], "no hub is asked"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == FILES
    assert 'load_dataset("./played", split="train")' in (folder / "README.md").read_text()
    import datasets

    rows = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert sorted(rows["score"]) == [0.0, 0.0, 1.0, 1.0]
    (folder / "own.txt").write_text("mine")
    (folder / "metrics.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert status(["push", str(run), "./kept/played"]) == 0
    assert {path.name for path in folder.iterdir()} == {"own.txt", "data", *FILES} - {"data/rollouts.parquet"}


def test_a_folder_that_is_listed_is_not_made(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["push", str(run), str(tmp_path / "new"), "--dry-run"]) == 0
    assert "would write to" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


def test_a_folder_with_files_that_no_push_has_written_is_left_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("my own")
    (tmp_path / "file").write_text("x")
    for folder, said in (
        ("mine", "holds README.md, which no push has written"), ("file", "is a file"), ("run", "is the run itself"),
        ("file/below", "cannot be written to"),
    ):  # fmt: skip
        before = sorted(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        assert status(["push", str(run), str(tmp_path / folder)]) == 2
        assert said in capsys.readouterr().err
        assert sorted(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()) == before
    for option in (["--public"], ["--token-env", "T"], ["--endpoint", "http://127.0.0.1:9"]):
        assert status(["push", str(run), str(tmp_path / "new"), *option]) == 2
        assert f"{option[0]} is about a hub" in capsys.readouterr().err


def test_a_folder_gets_no_secret_either(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "sk-a-secret-of-mine")
    (run / "spec.yaml").write_text(json.dumps({"name": "n", "header": "Bearer sk-a-secret-of-mine"}))
    assert status(["push", str(run), str(tmp_path / "new")]) == 2
    assert "MY_API_KEY" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
