"""Every command of the README does what the README says, in a folder of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import hermes

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("bash") for line in block.splitlines() if line]


TESTS = 'pytest -n auto -m "not slow"'
SET_UP, USED = commands()[:2], [command for command in commands()[2:] if command != TESTS]


def test_set_up_is_what_ci_does() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert SET_UP == ["python3 -m venv .venv && . .venv/bin/activate", "pip install -c constraints.txt -e ."]
    assert "--constraint constraints.txt --editable '.[test," in ci
    assert TESTS in commands()
    assert f"\n{TESTS} " in ci
    assert ci.index(TESTS) < ci.index("\nexport THOROUGH=1\n") < ci.index('\npytest -n 3 -m "slow and not real" ')


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_commands_work_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "arithmetic.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    for command in USED:
        program, *arguments = command.split()
        assert program == "hermes-rl"
        done = hermes(*arguments, cwd=tmp_path)
        assert done.returncode == 0, f"{command}: {done.stderr}"


@pytest.mark.parametrize("page", sorted(set(re.findall(r"\]\(([\w/.]+)\)", README))))
def test_links_lead_somewhere(page: str) -> None:
    assert (ROOT / page).exists()
