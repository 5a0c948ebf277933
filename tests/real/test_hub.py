"""Datasets and tokenizers over HTTP with the hub's own libraries: revisions, and a failing hub."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hermes_rl.tokens
from hermes_rl.tokens.hub import HubTokenizer
from tests.real.hub import Hub, commit_of

COMPONENT = "datasets and huggingface_hub over HTTP"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(300)]
SMALL = Path(hermes_rl.tokens.__file__).with_name("small")
SPEC = """
version: 1
name: hubbed
dataset: DATASET
prompt: {user: "Say {{ word }}."}
rewards: {said: {fn: exact_match, args: {target: "{{ word }}"}}}
solution: {turns: [{say: "{{ word }}"}]}
servers: {policy: {type: scripted}}
process: {group_size: 1, groups: 2}
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    for revision, words in {"main": ("one", "two"), "old": ("uno", "due")}.items():
        folder = tmp_path / "hub/datasets/org/words" / revision
        folder.mkdir(parents=True)
        rows = [{"word": word, "filling": "x" * 5000} for word in words]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "README.md").write_text("---\nconfigs: [{config_name: default, data_files: train.jsonl}]\n---\n")
    with Hub(tmp_path / "hub") as server:
        yield server


def python(hub: Hub | str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a separate process with that hub and an empty cache, since libraries read their variables once."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "http", "HTTP"))}
    environ = {**kept, "HF_ENDPOINT": hub if isinstance(hub, str) else hub.url, "HF_HOME": str(folder / "home")}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=250)


def hermes(hub: Hub | str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(hub, folder, "-m", "hermes_rl.cli.main", *words)


def played(hub: Hub | str, folder: Path, dataset: dict[str, Any], out: str = "run") -> list[str]:
    """Return the texts of the rollouts of a run, which must succeed."""
    (folder / "hubbed.yaml").write_text(SPEC.replace("DATASET", json.dumps(dataset)))
    done = hermes(hub, folder, "run", "hubbed.yaml", "process", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / out / "rollouts.jsonl").read_text("utf-8").splitlines()]
    return sorted(line["messages"][-1]["content"] for line in lines)


def test_dataset_loads_over_http_at_the_revision_of_the_spec(hub: Hub, tmp_path: Path) -> None:
    dataset = {"path": "org/words", "split": "train"}
    assert played(hub, tmp_path, dataset) == ["one", "two"]
    assert played(hub, tmp_path, {**dataset, "revision": "old"}, "old") == ["due", "uno"]
    assert played(hub, tmp_path, {**dataset, "revision": commit_of("old")}, "commit") == ["due", "uno"]
    assert played(hub, tmp_path, {**dataset, "streaming": True}, "stream") == ["one", "two"]


@pytest.mark.parametrize(("dataset", "said"), [
    ({"path": "org/words", "revision": "nowhere"}, "nowhere"), ({"path": "org/none"}, "org/none"),
])  # fmt: skip
def test_missing_dataset_or_revision_does_not_use_the_fallback(
    dataset: dict[str, Any], said: str, hub: Hub, tmp_path: Path
) -> None:
    full = {**dataset, "split": "train", "fallback": {"items": [{"word": "own"}]}}
    (tmp_path / "hubbed.yaml").write_text(SPEC.replace("DATASET", json.dumps(full)))
    done = hermes(hub, tmp_path, "run", "hubbed.yaml", "process", "--out", "run")
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("status", [503, 429, 500])
def test_a_hub_that_is_busy_for_a_while_costs_nothing(status: int, hub: Hub, tmp_path: Path) -> None:
    left = {"": 2}

    def trouble(path: str) -> int:
        left[""] -= 1
        return status if left[""] >= 0 else 0

    hub.trouble = trouble
    assert played(hub, tmp_path, {"path": "org/words", "split": "train"}) == ["one", "two"]


def test_a_hub_that_stays_busy_means_the_fallback(hub: Hub, tmp_path: Path) -> None:
    hub.trouble = lambda path: 429
    dataset = {"path": "org/words", "split": "train", "fallback": {"items": [{"word": "own"}, {"word": "my"}]}}
    assert played(hub, tmp_path, dataset) == ["my", "own"]


def test_a_hub_that_breaks_off_downloads_means_the_fallback(hub: Hub, tmp_path: Path) -> None:
    hub.trouble = lambda path: -1 if path.endswith(".jsonl") else 0
    dataset = {"path": "org/words", "split": "train", "fallback": {"items": [{"word": "own"}, {"word": "my"}]}}
    assert played(hub, tmp_path, dataset) == ["my", "own"]


def test_interrupted_download_is_retried(hub: Hub, tmp_path: Path) -> None:
    broken: list[str] = []

    def trouble(path: str) -> int:
        if path.endswith(".jsonl") and not broken:
            broken.append(path)
            return -1
        return 0

    hub.trouble = trouble
    assert played(hub, tmp_path, {"path": "org/words", "split": "train"}) == ["one", "two"]
    assert broken


ENCODE = "import sys; from hermes_rl.tokens.hub import HubTokenizer as H; print(H('org/tiny').encode('hello world'))"


def have_tiny(hub: Hub) -> None:
    """Add a tokenizer with a model configuration."""
    folder = hub.root / "models/org/tiny/main"
    shutil.copytree(SMALL, folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')


def encoded(hub: Hub | str, folder: Path) -> subprocess.CompletedProcess[str]:
    return python(hub, folder, "-c", ENCODE)


def test_a_tokenizer_comes_over_http_and_stays_in_the_cache(hub: Hub, tmp_path: Path) -> None:
    have_tiny(hub)
    first = encoded(hub, tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip() == str(HubTokenizer(str(SMALL)).encode("hello world"))
    assert f"/org/tiny/resolve/{commit_of('main')}/tokenizer.json" in hub.asked
    assert encoded("http://127.0.0.1:1", tmp_path).stdout == first.stdout, "what is there needs no hub"


def test_a_tokenizer_whose_download_breaks_off_is_one_clear_error(hub: Hub, tmp_path: Path) -> None:
    have_tiny(hub)
    hub.trouble = lambda path: -1 if path.endswith("tokenizer.json") else 0
    done = encoded(hub, tmp_path)
    assert done.returncode != 0
    assert "TokenizerUnavailable: the tokenizer 'org/tiny' cannot be loaded" in done.stderr
