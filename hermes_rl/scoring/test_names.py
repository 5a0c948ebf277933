"""Find test names in the source of a file, and match them with the tests of a report.

A name is ``test_x``, ``file.py::test_x`` or ``file.py::Class::test_x[case]``; a shorter prefix matches more tests.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

RUNNER_WORD = re.compile(r"(?<![\w./-])(pytest|py\.test|unittest)(?![\w/-])")
SELECTS = re.compile(r"(^|\s)(-k|-m(?!\s*(pytest|unittest))|--deselect|--ignore|--pattern|-p\s*\S*test)(?=[\s=]|$)|::")
"""Arguments that make a command run only some of the tests."""
PROGRAM = re.compile(r"python[\d.]*\s+-m\s+(?!pytest|unittest)")
"""Python's own ``-m``, which selects no tests."""
SKIPS = frozenset({"skip", "skipif", "skipIf", "skipUnless", "xfail", "expectedFailure"})
"""Marks of a test that may be skipped, or fail as expected."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def collected(command: str, sources: Mapping[str, str]) -> list[str] | None:
    """Return the tests that a command must run, from the sources of its test files by path.

    None if the command calls no Python test runner by name; empty if it selects tests by itself.
    """
    runner = RUNNER_WORD.search(command)
    if runner is None:
        return None
    command_words = _split_command(command)
    dotted = [word for word in command_words if not word.endswith(".py")]
    if SELECTS.search(PROGRAM.sub("", command)) or any(
        word.startswith(f"{_dotted(path)}.") for word in dotted for path in sources
    ):
        return []
    selected_sources = {path: source for path, source in sources.items() if _names(command_words, path)}
    if not selected_sources:
        selected_sources = {path: text for path, text in sources.items() if _by_custom(posixpath.basename(path))}
    names = []
    for path, source in selected_sources.items():
        names += [f"{path}::{test}" for test in _tests(parsed(source), is_pytest=runner.group(1) != "unittest")]
    return names


def parsed(source: str) -> ast.Module:
    """Return the syntax tree of a file; an empty one if it is not Python."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def may_skip(sources: Mapping[str, str]) -> set[str]:
    """Return the names from `collected` that are marked, by a decorator or `pytestmark`, to be skipped or to fail.

    Exceptions raised by the code under test and comments are not marks.
    """
    marked: set[str] = set()
    for path, source in sources.items():
        tree = parsed(source)
        is_module_marked = _all_marked(tree.body)
        for node in tree.body:
            if not isinstance(node, Function | ast.ClassDef):
                continue
            is_node_marked = is_module_marked or is_marked(node)
            if not isinstance(node, ast.ClassDef):
                marked |= {f"{path}::{node.name}"} if is_node_marked else set()
                continue
            is_node_marked = is_node_marked or _all_marked(node.body)
            tests = [each for each in node.body if isinstance(each, Function)]
            marked |= {f"{path}::{node.name}::{test.name}" for test in tests if is_node_marked or is_marked(test)}
    return marked


def _all_marked(body: Sequence[ast.stmt]) -> bool:
    """Return True if `pytestmark` marks all tests of a module or class."""
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)
        and _is_mark(node.value)
        for node in body
    )


def is_marked(node: Function | ast.ClassDef) -> bool:
    """Return True if a decorator marks a test, or all of a class, to be skipped."""
    return any(map(_is_mark, node.decorator_list))


def _is_mark(node: ast.expr) -> bool:
    """Return True if a decorator contains a skip mark, also for a single case of `parametrize`."""
    return any(last_name(each) in SKIPS for each in ast.walk(node))


def passed(name: str, outcomes: Iterable[tuple[str, str]], *, may_skip: bool = False) -> bool:
    """Return True if this test ran and all its cases passed; with `may_skip` it may have been skipped instead."""
    outcomes_of_test = {outcome for test, outcome in outcomes if _is(name, test)}
    return bool(outcomes_of_test) and outcomes_of_test <= ({"passed", "skipped"} if may_skip else {"passed"})


def _is(name: str, test: str) -> bool:
    """Return True if a reported test, with its full path, has this name."""
    base_name, bracket, case = name.partition("[")
    reported, reported_bracket, reported_case = test.partition("[")
    if bracket and (reported_bracket, reported_case) != (bracket, case):
        return False
    name_parts, have = base_name.lstrip("./~").split("::"), reported.split("::")
    if name_parts[-1] != have[-1]:
        return False
    file = name_parts.pop(0) if name_parts[0].endswith(".py") else None
    if file is None:
        return have[-len(name_parts) :] == name_parts and len(name_parts) < len(have)
    return have[1:] == name_parts and f"/{have[0]}".endswith(f"/{file}")


def _split_command(command: str) -> list[str]:
    try:
        tokens = shlex.split(command, comments=True)
    except ValueError:
        tokens = command.split()
    return [word.removeprefix("./") for word in tokens]


def _dotted(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").strip(".")


def _names(command_words: list[str], path: str) -> bool:
    """Return True if a command names a file, as a path, as a module, or by a directory above it."""
    path = posixpath.normpath(path).removeprefix("~/")
    name = posixpath.basename(path)
    forms = {path, _dotted(path), name, name.removesuffix(".py")}
    while (path := posixpath.dirname(path)) not in ("", "/"):
        forms |= {path, f"{path}/"}
    return any(word in forms for word in command_words)


def _by_custom(name: str) -> bool:
    return name.endswith(".py") and (name.startswith("test") or name.endswith("_test.py"))


def _tests(tree: ast.Module, *, is_pytest: bool) -> Iterable[str]:
    """Yield the names of top-level test functions and of methods of test classes; `is_pytest`: as pytest finds them."""
    cases: set[str] = set()
    for node in tree.body:
        if is_pytest and _is_test(node):
            yield node.name  # type: ignore[attr-defined]
        elif isinstance(node, ast.ClassDef):
            if any(_base(base).endswith("TestCase") or _base(base) in cases for base in node.bases):
                cases.add(node.name)
            if _collects(node, is_pytest=is_pytest, case=node.name in cases):
                yield from (f"{node.name}::{each.name}" for each in node.body if _is_test(each))  # type: ignore[attr-defined]


def _collects(node: ast.ClassDef, *, is_pytest: bool, case: bool) -> bool:
    """Return True if the tests of a class are run: a TestCase, and for pytest a Test class without __init__."""
    names = {target.id for each in node.body if isinstance(each, ast.Assign) for target in each.targets
             if isinstance(target, ast.Name)}  # fmt: skip
    methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    if "__test__" in names:
        return False
    return case or (is_pytest and not node.bases and node.name.startswith("Test") and "__init__" not in methods)


def _is_test(node: ast.stmt) -> bool:
    """Return True for a test function, except one that a decorator may turn into something else."""
    if not isinstance(node, Function) or not node.name.startswith("test"):
        return False
    return not any(_base(each) in ("fixture", "property", "staticmethod") for each in node.decorator_list)


def _base(node: ast.expr) -> str:
    """Return the last name of ``a.b.Name`` or ``a.Name(…)``."""
    return last_name(node.func if isinstance(node, ast.Call) else node)


def last_name(node: ast.AST) -> str:
    """Return the last name of ``a.b.name`` or ``name``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
