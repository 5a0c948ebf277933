"""docs/trainers.md: its programs run, and its commands do what the page says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from hermes_rl.cli.main import status
from tests.commands import hermes

PAGE = (Path(__file__).parents[1] / "docs" / "trainers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROGRAMS = [block for block in BLOCKS if "asyncio.run(main())" in block]


def run(program: str, folder: Path) -> list[str]:
    done = hermes(cwd=folder, code=program)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_rows_for_kto_have_prompt_answer_and_label(tmp_path: Path) -> None:
    (program,) = (block for block in PROGRAMS if "kto.jsonl" in block)
    (said,) = run(program, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "kto.jsonl").read_text().splitlines()]
    assert said.startswith(f"{len(rows)} rows")
    assert {row["label"] for row in rows} == {True, False}
    assert len(rows) == 12
    for row in rows:
        assert [message["role"] for message in row["completion"]] == ["assistant"]
        assert row["prompt"][-1]["role"] == "user"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rejection_sampling_keeps_one_right_rollout_of_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^hermes-rl (run terminal-files process .*)$", PAGE, re.MULTILINE)
    words = [*shlex.split(command), "--quiet"]
    assert status(words) == 0
    path = tmp_path / "outputs" / "round-1" / "sft.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert 0 < len(rows) <= 12
    assert {row["score"] for row in rows} == {1.0}
    played = (path.parent / "rollouts.jsonl").read_bytes()
    assert status([word.replace("process.keep_best=1", "process.keep_best=2") for word in words]) == 0
    assert len(path.read_text().splitlines()) > len(rows)
    assert (path.parent / "rollouts.jsonl").read_bytes() == played, "nothing is played again"
