"""Apply recipes: named files that install and start third-party agent programs.

A recipe has the keys `sandbox` and `agent` of a spec, and a short description. `agent.program: codex` merges it below
the spec at loading, its `agent` below the agent of the seat that names it. The spec's values win, mappings merge, and
lists of packages, files and setup are joined, the recipe's first. No later code depends on recipes.
"""

from __future__ import annotations

import posixpath
from dataclasses import replace
from pathlib import Path

from hermes_rl.errors import Problem
from hermes_rl.shipped import shipped_dir
from hermes_rl.spec.merge import expand_shorthand
from hermes_rl.spec.nodes import (
    MappingNode,
    Node,
    NodePath,
    ScalarNode,
    SequenceNode,
    find,
    is_in,
    mapping,
    patterns,
    scalar,
    to_builtins,
)
from hermes_rl.spec.reader import read_file
from hermes_rl.spec.suggest import choices

ABOUT = ("version", "dialect", "licence", "description")
"""Facts about a recipe's program, for `hermes-rl list agents`."""
_KEYS = (*ABOUT, "sandbox", "agent")
_JOINED = patterns("sandbox.python", "sandbox.npm", "sandbox.files", "sandbox.setup", "agent.program.files")
_PROGRAM = ("agent", "program")


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that come with hermes-rl, by name."""
    return {path.stem: path for path in sorted(shipped_dir("agents").glob("*.yaml"))}


def about(path: Path) -> dict[str, str]:
    """Return the facts about a shipped recipe's program, by the names of `ABOUT`."""
    root, _ = read_file(path, str(path))
    assert isinstance(root, MappingNode)
    return {key: node.text for key in ABOUT if isinstance(node := root.get(key), ScalarNode)}


def with_recipe(root: MappingNode, within: Path | None = None) -> tuple[MappingNode, list[Problem]]:
    """Return a spec with the recipes that it names merged below it, and the problems found.

    A recipe must be inside the directory `within`, unless it is a shipped one.
    """
    seats, problems = root.get("agents"), list[Problem]()
    names = seats.entries if isinstance(seats, MappingNode) else ()
    for agent_path in (("agent",), *(("agents", name, "agent") for name in names)):
        root, more = _with_recipe(root, agent_path, within)
        problems += more
    return root, problems


def _with_recipe(
    root: MappingNode, agent_path: tuple[str, ...], within: Path | None
) -> tuple[MappingNode, list[Problem]]:
    """Merge the recipe of the agent at a path below this agent, and below the spec's sandbox."""
    path = (*agent_path, "program")
    written = find(root, path)
    program = None if written is None else expand_shorthand(written, path)
    recipe_node = program.get("recipe") if isinstance(program, MappingNode) else None
    if not isinstance(recipe_node, ScalarNode) or not isinstance(recipe_node.value, str):
        return root, []
    assert isinstance(program, MappingNode)
    recipe, problems = _read_recipe(recipe_node, within)
    if recipe is None:
        return _with_value(root, path, ScalarNode(recipe_node.position, None, "", False, broken=True)), problems
    agent = recipe.get("agent")
    assert isinstance(agent, MappingNode)
    for step in reversed(agent_path):
        agent = mapping(recipe.position, **{step: agent})
    below = replace(recipe, entries={**recipe.without("agent").entries, **agent.entries})
    tree = _laid_below(below, _with_value(root, path, program.without("recipe")), ())
    assert isinstance(tree, MappingNode)
    return tree, problems


def _with_value(root: MappingNode, path: tuple[str, ...], value: Node) -> MappingNode:
    """Return the tree with another value at a path that it has."""
    child = root.get(path[0])
    if path[1:]:
        assert isinstance(child, MappingNode)
        value = _with_value(child, path[1:], value)
    return root.having(**{path[0]: value})


def _read_recipe(recipe_node: ScalarNode, within: Path | None) -> tuple[MappingNode | None, list[Problem]]:
    """Return the part of a recipe that is merged below a spec, or None with the reasons."""
    shipped = shipped_recipes()
    if recipe_node.value in shipped:
        path = shipped[recipe_node.value]
        display_path = str(path)
    elif "/" in recipe_node.value or recipe_node.value.endswith((".yaml", ".yml")):
        source = recipe_node.position.source
        path = (source.folder / Path(recipe_node.value).expanduser()).resolve()
        display_path = posixpath.normpath(
            posixpath.join(posixpath.dirname(source.name) if source.has_lines else "", recipe_node.value)
        )
        if within is not None and not path.is_relative_to(within.resolve()):
            return None, [
                recipe_node.position.problem(f"a spec of a repository names files of it alone; this is {path}")
            ]
    else:
        hint = "; name your own recipe by its path, such as ./agent.yaml"
        message = f"there is no agent program `{recipe_node.value}`{choices(recipe_node.value, shipped)}{hint}"
        return None, [recipe_node.position.problem(message)]
    try:
        root, problems = read_file(path, display_path)
    except OSError as error:
        return None, [recipe_node.position.problem(f"cannot be read: {recipe_node.value}: {error.strerror}")]
    if problems:
        return None, problems
    if not isinstance(root, MappingNode):
        return None, [
            (recipe_node if root is None else root).position.problem("a recipe is a mapping with `sandbox` and `agent`")
        ]
    problems = [
        entry.key.problem(f"unknown key `{key}` of a recipe{choices(key, _KEYS)}")
        for key, entry in root.entries.items()
        if key not in _KEYS
    ]
    program = find(root, _PROGRAM)
    if not isinstance(program, MappingNode) or "recipe" in program.entries or "command" not in program.entries:
        position = root.position if program is None else program.position
        problems.append(position.problem("a recipe starts a program: it needs `agent.program` with a `command`"))
    if problems:
        return None, problems
    assert isinstance(program, MappingNode)
    agent, version = root.get("agent"), root.get("version")
    assert isinstance(agent, MappingNode)
    if "name" not in program.entries:
        name_parts = [path.stem, *([version.text] if isinstance(version, ScalarNode) else [])]
        program = program.having(name=scalar(recipe_node.position, " ".join(name_parts)))
    return root.without(*ABOUT).having(agent=agent.having(program=program)), []


def _laid_below(recipe: Node, spec: Node, path: NodePath) -> Node:
    """Return the value of a spec merged over the value of a recipe."""
    if isinstance(recipe, SequenceNode) and isinstance(spec, SequenceNode) and is_in(path, _JOINED):
        # Of two seats with one recipe the second finds all of it there.
        existing_items = [to_builtins(item) for item in spec.items]
        return SequenceNode(
            spec.position, (*(item for item in recipe.items if to_builtins(item) not in existing_items), *spec.items)
        )
    if not isinstance(recipe, MappingNode) or not isinstance(spec, MappingNode):
        return spec
    both = {
        key: entry.value
        if (spec_value := spec.get(key)) is None
        else _laid_below(entry.value, spec_value, (*path, key))
        for key, entry in recipe.entries.items()
    }
    keys = {key: entry for key, entry in recipe.entries.items() if key not in spec.entries}
    return MappingNode(spec.position, {**spec.entries, **keys}).having(**both)
