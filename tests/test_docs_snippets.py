"""Every block of code in docs/ and the README is what it says: a spec that loads, Python that compiles, shell to read.

Blocks that are whole programs are run besides, by the tests of their pages (`test_docs_python.py`, `test_tutorial.py`).
"""

from __future__ import annotations

import ast
import re
import subprocess
import textwrap
from pathlib import Path

import pytest
import typer
import yaml

from hermes_rl import open_env
from hermes_rl.cli.commands import app
from hermes_rl.spec.load import parse_spec
from tests.commands import hermes

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)(?: title=\S+)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDED = {
    "dataset": "dataset: {items: [{q: a}]}\n",
    "prompt": "prompt: {user: x}\n",
    "state": "state: world.py:World\n",
}
# What YAML of other programs begins with; anything else is a spec, or a part of one.
OF_OTHERS = (
    "apiVersion: ray.io/v1",
    "# NeMo Gym's configuration",
    "task: capitals",
    "rl: grpo",
    "# hermes.yaml",
    "- {name:",
    "set:\n  name: small-models",
)


def blocks(language: str) -> list[pytest.ParameterSet]:
    return [
        pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, (kind, text) in enumerate(FENCE.findall(page.read_text(encoding="utf-8")))
        if kind == language
    ]


SPECS = [block for block in blocks("yaml") if not str(block.values[0]).startswith(OF_OTHERS)]
OTHERS = [block for block in blocks("yaml") if str(block.values[0]).startswith(OF_OTHERS)]


@pytest.mark.parametrize("text", SPECS)
def test_yaml_is_a_spec_or_a_part_of_one(text: str) -> None:
    text = text.replace("extends: gsm8k.yaml\n", "")
    needed = "".join(given for key, given in NEEDED.items() if not re.search(rf"^{key}:", text, flags=re.MULTILINE))
    parse_spec(needed + text, environ={}, folder=ROOT / "docs")


@pytest.mark.parametrize("text", OTHERS)
def test_yaml_of_another_program_is_yaml(text: str) -> None:
    assert yaml.safe_load(text)


# The excerpts of docs/architecture.md are compared with the files that they are taken of.
@pytest.mark.parametrize("text", [block for block in blocks("python") if "architecture.md" not in str(block.id)])
def test_python_compiles(text: str) -> None:
    compile(textwrap.dedent(text), "<docs>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)  # as in a notebook


@pytest.mark.parametrize("text", blocks("bash"))
def test_shell_is_read_and_names_commands_that_are_there(text: str) -> None:
    read = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False, timeout=20)
    assert read.returncode == 0, read.stderr
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, rest in re.findall(r"^hermes-rl ([a-z-]+)(.*)$", text, re.MULTILINE):
        assert name in commands
        known = {option for parameter in commands[name].params for option in parameter.opts}
        asked = set(re.findall(r" (--[a-z-]+)(?=[ =]|$)", rest))
        assert asked <= known | {"--set"}, f"hermes-rl {name} has no {asked - known}"


def examples() -> list[pytest.ParameterSet]:
    """The specs of docs/spec.md that have a name and a solution."""
    specs = [text for kind, text in FENCE.findall((ROOT / "docs" / "spec.md").read_text("utf-8")) if kind == "yaml"]
    named = [text for text in specs if re.match(r"name: (\w+)\n", text) and "\nsolution:" in text]
    return [pytest.param(text, id=text.split("\n")[0].removeprefix("name: ")) for text in named]


@pytest.mark.parametrize("text", examples())
async def test_spec_examples_reward_only_their_solution(text: str, tmp_path: Path) -> None:
    """With the code that stands beside them; their solution earns more than saying nothing."""
    for kind, code in FENCE.findall((ROOT / "docs" / "spec.md").read_text("utf-8")):
        name = re.match(r"# (\w+\.py), beside the spec\n", code)
        if kind == "python" and name:
            (tmp_path / name[1]).write_text(code)

    async def scores(text: str) -> list[float | None]:
        async with open_env(parse_spec(text, folder=tmp_path)) as env:
            rollouts = [await env.run(row) for row in env.rows()]
        assert [rollout.error for rollout in rollouts] == [None] * len(rollouts)
        return [rollout.score for rollout in rollouts]

    gold = await scores(text)
    turns = '{user: "Well?"}, {say: "."}' if "server: user" in text else '{say: "."}'
    nothing = f"solution: {{turns: [{turns}]}}\n"
    silent = await scores(re.sub(r"^solution:.*?(?=^\w|\Z)", nothing, text, flags=re.MULTILINE | re.DOTALL))
    assert all(score is not None and score >= 0.9 for score in gold), gold
    assert all(score is not None and score < 0.9 for score in silent), silent


def test_spec_docs_have_an_example_of_every_stateful_option() -> None:
    text = "\n".join(str(example.values[0]) for example in examples())
    words = (
        "speaks_first: true\n  turns:",
        "state: answer",
        "speaks_first:",
        "transform:",
        "max_agent_turns:",
        "min_reward:",
        "per_step:",
        "isolate: process",
    )
    words += (
        "done:",
        "before_user_turn:",
        "close:",
        "ends_rollout:",
        "schemas:",
        "decorated_with:",
        "names:",
        "arguments: strict",
    )
    words += (
        "arguments: repair",
        "max_tool_errors:",
        "combine:",
        "environment_rewards:",
        "user_turns:",
        "tool_errors:",
    )
    assert [word for word in words if word not in text] == []


@pytest.mark.slow
def test_commands_about_the_first_run_do_what_the_pages_say(tmp_path: Path) -> None:
    pages = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("index.md", "reading.md", "tokens.md")]
    given = "".join(text for page in pages for _, text in FENCE.findall(page))
    lines = re.findall(r"^(?:\$ )?hermes-rl (.*)$", given, re.MULTILINE)
    run = [line for line in lines if not line.startswith(("compare a b", "show b", "audit b", "push"))]
    assert len(run) >= 9
    for line in run:
        # No text of a shell but a star, as in `outputs/terminal-files/*`, where there is one run.
        words = [found for word in line.split() for found in sorted(map(str, tmp_path.glob(word))) or [word]]
        done = hermes(*words, cwd=tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def test_there_are_blocks_of_each_kind() -> None:
    assert len(SPECS) > 30
    assert len(OTHERS) == len(OF_OTHERS)
    assert len(blocks("python")) > 25
    assert len(blocks("bash")) > 20


def test_tests_that_pages_name_exist() -> None:
    root = Path(__file__).parents[1]
    named = [
        (page.name, *words)
        for page in (root / "docs").glob("*.md")
        if page.name != "spec-reference.md"  # its examples are of other projects
        for words in re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8"))
    ]
    assert named
    for page, file, name in named:
        assert re.search(rf"def {name}\(", (root / "tests" / file).read_text(encoding="utf-8")), (
            f"{page}: {file}::{name}"
        )
