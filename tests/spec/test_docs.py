"""Every YAML block of the user's page is a spec that loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hermes_rl.spec import parse_spec

PAGE = Path(__file__).parents[2] / "docs" / "spec.md"
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
NEEDED = {
    "dataset": "dataset: {items: [{q: a}]}\n",
    "prompt": "prompt: {user: x}\n",
    "state": "state: world.py:World\n",
}


@pytest.mark.parametrize("block", BLOCKS)
def test_block(block: str) -> None:
    if "extends:" in block:
        block = block.replace("extends: gsm8k.yaml\n", "")
    needed = "".join(text for key, text in NEEDED.items() if not re.search(rf"^{key}:", block, flags=re.MULTILINE))
    parse_spec(needed + block, environ={}, folder=PAGE.parent)


def test_there_are_blocks() -> None:
    assert len(BLOCKS) > 8
