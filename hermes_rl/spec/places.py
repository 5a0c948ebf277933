"""Which places of a spec hold what: one table for templates, commands, rows, code and paths.

Every pass over the tree (substitution, secrets, paths, templates, schema) asks here, so that they agree.
"""

from __future__ import annotations

from hermes_rl.spec.nodes import NodePath

Pattern = tuple[str, ...]


def patterns(*texts: str) -> tuple[Pattern, ...]:
    """Places written with dots; `*` is one step, a final `**` is any number of further steps (also none)."""
    return tuple(tuple(text.split(".")) for text in texts)


ROWS = patterns("dataset.items.**", "dataset.fallback.items.**")
ARGS = patterns("rewards.*.args.**", "solution.turns.*.tools.*.args.**")
EXPRESSIONS = patterns("dataset.filter")
COMMANDS = patterns("sandbox.setup.**", "artifacts.*.command", "tools.*.mcp.command.**", "user.tools.*.mcp.command.**")
PROSE = patterns(
    "prompt.**", "dataset.columns.**", "sandbox.files.*.content", "sandbox.setup.**", "rewards.*.args.**",
    "solution.**", "user.system", "artifacts.**",
)  # fmt: skip
TEMPLATES = (
    *PROSE,
    *patterns("sandbox.image", "sandbox.files.**", "sandbox.env.**", "sandbox.limits.**", "user.**"),
)
TEXT_FILES = patterns("prompt.system.file", "prompt.user.file", "prompt.messages.*.content.file", "user.system.file")
CODE = patterns("dataset.generator", "tools.*.python", "user.tools.*.python", "state", "rewards.*.fn", "serve.trainer")
SOURCE_FILES = patterns(
    "sandbox.files.*.from",
    "tools.*.mcp.files.*.from",
    "user.tools.*.mcp.files.*.from",
    "rewards.*.args.files.*.from",
    "rewards.*.args.calibrate",
)
MODES = patterns("sandbox.files.*.mode", "tools.*.mcp.files.*.mode", "user.tools.*.mcp.files.*.mode")
"""Permissions: digits that are octal, with or without YAML's own sign of it."""
OUTPUTS = patterns("env.data_path_to_save_groups", "env.data_dir_to_save_evals", "toolsets.record", "toolsets.replay")
FREE = (
    *ROWS, *ARGS,
    *patterns("dataset.columns.**", "solution.**", "agent.extra_body.**", "evaluate.agent.extra_body.**",
               "env.**", "prompt.messages.*.tool_calls.**"),
)  # fmt: skip
"""Values that belong to the user: null stays null there."""


def _matches(pattern: Pattern, path: NodePath) -> bool:
    if pattern[-1] == "**":
        head = pattern[:-1]
        return len(path) >= len(head) and _matches_exactly(head, path[: len(head)])
    return len(pattern) == len(path) and _matches_exactly(pattern, path)


def _matches_exactly(pattern: Pattern, path: NodePath) -> bool:
    return all(step in ("*", name) for step, name in zip(pattern, path, strict=True))


def is_in(path: NodePath, among: tuple[Pattern, ...]) -> bool:
    """True where one of these covers the path."""
    return any(_matches(pattern, path) for pattern in among)


def is_template_place(path: NodePath) -> bool:
    """True where `{{ }}` is rendered per row."""
    if is_in(path, TEXT_FILES) or path[:2] == ("user", "server"):
        return False
    return is_in(path, TEMPLATES)


def is_command(path: NodePath) -> bool:
    """True for text that a shell reads, which has its own use for `$`."""
    if is_in(path, COMMANDS):
        return True
    return "command" in path and (is_in(path, ARGS) or path[:1] == ("solution",))


def is_row(path: NodePath) -> bool:
    """True inside rows that are written in the spec: data, never substituted or rendered."""
    return is_in(path, ROWS)
