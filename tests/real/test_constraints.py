"""pip can solve the documented installations beside other frameworks with constraints.txt."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", ["verifiers", "openenv"])
def test_the_documented_command_with_constraints_is_solvable(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "integrations" / f"{page}.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^pip install -c .*$", text, re.MULTILINE)
    assert f"-e '.[{page}]'" in command
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "v")], check=True)
    done = subprocess.run(
        ["bash", "-c", command.replace("pip install", f"{tmp_path}/v/bin/pip install --dry-run", 1)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(rf"Would install .*{page}-\d", done.stdout), done.stdout
