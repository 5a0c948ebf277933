"""Read the definitions of a Python file from its syntax tree, without importing or running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from hermes_rl.others_files import read_regular
from hermes_rl.spec.reward_rules import Requirement
from hermes_rl.spec.sections.rewards import INJECTED


class Parameter(NamedTuple):
    """One parameter: its annotation as source text, its default (`...` if it is not a literal), its help."""

    name: str
    annotation: str
    required: bool
    default: Any
    help: str = ""


class Function(NamedTuple):
    """A function's name, first line of help, and parameters.

    `decorators` are its decorators by name, each with its first argument; None if that is not a text.
    """

    name: str
    help: str
    parameters: tuple[Parameter, ...]
    open: bool
    decorators: Mapping[str, str | None] = MappingProxyType({})
    requirements: tuple[Requirement, ...] = ()
    """What `hermes_rl.scoring.reward_value.requires` declares."""

    def defaults(self) -> dict[str, Any]:
        """Return the default of each argument that has one."""
        return {each.name: each.default for each in self.arguments() if not each.required}

    def arguments(self) -> tuple[Parameter, ...]:
        """Return the parameters that a spec's `args` may give."""
        return tuple(parameter for parameter in self.parameters if parameter.name not in INJECTED)


class CodeError(Exception):
    """A file cannot be read as Python."""


@lru_cache(maxsize=256)
def _parse_file(path: str, changed: float) -> ast.Module:
    try:
        return ast.parse(read_regular(Path(path)), filename=path)
    except SyntaxError as error:
        raise CodeError(f"{path}:{error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise CodeError(f"{path}: {error}") from None


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file. Raises CodeError if the file is missing or not valid Python."""
    try:
        return _parse_file(str(path), path.stat().st_mtime)
    except OSError as error:
        raise CodeError(f"{path}: {error.strerror}") from None


def defined(path: Path) -> dict[str, ast.AST]:
    """Return the nodes that define names at the top level of a file. Raises like `parse`."""
    return names_in(parse(path).body)


def names_in(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """Return the nodes that define names among the statements of a module or class."""
    names: dict[str, ast.AST] = {}
    for node in _top_level(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update((target.id, node) for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(((alias.asname or alias.name).partition(".")[0], node) for alias in node.names)
    return names


def imported_names(path: Path) -> dict[str, str]:
    """Return the dotted origin of each name that a file imports, wherever it does; raises like `parse`."""
    names: dict[str, str] = {}
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return names


def _top_level(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a module, those under `if` and `try` included."""
    statements: list[ast.stmt] = []
    for node in body:
        statements.append(node)
        if isinstance(node, ast.If | ast.Try):
            nested = [*node.body, *node.orelse]
            if isinstance(node, ast.Try):
                nested += [statement for handler in node.handlers for statement in handler.body]
            statements.extend(_top_level(nested))
    return statements


def function(path: Path, name: str) -> Function | None:
    """Return the signature of a function, or None if the file has no readable function of that name."""
    node = defined(path).get(name)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    text = ast.get_docstring(node) or ""
    helps = _argument_help(text)
    arguments = node.args
    names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    values = [*arguments.defaults, *arguments.kw_defaults]
    defaults = [*[None] * (len(names) - len(values)), *values]
    parameters = tuple(_read_parameter(*pair, helps) for pair in zip(names, defaults, strict=True))
    decorators = dict(map(_decorator_name, node.decorator_list))
    requirements = tuple(
        each for decorator in node.decorator_list if (each := _read_requirement(decorator)) is not None
    )
    return Function(name, text.partition("\n")[0], parameters, arguments.kwarg is not None, decorators, requirements)


def _read_requirement(node: ast.expr) -> Requirement | None:
    if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] != "requires":
        return None
    texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return (texts[0], texts[1]) if len(texts) == 2 else None


def _decorator_name(node: ast.expr) -> tuple[str, str | None]:
    call = node if isinstance(node, ast.Call) else None
    first = call.args[0] if call is not None and call.args else None
    text = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
    return ast.unparse(node if call is None else call.func).rpartition(".")[2], text


def _read_parameter(argument: ast.arg, default: ast.expr | None, helps: dict[str, str]) -> Parameter:
    annotation = ast.unparse(argument.annotation) if argument.annotation is not None else ""
    value: Any = None
    if default is not None:
        try:
            value = ast.literal_eval(default)
        except ValueError:
            value = ...
    name = argument.arg
    return Parameter(name, annotation.strip("'\""), default is None, value, helps.get(name, ""))


_ARGUMENT = re.compile(r"^(\s+)(\w+)(?:\s*\([^)]*\))?:\s+(.*)$")


def _argument_help(docstring: str) -> dict[str, str]:
    """Return the entries of an `Args:` section."""
    helps: dict[str, str] = {}
    current, indent, inside = "", -1, False
    for line in docstring.split("\n"):
        if line.strip() in ("Args:", "Arguments:"):
            inside = True
        elif inside and line.strip() and not line.startswith(" "):
            break
        elif inside:
            entry = _ARGUMENT.match(line)
            if entry and (indent < 0 or len(entry[1]) == indent):
                current, indent = entry[2], len(entry[1])
                helps[current] = entry[3].strip()
            elif current and line.strip():
                helps[current] += f" {line.strip()}"
    return helps
