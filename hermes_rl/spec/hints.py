"""Suggest the right form for common mistakes: a key in another section, a short form, a flag of another tool."""

from __future__ import annotations

from collections.abc import Iterable

from hermes_rl.spec.model import Spec
from hermes_rl.spec.nodes import Node, NodePath, ScalarNode, SequenceNode, to_builtins
from hermes_rl.spec.section import keys_at
from hermes_rl.spec.sections.rewards import INJECTED
from hermes_rl.spec.sections.sandbox import BACKENDS

_SECTIONS = (
    "agent", "sandbox", "dataset", "prompt", "servers.policy", "process", "serve", "evaluate", "budget", "score",
)  # fmt: skip
"""Where a key is looked for, the likeliest first."""
_OTHER_NAMES = {
    "model_name": ("servers.policy.model",),
    "system_prompt": ("prompt.system",),
    "max_steps": ("agent.max_turns",),
    "num_rollouts": ("evaluate.rollouts", "process.group_size"),
    "n": ("evaluate.rollouts", "process.group_size"),
}
_AS_OPTIONS = {
    "servers.policy.model": "--openai.model_name",
    "servers.policy.base_url": "--openai.base_url",
    "servers.policy.timeout": "--openai.timeout",
}
_COMMAND_LINE = {
    "api_key": "write --openai.api_key KEY",
    "output": "write --out DIRECTORY",
    "output_dir": "write --out DIRECTORY",
    "resume": "remove it: the same command resumes its run",
    "overwrite": "write --fresh",
    "debug": "write --verbose",
}
_OF_THE_RESULT = {
    **dict.fromkeys(("completion", "completions", "response", "output", "prediction"), "result.final_response"),
    **dict.fromkeys(("prompt", "prompts", "messages", "trajectory", "conversation"), "result.messages"),
    **dict.fromkeys(("row", "example", "sample", "doc", "info", "inputs", "task"), "item"),
}
"""Parameters of rewards in other libraries, and their names in hermes-rl."""
_FORMS = {
    ("dataset",): ("dataset: {{path: {0}}}", "dataset: {{items: […]}}"),
    ("prompt",): ('prompt: {{user: "…"}}', "prompt: {{messages: […]}}"),
    ("toolsets",): ("toolsets: [{0}]", ""),
    ("tools",): ("tools: [{{python: {0}}}]", ""),
    ("tools", "*"): ("{{python: {0}}}", ""),
    ("rewards",): ("rewards: {{{0}: {{args: {{…}}}}}}", "rewards: {{{0}: {{args: {{…}}}}}}"),
    ("rewards", "*"): ("{{fn: {0}}}", ""),
    ("servers", "*"): ("{{base_url: URL, model: {0}}}", ""),
    ("sandbox",): ("sandbox: {{image: {0}}}", ""),
    ("artifacts", "*"): ("{{path: {0}}}", ""),
    ("solution",): ("solution: {{turns: [{{say: …}}]}}", "solution: {{turns: [{{say: …}}]}}"),
    ("user",): ('user: {{server: user, system: "…"}}', ""),
}
"""The full form of a section or an entry that is written as a text or as a list."""
_OF_VALUES: dict[NodePath, dict[type, str]] = {
    ("dataset", "eval"): {
        float: "eval: {{fraction: {0}}}",
        int: "eval: {{limit: {0}, fraction: SHARE}}",
        str: "eval: {{split: {0}}}",
        bool: "eval: only, or leave it out",
    },
    ("process",): {int: "process: {{groups: {0}}}"},
    ("evaluate",): {int: "evaluate: {{limit: {0}}}"},
    ("budget",): {int: "budget: {{max_tokens: {0}}}", float: "budget: {{max_cost: {0}}}"},
}
"""The full form of a section that is written as a single value of these types."""


def home_of(name: str) -> str:
    """Return `; it is agent.max_turns` for a key that belongs to another section, or an empty string."""
    homes = _sections_with(name)
    return f"; it is {' or '.join(f'`{home}`' for home in homes)}" if homes else ""


def option_for(option: str) -> str:
    """Return `; write --set agent.max_turns=VALUE` for an unknown option that is a key of the spec, or an empty
    string."""
    name = option.lstrip("-").replace("-", "_")
    if name in _COMMAND_LINE:
        return f"; {_COMMAND_LINE[name]}"
    ways = [
        f"{_AS_OPTIONS[home]} VALUE" if home in _AS_OPTIONS else f"--set {home}=VALUE" for home in _sections_with(name)
    ]
    return f"; write {' or '.join(ways)}" if ways else ""


def _sections_with(name: str) -> tuple[str, ...]:
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    sections = (section for section in _SECTIONS if name in keys_at(Spec, tuple(section.split("."))))
    return tuple(f"{section}.{name}" for section in sections)[:3]


def short_form(path: NodePath, node: Node) -> str:
    """Return `; write {python: lib.py:f}` for a value that omits its key, or an empty string."""
    pattern = tuple(str(step) if index == 0 else "*" for index, step in enumerate(path))
    for_text, for_list = _FORMS.get(pattern, ("", ""))
    if isinstance(node, SequenceNode):
        items = to_builtins(node)
        first = items[0] if items and isinstance(items[0], str) else "NAME"
        return f"; write {for_list.format(first)}" if for_list else ""
    form = _OF_VALUES.get(path, {}).get(type(node.value)) if isinstance(node, ScalarNode) else None
    if form is not None:
        return f"; write {form.format(to_builtins(node))}"
    if not isinstance(node, ScalarNode) or not isinstance(node.value, str) or not for_text:
        return ""
    if pattern == ("tools", "*") and ".py:" not in node.value:
        return f"; a toolset is written toolsets: [{node.value}]"
    if pattern == ("sandbox",) and node.value in BACKENDS:
        for_text = "sandbox: {{backend: {0}}}"
    return f"; write {for_text.format(node.value)}"


def parameters_of_rewards(names: Iterable[str]) -> str:
    """Return the replacements for reward parameters that a run does not provide."""
    ways = [
        f"`{name}` is `{_OF_THE_RESULT[name]}` here"
        if name in _OF_THE_RESULT
        else f'a column is given as `args: {{{name}: "{{{{ {name} }}}}"}}`'
        for name in names
    ]
    return f"; {', '.join(dict.fromkeys(ways))}; a run gives {', '.join(sorted(INJECTED))} by name"
