"""docs/tutorial.md: its files are written, its commands run in order, and what it says they print is printed."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_every_snippet_works(tmp_path: Path) -> None:
    output = ""
    for kind, title, text in BLOCK.findall(PAGE.read_text()):
        if title:
            (tmp_path / title).write_text(text)
        elif kind == "bash":
            ended = subprocess.run(text, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert ended.returncode == 0, ended.stderr
            output = ended.stdout
        else:
            assert text == output
    scores = [json.loads(line)["score"] for line in (tmp_path / "played" / "rollouts.jsonl").read_text().splitlines()]
    assert len(scores) == 20
    assert len(set(scores)) > 1
    assert json.loads((tmp_path / "evaluated" / "metrics.json").read_text())
