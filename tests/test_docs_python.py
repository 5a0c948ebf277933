"""docs/python.md: every block of code is Python, and those that are whole programs run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import hermes

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)
PROGRAMS = [block for block in BLOCKS if "asyncio.run(main())" in block or "hermes_rl.sync(" in block]


def test_there_are_programs() -> None:
    assert len(PROGRAMS) == 3


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_is_python(block: str) -> None:
    compile(re.sub(r"^    ", "", block, flags=re.MULTILINE) if block.startswith("    ") else block, "<docs>", "exec")


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_runs(program: str, tmp_path: Path) -> None:
    done = hermes(cwd=tmp_path, code=program)
    assert done.returncode == 0, done.stderr
    assert done.stdout
