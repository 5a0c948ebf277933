"""Recipes of agent programs: each is laid below the spec that names it, and behind that nothing knows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_rl.errors import SpecError
from hermes_rl.spec.load import load_spec, parse_spec
from hermes_rl.spec.merge import read_spec_text
from hermes_rl.spec.model import Spec
from hermes_rl.spec.nodes import SourceText
from hermes_rl.spec.overrides import parse_extra_args
from hermes_rl.spec.recipes import ABOUT, about, shipped_recipes, with_recipe
from hermes_rl.spec.schema import spec_json_schema

SPEC = """
dataset: {items: [{word: hello}]}
prompt: {user: "Write {{ word }}."}
rewards: {right: {fn: exact_match, args: {target: x}}}
"""
RECIPE = """
version: 1.2
sandbox:
  npm: ["tool@1.2.3"]
  setup: ["mkdir -p /tmp/tool"]
  env: {A: recipe, B: recipe}
agent:
  max_turns: 7
  timeout: 70
  program:
    command: [tool, "{{ prompt }}"]
    env: {KEY: "{{ token }}", SIZE: "{{ context }}"}
    files: [{to: /tmp/tool/config, content: "{{ endpoint }} {{ context * 2 }}"}]
"""


def spec_with(folder: Path, more: str, **given: Any) -> Spec:
    (folder / "tool.yaml").write_text(RECIPE)
    return parse_spec(SPEC + more, folder=folder, **given)


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_is_complete(name: str) -> None:
    spec = parse_spec(f"{SPEC}agent: {{program: {name}}}")
    program, said = spec.agent.program, about(shipped_recipes()[name])
    assert program is not None
    assert program.name == f"{name} {said['version']}"
    assert program.command
    assert said["dialect"] in ("chat", "responses", "messages", "google")
    assert set(said) == set(ABOUT)
    packages = [*spec.sandbox.npm, *spec.sandbox.python]
    assert any(said["version"] in package for package in packages), packages


def test_the_spec_wins_and_lists_are_joined(tmp_path: Path) -> None:
    spec = spec_with(
        tmp_path,
        "agent: {program: {recipe: ./tool.yaml, env: {KEY: own}, files: [{to: b, content: c}]}, timeout: 5}\n"
        "sandbox: {workdir: w, setup: [ls], env: {A: spec}, files: [{to: a, content: b}]}\n",
    )
    program = spec.agent.program
    assert program is not None
    assert (program.name, program.recipe, program.command) == ("tool 1.2", None, ("tool", "{{ prompt }}"))
    assert (spec.agent.max_turns, spec.agent.timeout) == (7, 5)
    assert dict(program.env) == {"KEY": "own", "SIZE": "{{ context }}"}
    assert [file.to for file in program.files] == ["/tmp/tool/config", "b"]
    assert spec.sandbox.npm == ("tool@1.2.3",)
    assert spec.sandbox.setup == ("mkdir -p /tmp/tool", "ls")
    assert dict(spec.sandbox.env) == {"A": "spec", "B": "recipe"}


def test_what_a_run_writes_down_has_the_program_in_full(tmp_path: Path) -> None:
    spec = spec_with(tmp_path, "agent: {program: ./tool.yaml}")
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec.resolved()))
    (tmp_path / "tool.yaml").unlink()
    assert load_spec(tmp_path / "spec.yaml", resolved=True) == spec.model_copy(update={"name": "spec"})


def test_the_command_line_names_one(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC + "agent: {program: {command: [other], env: {OTHER: x}}}")

    def changed(*sets: str) -> Spec:
        return load_spec(tmp_path / "spec.yaml", overrides=parse_extra_args([], sets))

    for option in ("agent.program=codex", "agent.program.recipe=codex"):
        program = changed(option).agent.program
        assert program is not None
        assert str(program.name).startswith("codex ")
        assert "OTHER" not in program.env
    program = changed("agent.program=codex", "agent.program.train=[main]").agent.program
    assert program is not None
    assert (program.train, program.command[0]) == (("main",), "sh")


def test_a_child_spec_takes_another_program(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(SPEC + "agent: {program: {command: [other], env: {OTHER: x}}}")
    (tmp_path / "child.yaml").write_text("extends: parent.yaml\nagent: {program: codex}")
    program = load_spec(tmp_path / "child.yaml").agent.program
    assert program is not None
    assert str(program.name).startswith("codex ")


@pytest.mark.parametrize(
    ("recipe", "more", "problem"),
    [
        (RECIPE, "agent: {program: codx}", r"<text>:5:18: there is no agent program `codx`; did you mean `codex`"),
        (RECIPE, "agent: {program: ./none.yaml}", r"<text>:5:18: cannot be read: ./none.yaml: No such file"),
        (
            RECIPE,
            "agent: {program: {env: {A: b}}}",
            r"<text>:5:9: a program needs a `command`, a `python` function, or the `recipe`",
        ),
        (RECIPE + "sandox: {}", "agent: {program: ./tool.yaml}", r"tool.yaml:14:1: unknown key `sandox` of a recipe"),
        ("- a", "agent: {program: ./tool.yaml}", r"tool.yaml:1:1: a recipe is a mapping"),
        ("", "agent: {program: ./tool.yaml}", r"a recipe is a mapping"),
        ("a: [", "agent: {program: ./tool.yaml}", r"tool.yaml:1:"),
        ("agent: {program: codex}", "agent: {program: ./tool.yaml}", r"tool.yaml:1:18: a recipe starts a program"),
        (RECIPE.replace("setup:", "setp:"), "agent: {program: ./tool.yaml}", r"tool.yaml:5:3: unknown key `setp`"),
        (RECIPE.replace("70", "no"), "agent: {program: ./tool.yaml}", r"tool.yaml:9:12: expected a number"),
        (RECIPE.replace("token }}", "token"), "agent: {program: ./tool.yaml}", r"tool.yaml:12:16: "),
    ],
)
def test_recipe_problem_is_reported_with_its_location(tmp_path: Path, recipe: str, more: str, problem: str) -> None:
    (tmp_path / "tool.yaml").write_text(recipe)
    with pytest.raises(SpecError, match=problem) as caught:
        parse_spec(SPEC + more, folder=tmp_path)
    assert len(caught.value.problems) == 1, caught.value


def test_a_spec_of_a_repository_names_recipes_of_it_alone(tmp_path: Path) -> None:
    root, _ = read_spec_text("agent: {program: ../tool.yaml}", SourceText("spec.yaml", tmp_path / "in"))
    assert root is not None
    (tmp_path / "tool.yaml").write_text(RECIPE)
    (problem,) = with_recipe(root, tmp_path / "in")[1]
    assert "a spec of a repository names files of it alone" in problem.message
    assert with_recipe(root, tmp_path)[1] == []


def test_editors_take_a_name() -> None:
    assert {"type": "string"} in spec_json_schema()["$defs"]["Agent"]["properties"]["program"]["anyOf"]


def test_recipe_provides_defaults_for_its_seat_and_the_sandbox(tmp_path: Path) -> None:
    spec = spec_with(
        tmp_path,
        "agents: {self: {agent: {program: {recipe: ./tool.yaml, env: {KEY: own}}, timeout: 5}},\n"
        "  other: {agent: {program: ./tool.yaml}}, third: {}}\n"
        "schedule: alternate\n",
    )
    own, other, third = (seat.agent for seat in spec.agents.values())
    assert own.program is not None and other.program is not None and third.program is None
    assert (own.program.command, dict(own.program.env)["KEY"], own.timeout) == (("tool", "{{ prompt }}"), "own", 5)
    assert (dict(other.program.env)["KEY"], other.timeout, other.max_turns) == ("{{ token }}", 70, 7)
    assert (spec.sandbox.npm, spec.sandbox.setup) == (("tool@1.2.3",), ("mkdir -p /tmp/tool",)), "once for both"
    assert dict(spec.sandbox.env) == {"A": "recipe", "B": "recipe"} and spec.agent.timeout is None
    with pytest.raises(SpecError, match=r"<text>:5:31: there is no agent program `codx`; did you mean `codex`"):
        spec_with(tmp_path, "agents: {a: {agent: {program: codx}}, b: {}}\nschedule: alternate\n")
