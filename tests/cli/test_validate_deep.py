"""`validate --deep` on the command line: a table, the problems, the status."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = ["hermes-rl", "validate", "--deep", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_the_scores_are_printed() -> None:
    ended = run("terminal-files")
    assert ended.returncode == 0, ended.stderr
    assert "gold         1.000\n" in ended.stdout
    assert "terminal-files: valid" in ended.stdout


def test_a_fault_is_status_2(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "version: 1\ndataset: {items: [{q: a}, {q: b}]}\nprompt: {user: '{{ q }}'}\nsolution: {turns: [{say: x}]}\n"
        "rewards: {words: {fn: regex_match, args: {pattern: ''}}}\nservers: {policy: {type: scripted}}\n"
    )
    ended = run(str(spec), "--json", cwd=tmp_path)
    assert ended.returncode == 2
    (verdict,) = json.loads(ended.stdout)
    assert "every answer scores 1" in verdict["problems"][0]["message"]
    assert verdict["scores"]["gold"] == 1.0
