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


WARNED = """
name: warned
dataset: {key: q, items: [{q: "2+2", a: "4"}, {q: "3+3", a: "6"}, {q: "4+5", a: "9"}]}
prompt: {user: "{{ q }}?"}
rewards: {right: {fn: exact_match, args: {target: "{{ a }}"}}}
servers: {policy: {type: scripted}}
"""


def test_warnings_are_errors_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(WARNED)
    assert run("spec.yaml", cwd=tmp_path).returncode == 0
    strict = run("spec.yaml", "--strict", cwd=tmp_path)
    assert strict.returncode == 2 and "[no_solution]" in strict.stderr and "warning:" not in strict.stderr
    (tmp_path / "spec.yaml").write_text(WARNED + "checks: {no_solution: off}\n")
    assert run("spec.yaml", "--strict", cwd=tmp_path).returncode == 0


def test_all_rows_are_summed_up_as_json(tmp_path: Path) -> None:
    wrong = """solution: {turns: [{say: "{{ 'x' if q == '3+3' else a }}"}]}\n"""
    (tmp_path / "spec.yaml").write_text(WARNED + wrong)
    (verdict,) = json.loads(run("spec.yaml", "--rows", "all", "--json", cwd=tmp_path).stdout)
    assert verdict["rows"]["rows"] == 3 and verdict["rows"]["failing"] == ["3+3"]
    assert verdict["rows"]["blind"]["the prompt"] == {"rows": 3, "mean": 0, "passing": 0}
    assert [each["check"] for each in verdict["findings"]] == ["gold_fails_on_some_rows"]
    refused = run("spec.yaml", "--rows", "none", cwd=tmp_path)
    assert refused.returncode == 2 and "--rows none: expected a number of rows, such as 100, or `all`" in refused.stderr


def test_output_of_user_code_is_not_mixed_with_the_verdicts(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text("def rows(**_):\n    print('making rows')\n    yield {'q': '2+2', 'a': '4'}\n")
    (tmp_path / "spec.yaml").write_text(
        WARNED.replace("items: [" + WARNED.partition("items: [")[2].partition("]}")[0] + "]", "generator: rows.py:rows")
    )
    done = run("spec.yaml", "--rows", "1", "--json", cwd=tmp_path)
    (verdict,) = json.loads(done.stdout)
    assert verdict["rows"]["rows"] == 1 and "making rows" in done.stderr
