"""A generator that raises is the spec's mistake: said with its place, not shown as a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.data.load import load_rows
from hermes_rl.errors import UserError
from hermes_rl.spec.load import parse_spec


def test_the_line_that_raised_is_named(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("def rows(*, seed, split):\n    yield {'q': 1}\n    raise KeyError('gone')\n")
    spec = parse_spec("dataset: {generator: 'tasks.py:rows'}\nprompt: {user: '{{ q }}'}\n", folder=tmp_path)
    with pytest.raises(UserError, match=r"raised KeyError: 'gone' at .*tasks\.py:3"):
        list(load_rows(spec, "train", notify=print))
