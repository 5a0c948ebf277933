"""Every command of the README does what the README says, in a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("bash") for line in block.splitlines() if line]


TESTS = 'pytest -n auto -m "not slow"'
SET_UP, USED = commands()[:2], [command for command in commands()[2:] if command != TESTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("readme")
    (made / "arithmetic.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    return made


def test_set_up_is_what_ci_does() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert SET_UP == ["python3 -m venv .venv && . .venv/bin/activate", "pip install -c constraints.txt -e '.[test]'"]
    assert "--constraint constraints.txt --editable '.[test]'" in ci
    assert TESTS in commands()
    assert f"\n{TESTS} || " in ci
    assert '\npytest -n 2 --dist loadgroup -m "slow and not real" ' in ci


@pytest.mark.parametrize("command", USED)
def test_command_works(command: str, folder: Path) -> None:
    arguments = command.split()
    assert arguments[0] == "hermes-rl"
    done = subprocess.run(
        [sys.executable, "-m", "hermes_rl.cli.main", *arguments[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", sorted(set(re.findall(r"\]\(([\w/.]+)\)", README))))
def test_links_lead_somewhere(page: str) -> None:
    assert (ROOT / page).exists()
