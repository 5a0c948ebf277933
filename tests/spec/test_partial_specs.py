"""All problems of a spec are reported at once: a wrong part hides no other problem and causes no false one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.cli.validate import validate_one
from hermes_rl.errors import SpecError
from hermes_rl.spec.load import load_spec

GOOD = """\
version: 1
dataset: {items: [{q: a}]}
prompt: {user: "{{ q }}"}
agent: {max_turns: 5}
toolsets: [file]
sandbox: {image: null, workdir: w}
tools: [{python: code.py:tool}]
state: code.py:World
rewards: {r: {fn: code.py:reward}, s: {fn: code.py:reward}}
servers: {policy: {type: scripted}, judge: {type: scripted}}
user: {system: be kind, server: judge}
process: {groups: 3}
"""
CODE = "def tool():\n    'Do it.'\nclass World:\n    def __init__(self, item): ...\nasync def reward(judge): ...\n"


def found(folder: Path, *changes: tuple[str, str]) -> list[str]:
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (folder / "code.py").write_text(CODE)
    (folder / "s.yaml").write_text(text)
    return [f"{problem.line}: {problem.message}" for problem in validate_one(str(folder / "s.yaml")).problems]


def test_problems_of_all_checks_are_reported(tmp_path: Path) -> None:
    problems = found(
        tmp_path, ("{{ q }}", "{{ qq }}"), ("max_turns: 5", "max_turns: 0"), ("[file]", "[fil]"),
        ("code.py:tool", "cod.py:tool"), ("s: {fn: code.py:reward}", "s: {fn: nosuch}"),
    )  # fmt: skip
    assert [problem.partition(":")[0] for problem in problems] == ["3", "4", "5", "7", "9"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max_turns: 5", "max_turns: 0"),
        ("max_turns: 5", "max_turn: 5"),
        ("items: [{q: a}]", "itms: [{q: a}]"),
        ("items: [{q: a}]", "items: [{}], columns: {q: a}, limit: 0"),
        ("dataset:", "datasets:"),
        ("prompt: {user:", "prompt: {usr:"),
        ("servers:", "serverss:"),
        ("servers: {policy: {type: scripted}, judge: {type: scripted}}", "servers: 3"),
        ("judge: {type: scripted}", "judge: {type: opnai}"),
        ("judge: {type: scripted}", "judge: {type: openai}"),
        ("r: {fn: code.py:reward}", "r: {fn: code.py:reward, wieght: 1}"),
        ("r: {fn: code.py:reward}", "r: 3, x: {fn: code.py:reward}"),
        ("groups: 3", "groups: 3, nosuch: 1"),
        ("image: null", "backend: 3, image: debian"),
        ("tools: [{python", "tools: [{state: x, python"),
        ("state: code.py:World", "state: code.py"),
        ("user: {system", "user: {sytem"),
        ("groups: 3", "groups: 0"),
        ("workdir: w", "workdir: '${NO_SUCH_VARIABLE_HERE}'"),
    ],
)
def test_sections_skipped_after_an_error_cause_no_further_problems(tmp_path: Path, old: str, new: str) -> None:
    problems = found(tmp_path, (old, new))
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "s.yaml")
    assert problems == [f"{problem.line}: {problem.message}" for problem in caught.value.problems]


def test_the_whole_is_valid(tmp_path: Path) -> None:
    assert found(tmp_path) == []
