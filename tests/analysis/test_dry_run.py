"""What a dry run foretells of tokens is what the whole run then counts, within a fifth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from hermes_rl.analysis.dry_run import DryRun, dry_run
from hermes_rl.cli.init import start
from hermes_rl.runs.evaluate import run_evaluate
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.spec.overrides import parse_extra_args

WITHIN = 0.2
Used = Mapping[str, Mapping[str, float]]

GROWING = """
version: 1
name: growing
dataset: {generator: "rows.py:rows"}
prompt: {user: "{{ text }}"}
rewards: {long: {fn: "rows.py:long"}}
solution: {turns: [{say: "{{ text }}"}]}
servers: {policy: {type: scripted}}
process: {groups: 40, group_size: 2}
"""
"""Rows that become longer and longer, as where data is sorted by difficulty."""
UNIFORM = """
version: 1
name: uniform
dataset: {generator: "rows.py:alike"}
prompt: {user: "{{ text }}"}
rewards: {right: {fn: "rows.py:right"}}
solution: {turns: [{say: "{{ text }}"}]}
servers: {policy: {type: scripted}}
process: {groups: 60, group_size: 2, drop_uniform: true}
"""
"""Every other row is solved by all members of its group, so that its group is left out and another one is played."""
OWN = {"growing": GROWING, "uniform": UNIFORM}
CODE = """
def rows(*, seed, split):
    for number in range(120):
        yield {"text": "word " * (4 + number)}

def alike(*, seed, split):
    for number in range(120):
        yield {"text": "word " * (20 + number % 2) + str(number)}

def long(result):
    return float(len(result.final_response))

def right(group, item=None):
    return [float(place if len(one.messages[0]["content"].split()) % 2 else 1) for place, one in enumerate(group)]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(mode: Mode) -> RunOptions:
    return RunOptions(mode, Path("run"), environ={}, progress=Progress(quiet=True))


async def played(spec: Spec, mode: Mode) -> Used:
    await (run_evaluate(spec, launch(mode)) if mode == "evaluate" else run_process(spec, launch(mode)))
    usage: Used = json.loads(Path("run/run.json").read_text())["usage"]
    return usage


def require_close(foretold: DryRun, used: Used, before: Used | None = None) -> None:
    assert foretold.measured is not None
    assert set(foretold.measured.roles) == set(used)
    for role, counts in used.items():
        one, earlier = foretold.measured.roles[role], (before or {}).get(role, {})
        for name, each in (("prompt_tokens", one.prompt_tokens), ("completion_tokens", one.completion_tokens)):
            assert each * foretold.played == pytest.approx(counts[name] - earlier.get(name, 0), rel=WITHIN), (
                role,
                name,
            )


def made(what: str, here: Path, *changes: str) -> Spec:
    """Make the files of a spec, and load it."""
    if what in OWN:
        (here / "rows.py").write_text(CODE)
        (here / f"{what}.yaml").write_text(OWN[what])
    elif what.startswith("init "):
        start(what[5:], what[5:], here)
    return source_at(what, *changes)


def source_at(what: str, *changes: str) -> Spec:
    source = f"{what}.yaml" if what in OWN else what.replace("init ", "./")
    return load_spec(source, demo=True, overrides=parse_extra_args((), changes))


SPECS = [
    "init tools", "init user", "init judge", "growing", "uniform",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("init game", "tool-calling", "init swe", "code")),
]  # fmt: skip


@pytest.mark.parametrize("what", SPECS)
async def test_a_sample_foretells_the_tokens_of_the_run(what: str, here: Path) -> None:
    spec = made(what, here)
    foretold = await dry_run(spec, launch("process"), sample=16 if what == "uniform" else 5)
    require_close(foretold, await played(spec, "process"))


@pytest.mark.parametrize("what", [one for one in SPECS if one != "growing"])
async def test_what_is_there_foretells_the_tokens_of_the_rest(what: str, here: Path) -> None:
    whole = made(what, here).process.groups
    before = await played(source_at(what, f"process.groups={whole // 2}"), "process")
    spec = source_at(what)
    foretold = await dry_run(spec, launch("process"))
    require_close(foretold, await played(spec, "process"), before)


@pytest.mark.parametrize("what", ["init game", "init user", "tool-calling"])
async def test_an_evaluation_too_also_of_rows_without_end(what: str, here: Path) -> None:
    spec = made(what, here)
    foretold = await dry_run(spec, launch("evaluate"), sample=5)
    assert foretold.play is not None
    used = await played(spec, "evaluate")
    assert len(Path("run/rollouts.jsonl").read_text().splitlines()) == foretold.play
    require_close(foretold, used)


async def test_dry_run_includes_replacements_of_excluded_groups(here: Path) -> None:
    spec = made("uniform", here, "process.groups=10")
    await played(spec, "process")
    assert (await dry_run(spec, launch("process"))).play == 0
    foretold = await dry_run(source_at("uniform", "process.groups=12"), launch("process"))
    assert foretold.play == 4
    assert foretold.measured is not None
    assert foretold.measured.played == pytest.approx(2, rel=0.5)


async def test_dry_run_predicts_no_rollouts_if_every_group_is_excluded(here: Path) -> None:
    spec = made("uniform", here, "rewards.right={fn: exact_match, args: {target: none}}")
    foretold = await dry_run(spec, launch("process"), sample=3)
    assert foretold.measured is not None
    assert foretold.measured.played is None
