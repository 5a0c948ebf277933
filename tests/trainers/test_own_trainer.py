"""A trainer outside the package is one file and one line of the spec."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hermes_rl.errors import UserError
from hermes_rl.spec.load import load_spec
from hermes_rl.trainers.registry import own_trainer
from tests.cli.test_run import lines
from tests.commands import LIBRARIES, hermes

SPEC = """
name: counted
dataset: {items: [{n: 1}, {n: 2}, {n: 3}]}
prompt: {user: "Say {{ n }}"}
rewards: {right: {fn: exact_match, args: {target: "{{ n }}"}}}
solution: {turns: [{say: "{{ n }}"}]}
servers: {policy: {type: scripted, error_rate: 0.5, weights_path: /get_weight_version}}
serve: {group_size: 2, trainer: "counts.py:Counts", eval_every: 0}
"""
CLASSES = """
class Nothing:
    def __init__(self, spec):
        pass

class Raises:
    def __init__(self, spec):
        1 / 0

class Numbered(Nothing):
    name, register, state, send, close = 5, 1, 2, 3, 4
"""
TRAINER = Path(__file__).with_name("counts.py")


def write(folder: Path, trainer: str = TRAINER.read_text()) -> Path:
    (folder / "counts.py").write_text(trainer)
    (folder / "spec.yaml").write_text(SPEC)
    return folder / "spec.yaml"


def test_custom_trainer_is_served_by_the_cli_and_resumes(tmp_path: Path) -> None:
    write(tmp_path)
    for steps in ("2", "4"):
        more = ["--out", "run", "--set", f"serve.total_steps={steps}"]
        done = hermes("run", "spec.yaml", "serve", *more, cwd=tmp_path, loaded=LIBRARIES)
        assert done.returncode == 0, done.stderr
    got = lines(tmp_path / "got.jsonl")
    groups = [line["group"] for line in got]
    assert len(groups) == len(set(groups)) >= 4, "every group once, also over the restart"
    assert all(line["scores"] in ([0.0, 1.0], [1.0, 0.0]) and line["exact"] for line in got)
    assert {line["weights"] for line in got} == {0}
    # The trainer may take one more batch before it is told that the first run is over.
    assert re.search(r"resuming at step [23];", done.stderr)


def test_it_takes_no_more_than_forty_lines() -> None:
    code = [line for line in TRAINER.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(code) <= 40


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ("atropoz", "no trainer is named 'atropoz'; did you mean `atropos`"),
        ("counts.py:Missing", "Missing"),
        ("counts.py:Nothing", "gives no trainer: it has no 'name'"),
        ("counts.py:Raises", "counts.py:Raises raised ZeroDivisionError: division by zero"),
        ("counts.py:Numbered", "counts.py:Numbered has the name 5; expected a text"),
    ],
)
def test_invalid_trainer_is_refused_with_a_hint(tmp_path: Path, trainer: str, said: str) -> None:
    spec = write(tmp_path, CLASSES)
    spec.write_text(SPEC.replace("counts.py:Counts", trainer))
    with pytest.raises(UserError, match=said):
        own_trainer(load_spec(spec, mode="serve"))
