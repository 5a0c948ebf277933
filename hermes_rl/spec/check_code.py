"""Code that a spec names, before it is loaded: is the file there, and does it define the name?"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from hermes_rl.spec.findings import Findings
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.signatures import CodeError, defined
from hermes_rl.spec.suggest import choices, did_you_mean


def check_reference(path: NodePath, reference: str, kind: str, findings: Findings) -> bool:
    """Whether `file.py:name` or `package.module:name` is there; what is not is noted."""
    place, _, name = reference.rpartition(":")
    if not place.endswith(".py"):
        return _check_package(path, place, findings)
    file = Path(place)
    if not file.is_file():
        beside = [entry.name for entry in file.parent.glob("*.py")] if file.parent.is_dir() else []
        findings.problem(path, f"there is no file {file}{did_you_mean(file.name, beside)}")
        return False
    try:
        names = defined(file)
    except CodeError as error:
        findings.problem(path, f"cannot be read as Python: {error}")
        return False
    if name not in names:
        findings.problem(path, f"{file.name} has no {kind} `{name}`{choices(name, _of_kind(names, kind))}")
        return False
    return True


def check_tool(path: NodePath, reference: str, findings: Findings) -> None:
    """Whether a model can call the function of a tool: it has a docstring, and every parameter has a type.

    A decorated function may have other parameters than it shows, so it is left to the run.
    """
    file, _, name = reference.rpartition(":")
    node = defined(Path(file)).get(name) if file.endswith(".py") else None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return
    fault = uncallable(node)
    if fault is None and not ast.get_docstring(node):
        fault = "has no docstring; its first paragraph is what the model is told"
    if fault is not None:
        findings.problem(path, f"tool `{name}` {fault}")


def uncallable(node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool = False) -> str | None:
    """Why a model cannot call a function or method; `bound` leaves out self."""
    given = node.args
    unnamed = [f"*{one.arg}" for one in (given.vararg, given.kwarg) if one is not None]
    unnamed += [one.arg for one in given.posonlyargs][1 if bound else 0 :]
    if unnamed:
        return f"has a parameter that a model cannot give ({unnamed[0]}); name it and type it"
    named = [*given.args[1 if bound and not given.posonlyargs else 0 :], *given.kwonlyargs]
    untyped = [one.arg for one in named if one.annotation is None]
    return f"has a parameter without a type: `{untyped[0]}`; the model is told its type" if untyped else None


def _of_kind(names: Mapping[str, ast.AST], kind: str) -> list[str]:
    """What the file itself defines and could be meant: imports are there too, but nobody names them in a spec."""
    wanted = (ast.ClassDef,) if kind == "class" else (ast.FunctionDef, ast.AsyncFunctionDef)
    return [name for name, node in names.items() if isinstance(node, wanted) and not name.startswith("_")]


def _check_package(path: NodePath, module: str, findings: Findings) -> bool:
    """Only the outermost package is looked for: finding a module inside it would import it."""
    try:
        found = find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        findings.warning(path, f"the package of {module} is not installed here, so this was not checked")
    return found
