"""Name, tags and note that people give a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hermes_rl.runs.label import FILE, RunLabel
from tests.analysis.recorded import recorded, write_run
from tests.commands import hermes


def test_label_is_written_changed_and_printed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [recorded("a")])
    assert RunLabel.read(run) == RunLabel()
    done = hermes("label", "run", "--name", "step 40", "--tag", "best", "--tag", "new tool", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "name: step 40\ntags: best, new tool\nnote: -\n")
    done = hermes("label", "run", "--remove-tag", "best", "--tag", "last", "--note", "two\nlines", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((run / FILE).read_text()) == {
        "name": "step 40", "tags": ["new tool", "last"], "note": "two\nlines",
    }  # fmt: skip
    assert RunLabel.read(run) == RunLabel("step 40", ("new tool", "last"), "two\nlines")
    assert hermes("label", "run", "--name", "", cwd=tmp_path).stdout.startswith("name: -\n")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--name", "x" * 81), "--name: 81 characters; expected 80 at most"),
        (("--tag", " "), "expected one line of text"),
        (("--tag", "a\nb"), "expected one line of text"),
        (tuple(word for place in range(21) for word in ("--tag", str(place))), "21 tags; expected 20 at most"),
    ],
)
def test_label_beyond_its_limits_is_rejected(tmp_path: Path, options: tuple[str, ...], problem: str) -> None:
    run = write_run(tmp_path / "run", [])
    done = hermes("label", "run", *options, cwd=tmp_path)
    assert done.returncode == 2 and problem in done.stderr
    assert not (run / FILE).exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": 1, "tags": "x", "note": null}', "[" * 9999])
def test_unreadable_label_is_empty(tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path / "run", [])
    (run / FILE).write_text(text)
    assert RunLabel.read(run) == RunLabel()


def test_label_is_not_read_through_a_link(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [])
    (tmp_path / "secret.json").write_text('{"name": "secret"}')
    (run / FILE).symlink_to(tmp_path / "secret.json")
    assert RunLabel.read(run) == RunLabel()
