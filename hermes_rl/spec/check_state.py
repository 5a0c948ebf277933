"""Tools that are parts of the state object: does its class, as far as the syntax tree tells, have them?

A name that was given in vain would otherwise only show when the first rollout starts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hermes_rl.spec.check_code import uncallable
from hermes_rl.spec.findings import Findings
from hermes_rl.spec.model.spec import Spec
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.signatures import CodeError, defined, names_in
from hermes_rl.spec.suggest import choices

_DYNAMIC = frozenset({"__getattr__", "__getattribute__", "__dict__", "__setattr__", "setattr", "vars", "exec"})
"""Names by which a class can have attributes that are written nowhere."""
_HARMLESS = frozenset({"object", "ABC", "Protocol", "Generic"})
_KNOWN_DECORATORS = frozenset({"dataclass", "final", "runtime_checkable"})


class _Members(NamedTuple):
    """The attributes that were found, and whether there can be no others."""

    names: frozenset[str]
    complete: bool


def check_state_tools(spec: Spec, findings: Findings) -> None:
    """Every `state: NAME` among the tools, of a class that is there."""
    places = list(_named(spec))
    if not places or spec.state is None:
        return
    file, _, class_name = spec.state.rpartition(":")
    members = _members(Path(file), class_name)
    methods = _methods(Path(file), class_name)
    for path, name in places:
        if name in methods and (fault := uncallable(methods[name], bound=True)) is not None:
            findings.problem(path, f"tool `{name}` {fault}")
        if members is None:
            findings.warning(path, f"whether the state has `{name}` was not checked")
        elif name not in members.names:
            public = sorted(each for each in members.names if not each.startswith("_"))
            message = f"the state {class_name} has no `{name}`{choices(name, public)}"
            if members.complete:
                findings.problem(path, message)
            else:
                findings.warning(path, f"as far as can be told without running it, {message}")


def _named(spec: Spec) -> Iterator[tuple[NodePath, str]]:
    for index, tool in enumerate(spec.tools):
        if tool.state is not None:
            yield ("tools", index, "state"), tool.state
    for index, tool in enumerate(spec.user.tools if spec.user else ()):
        if tool.state is not None:
            yield ("user", "tools", index, "state"), tool.state


def _methods(file: Path, name: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The methods that the class itself defines; a decorated one may have other parameters than it shows."""
    try:
        node = defined(file).get(name)
    except CodeError:
        return {}
    members = names_in(node.body) if isinstance(node, ast.ClassDef) else {}
    functions = {each: one for each, one in members.items() if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    return {each: one for each, one in functions.items() if not one.decorator_list}


def _members(file: Path, name: str) -> _Members | None:
    """None where the file does not define the class itself."""
    try:
        there = defined(file)
    except CodeError:
        return None
    node = there.get(name)
    return _of_class(node, there, ()) if isinstance(node, ast.ClassDef) else None


def _of_class(node: ast.ClassDef, there: dict[str, ast.AST], seen: tuple[str, ...]) -> _Members:
    names = {*names_in(node.body), *_assigned(node)}
    complete = not node.keywords and not _is_dynamic(node) and _KNOWN_DECORATORS.issuperset(_decorators(node))
    for base in node.bases:
        inner = base.value if isinstance(base, ast.Subscript) else base
        shown = ast.unparse(inner).rpartition(".")[2]
        parent = there.get(shown) if isinstance(inner, ast.Name) and shown not in seen else None
        if isinstance(parent, ast.ClassDef):
            found = _of_class(parent, there, (*seen, node.name))
            names |= found.names
            complete = complete and found.complete
        else:
            complete = complete and shown in _HARMLESS
    return _Members(frozenset(names), complete)


def _assigned(node: ast.ClassDef) -> Iterator[str]:
    """The attributes that any method gives a value to."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr


def _is_dynamic(node: ast.ClassDef) -> bool:
    used = {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    used |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    loops = any(isinstance(inner, ast.For | ast.While | ast.With) for inner in node.body)
    return loops or not _DYNAMIC.isdisjoint(used | names_in(node.body).keys())


def _decorators(node: ast.ClassDef) -> Iterator[str]:
    for decorator in node.decorator_list:
        inner = decorator.func if isinstance(decorator, ast.Call) else decorator
        yield ast.unparse(inner).rpartition(".")[2]
