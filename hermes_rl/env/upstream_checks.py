"""Find lines in reference-design environments that cannot work here, before any rollout runs.

This module reads the source of an environment's class. Such lines are often inside a method that runs after hours of
evaluation, or in a `try` whose `except` counts every error as a wrong answer, so that they would go unnoticed.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import hermes_rl
from hermes_rl.errors import UserError
from hermes_rl.others_files import read_regular

_MODULES = frozenset(
    {
        "environments.agent_loop",
        "environments.hermes_base_env",
        "environments.patches",
        "environments.tool_context",
        "model_tools",
        "tools.budget_config",
        "tools.process_registry",
        "tools.terminal_tool",
        "toolset_distributions",
    }
)
"""Modules of the reference design from which environments import."""
_INSTEAD = {
    "_tool_executor": "leave it out, and the code that uses it: tools need no pool of threads",
    "resize_tool_pool": "leave it out: tools need no pool of threads",
    "apply_patches": "leave it out: nothing has to be patched",
    "process_registry": "leave it out: the end of a sandbox ends its processes",
    "handle_function_call": "use ToolContext(task_id).call_tool(name, arguments)",
    "get_tool_definitions": "use self._resolve_tools_for_group()",
    "sample_toolsets_from_distribution": "set `distribution` in the configuration",
    "BudgetConfig": "use self.config.build_budget_config()",
}
"""Names of these modules that do not exist here, each with the alternative."""
_OF_THE_RUNNER = ("TERMINAL_", "HERMES_", "HF_", "TOKENIZERS_", "WANDB_", "CUDA_")
"""Prefixes of variables that are meant for this process, or that the configuration replaces."""


def require_lines_that_work(cls: type, base: type, backend: str) -> None:
    """Raise `UserError` if an environment's class has lines that cannot work here; list each line with its fix.

    Args:
        cls: the environment's class.
        base: the base class; only the sources of its subclasses are read.
        backend: the backend of the environment's sandboxes, as the configuration names it.
    """
    problems = [
        f"{path.name}:{line}: {problem}"
        for path in dict.fromkeys(_source_files(cls, base))
        for line, problem in _find_problems(ast.parse(read_regular(path)), backend)
    ]
    if problems:
        raise UserError(f"{cls.__name__} has lines that cannot work here:\n  " + "\n  ".join(problems))


def _source_files(cls: type, base: type) -> Iterator[Path]:
    for ancestor in cls.__mro__:
        if not issubclass(ancestor, base) or ancestor.__module__.partition(".")[0] == "hermes_rl":
            continue
        try:
            path = inspect.getsourcefile(ancestor)
        except (TypeError, OSError):
            continue  # a class typed at a prompt has no source file
        if path is not None and Path(path).is_file():
            yield Path(path)


def _find_problems(tree: ast.Module, backend: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from _import_problems(node)
        elif isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
            yield from _variable_problems(node, backend)


def _import_problems(node: ast.ImportFrom) -> Iterator[tuple[int, str]]:
    for name in (alias.name for alias in node.names):
        if node.module == "hermes_rl" and name != "*" and not hasattr(hermes_rl, name):
            yield node.lineno, f"hermes_rl has no {name}" + (f": {_INSTEAD[name]}" if name in _INSTEAD else "")
        elif node.module in _MODULES and _handed_on(node.module, name):
            continue
        elif node.module in _MODULES and name in hermes_rl.__all__:
            yield node.lineno, f"write `from hermes_rl import {name}` for what is imported from {node.module}"
        elif node.module in _MODULES:
            instead = _INSTEAD.get(name, "it does not exist; see docs/python.md for the available names")
            yield node.lineno, f"{node.module}.{name}: {instead}"


def _handed_on(module: str, name: str) -> bool:
    """Return True if the author's own adapter module between the environment and hermes_rl provides the name."""
    try:
        members = vars(import_module(module))
    except Exception:  # noqa: BLE001 - the module does not exist, or its import fails here as in the environment
        return False
    reexport_checks = (
        members[exported_name] is getattr(hermes_rl, exported_name)
        for exported_name in hermes_rl.__all__
        if exported_name in members
    )
    return name in members and any(reexport_checks)


def _variable_problems(function: ast.AsyncFunctionDef | ast.FunctionDef, backend: str) -> Iterator[tuple[int, str]]:
    """Yield assignments to `os.environ` that are meant for an agent's commands, whose sandbox does not inherit them."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    called_names = {name for call in calls if (name := _called_name(call)) is not None}
    if "HermesAgentLoop" not in called_names or any(_gives_variables(call) for call in calls):
        return
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        for name in (_variable_name(target) for target in node.targets):
            if name is not None and not name.startswith(_OF_THE_RUNNER):
                programs = (
                    "" if backend == "none" else "; `terminal_backend: none` if they need programs of this machine"
                )
                yield (
                    node.lineno,
                    f"{name} in os.environ does not reach the agent's commands, which run in a sandbox: give it to the "
                    f"task, with register_task_env_overrides(task_id, {{'env': {{'{name}': …}}}}){programs}",
                )


def _called_name(call: ast.Call) -> str | None:
    function: Any = call.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)


def _gives_variables(call: ast.Call) -> bool:
    if _called_name(call) != "register_task_env_overrides":
        return False
    return any(
        isinstance(key, ast.Constant) and key.value == "env"
        for argument in call.args
        if isinstance(argument, ast.Dict)
        for key in argument.keys
    )


def _variable_name(target: ast.expr) -> str | None:
    """Return the name in ``os.environ["NAME"]``."""
    if not isinstance(target, ast.Subscript) or not isinstance(target.slice, ast.Constant):
        return None
    container = target.value
    is_environ = isinstance(container, ast.Attribute) and container.attr == "environ"
    return str(target.slice.value) if is_environ else None
