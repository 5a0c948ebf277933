"""Templates when a spec is loaded: their syntax, and whether they stand where templates are rendered.

Also turns `!raw` text into a template that gives exactly that text, so that nothing later has to know of it.
"""

from __future__ import annotations

from dataclasses import replace

from hermes_rl.errors import Problem
from hermes_rl.spec import places
from hermes_rl.spec.model.base import is_template
from hermes_rl.spec.nodes import Node, NodePath, ScalarNode, rewrite
from hermes_rl.spec.origin import line_mark
from hermes_rl.spec.templates import TemplateError, check_syntax, literal

_WHERE = (
    "prompt, dataset.columns, sandbox.image, .files, .setup, .env and .limits, rewards.*.args, solution, user "
    "and artifacts"
)
_LEFT_ALONE = places.patterns("description", "agent.extra_body.**", "evaluate.agent.extra_body.**", "env.**")
"""Text that is passed on as it is, braces and all."""


def check_templates(root: Node) -> tuple[Node, list[Problem]]:
    """The tree without `!raw`, and what is wrong with its templates."""
    problems: list[Problem] = []

    def change(path: NodePath, node: ScalarNode) -> ScalarNode:
        if node.broken or not isinstance(node.value, str) or places.is_row(path):
            return node
        if node.raw:
            return replace(node, value=literal(node.value)) if places.is_template_place(path) else node
        problem = _problem(path, node)
        if problem is not None:
            problems.append(problem)
            return replace(node, broken=True)
        return node

    return rewrite(root, change), problems


def _problem(path: NodePath, node: ScalarNode) -> Problem | None:
    expression = places.is_in(path, places.EXPRESSIONS)
    if not is_template(node.value):
        return _syntax(node, f"{{{{ {node.value} }}}}") if expression else None
    if expression:
        return node.mark.problem("the filter is an expression: leave the braces out")
    if places.is_template_place(path):
        return _syntax(node, node.value)
    if places.is_in(path, _LEFT_ALONE):
        return None
    return node.mark.problem(f"templates are not rendered here, only in {_WHERE}")


def _syntax(node: ScalarNode, source: str) -> Problem | None:
    try:
        check_syntax(source)
    except TemplateError as error:
        return line_mark(node, error.line or 1).problem(error.message)
    return None
