"""`hermes-rl run … --dry-run` foretells what the run then does, and leaves everything as it was."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hermes_rl.cli.main import status


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """What lies in a folder, and when it was written."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*") if path.is_file()}


def foretold(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert status(["run", "terminal-files", *arguments, "--dry-run"]) == 0
    return capsys.readouterr().out


def recorded(run: Path) -> int:
    return len((run / "rollouts.jsonl").read_text().splitlines())


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


SMALL = ("process", "--set", "process.groups=2", "--out", "run")


def test_dry_run_of_a_new_run_counts_all_rollouts_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = foretold(capsys, *SMALL)
    assert "run directory: run (new)" in out
    assert "3 rows; 2 groups of 4: 8 rollouts" in out
    assert "to run: 8 rollouts, at most 64 model calls" in out
    assert "prompt of row 20223e46752dc1ce: 2073 tokens: Create the file `greeting.txt`" in out
    assert "--sample 5 measures" in out
    assert tree(tmp_path) == {}


def test_groups_that_a_trainer_cannot_use_are_foretold(capsys: pytest.CaptureFixture[str]) -> None:
    serve = ("serve", "--set", "serve.api_url=http://127.0.0.1:9")
    assert "WARNING" not in foretold(capsys, *serve)
    out = foretold(capsys, *serve, "--set", "serve.max_token_length=1000")
    assert re.search(r"WARNING: a prompt has 2\d{3} tokens already, and .* is 1000: .* not sent", out)
    same = ("--set", "rewards={length_penalty: {args: {soft_limit: 100000, hard_limit: 100001}, range: [-1, 0]}}")
    sampled = foretold(capsys, *serve, *same, "--sample", "1", "--set", "serve.group_size=2")
    assert "WARNING: each measured group is uniform or excluded, so a trainer receives none of them" in sampled


def test_dry_run_reports_an_unavailable_tokenizer_once(capsys: pytest.CaptureFixture[str]) -> None:
    server = "servers.policy={type: vllm, base_url: 'http://127.0.0.1:9/v1', model: m, tokenizer: ./none}"
    (line,) = [one for one in foretold(capsys, *SMALL, "--set", server).splitlines() if one.startswith("tokenizer:")]
    assert line.count("cannot be loaded") == 1


def test_what_it_foretells_is_what_the_run_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert status(["run", "terminal-files", *SMALL, "--quiet"]) == 0
    before = tree(tmp_path)
    assert "no rollouts are left to run" in foretold(capsys, *SMALL)
    more = ("process", "--set", "process.groups=3", "--out", "run")
    out = foretold(capsys, *more, "--set", "rewards.concise.args.best=1")
    assert "reused from the earlier run: 8 rollouts" in out
    assert "to grade again, because rewards changed: concise" in out
    assert "to run: 4 rollouts" in out
    assert "to score again" in foretold(capsys, *more, "--set", "rewards.concise.weight=0.5")
    assert tree(tmp_path) == before
    assert status(["run", "terminal-files", *more, "--quiet", "--set", "rewards.concise.args.best=1"]) == 0
    assert recorded(run) == 8 + 4
    said = capsys.readouterr().err
    assert "concise has changed: regrading 8 recorded rollouts" in said


def test_what_would_be_refused_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["run", "terminal-files", *SMALL, "--quiet"]) == 0
    capsys.readouterr()
    for change, said in (
        ("rewards.file_matches.args.path=x", "rewards.file_matches has changed and cannot be computed"),
        ("agent.max_turns=3", "changed: agent"),
    ):
        assert status(["run", "terminal-files", *SMALL, "--dry-run", "--set", change]) == 2
        assert said in capsys.readouterr().err


def test_another_spec_is_said_to_be_another_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["run", "terminal-files", "process", "--set", "process.groups=1", "--quiet"]) == 0
    out = foretold(capsys, "process", "--set", "process.groups=1", "--set", "agent.max_turns=3")
    assert "agent changed since outputs/terminal-files/process-scripted-" in out
    assert "to run: 4 rollouts, at most 12 model calls" in out


def test_dry_run_counts_retries_of_infrastructure_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["run", "terminal-files", "evaluate", "--out", "run", "--quiet"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    lines[0] |= {"state": "failed", "score": None, "stop_reason": "sandbox_failure", "error": "lost"}
    (tmp_path / "run" / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = foretold(capsys, "evaluate", "--out", "run")
    assert "to retry, because infrastructure failed: 1 rollout" in out
    assert "to run: 1 rollout," in out


def test_a_sample_measures_and_prices_make_a_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prices.json").write_text('{"scripted": {"prompt": 1, "completion": 10}}')
    out = foretold(capsys, *SMALL, "--sample", "1", "--prices", "prices.json")
    measured = re.search(r"measured on 4 rollouts of a sample of 1 rows: 2 calls, (\d+) prompt and (\d+) compl", out)
    assert measured is not None
    cost = re.search(r"cost: about ([\d.]+) \$", out)
    assert cost is not None
    assert float(cost[1]) == pytest.approx(8 * (int(measured[1]) + 10 * int(measured[2])) / 1e6, abs=0.006)
    assert list(tree(tmp_path)) == [str(tmp_path / "prices.json")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sample", "2"], "are about --dry-run"),
        (["--dry-run", "--prices", "none.json"], "none.json cannot be read"),
        (["--dry-run", "--prices", "other.json"], "does not say the price of the model scripted"),
        (["--dry-run", "--prices", "broken.json"], "is not of the form"),
        (["--dry-run", "--prices", "flat.json"], "prompt: Input should be"),
        (["--dry-run", "--prices", "below.json"], "scripted.prompt: Input should be greater than or equal to 0"),
    ],
)
def test_dry_run_reports_invalid_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    (tmp_path / "other.json").write_text('{"other": {"prompt": 1, "completion": 10}}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "flat.json").write_text('{"prompt": 1, "completion": 10}')
    (tmp_path / "below.json").write_text('{"scripted": {"prompt": -1, "completion": 10}}')
    assert status(["run", "terminal-files", *SMALL, *arguments]) == 2
    assert said in capsys.readouterr().err
