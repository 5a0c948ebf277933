"""`hermes-rl explain`: print the type, default, meaning and an example of a word that specs, runs or `list` use."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

from hermes_rl.cli.listing import list_entries
from hermes_rl.errors import UserError
from hermes_rl.plugins import did_you_mean
from hermes_rl.shipped import shipped_rewards
from hermes_rl.spec.new_names import COMMANDS, KEYS
from hermes_rl.spec.reference import Key, find_key, key_paths, reward_arguments, reward_example
from hermes_rl.stop_reasons import StopReason, stop_reason_named
from hermes_rl.tools.catalogue import toolsets

WIDTH = 100
OTHERS = {"parsers": "tool parser", "renderers": "renderer", "sandboxes": "sandbox backend", "agents": "agent program"}
"""Kinds of `hermes-rl list` that are explained by their line there."""


def explain(word: str) -> Iterator[str]:
    """Yield the lines that explain a key, a shipped reward, a stop reason, a toolset or a tool.

    Raises `UserError`, with suggestions, if nothing has this name.
    """
    word = word.strip().strip(".").replace("*", "NAME")
    if word in ("stop_reason", "stop_reasons"):
        yield from _stop_reason_list()
        return
    name = word.removeprefix("rewards.").removeprefix("on_stop.").removeprefix("toolsets.")
    parts = [
        part
        for part in (*_reward_blocks(name), *_stop_reason(name), *_toolset_blocks(name), *_entry_blocks(name))
        if part
    ]
    keys = [key for path in _matching_paths(word) if (key := find_key(path)) is not None]
    if parts and word != name:
        keys = []  # `rewards.llm_judge` is the reward
    parts += [list(_key_lines(key)) for key in keys]
    if not parts:
        raise UserError(_unknown_word(word))
    for index, part in enumerate(parts):
        yield from ["", *part] if index else part


def _matching_paths(word: str) -> list[str]:
    """Return the paths that a word may mean: a whole path, or the last name of some."""
    if find_key(word) is not None:
        return [word]
    return [path for path in key_paths() if path == word or path.endswith(f".{word}")]


def _unknown_word(word: str) -> str:
    old = {path.replace("*", "NAME"): path.rpartition(".")[0] for path in KEYS}
    for path, above in old.items():
        if word in (path, path.rpartition(".")[2]):
            new = KEYS[path.replace("NAME", "*")]
            return f"explain: `{path}` is now `{f'{above}.{new}'.strip('.').replace('*', 'NAME')}`"
    if word in COMMANDS:
        return f"explain: `hermes-rl {word}` is now `hermes-rl {COMMANDS[word]}`"
    paths = key_paths()
    last = [path.rpartition(".")[2] for path in paths]
    candidates = [*paths, *last, *shipped_rewards(), *StopReason, *toolsets()]
    hint = did_you_mean(word, candidates) or "."
    if users := [path for path in paths if (key := find_key(path)) is not None and f"`{word}`" in key.kind]:
        return f"explain: {word!r} is a value of {', '.join(users[:5])}: hermes-rl explain {users[0]}"
    return f"explain: nothing is called {word!r}{hint} docs/spec-reference.md lists every key"


def _key_lines(key: Key) -> Iterator[str]:
    yield key.path
    yield from _field_lines("type", key.kind)
    if key.default != "none" or "default:" not in key.meaning:
        yield from _field_lines("default", key.default)
    yield from _wrap(key.meaning, "  ")
    if key.keys:
        width = max(map(len, key.keys))
        yield "  keys"
        for name, meaning in key.keys.items():
            first, *rest = _wrap(meaning, " " * (width + 6)) or [""]
            yield from (f"    {name:<{width}}  {first.strip()}".rstrip(), *rest)
    yield from _example_lines(key.yaml)


def _reward_blocks(name: str) -> Iterator[list[str]]:
    if (path := shipped_rewards().get(name)) is None:
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lines = [f"{name} (a shipped reward)", *_wrap(ast.get_docstring(tree) or "", "  ")]
    if arguments := reward_arguments(name):
        lines.append("  args")
    for key in arguments:
        lines.append(f"    {key.path.rpartition('.')[2]}: {key.kind}; default: {key.default}")
        lines += _wrap(key.meaning, "      ")
    yield [*lines, *_example_lines(reward_example(name))]


def _stop_reason(name: str) -> Iterator[list[str]]:
    reason = stop_reason_named(name)
    if reason is None:
        return
    rule = reason.rule
    if rule.caused_by_policy:
        more = "Caused by the policy: graded, unless `on_stop` changes it."
        example = _example_lines(f"on_stop: {{{reason}: mask}}\n")
    else:
        consequence = "retried, then its group is dropped and replaced" if rule.retried else "not retried"
        more, example = f"An infrastructure failure: never graded; {consequence}.", []
    yield [
        f"{reason} (a stop reason)",
        *_wrap(rule.events.rstrip(".") + ".", "  "),
        *_wrap(more, "  "),
        *_wrap(f"If most rollouts of a run stop for this reason: {rule.advice}." if rule.advice else "", "  "),
        *example,
    ]


def _stop_reason_list() -> Iterator[str]:
    yield "stop_reason (a field of a rollout; `on_stop` sets what happens)"
    for reason in StopReason:
        first, *rest = _wrap(reason.rule.events, " " * 23)
        yield from (f"  {reason:<19}  {first.strip()}", *rest)


def _toolset_blocks(name: str) -> Iterator[list[str]]:
    for toolset in toolsets().values():
        if toolset.name == name:
            lines = [f"{name} (a toolset)", *_wrap(toolset.description, "  "), "  tools"]
            lines += [f"    {tool.name}: {_first_sentence(tool.description)}" for tool in toolset.tools]
            yield [*lines, *_example_lines(f"toolsets: [{name}]\n")]
        for tool in toolset.tools:
            if tool.name == name != toolset.name:
                description = " ".join(tool.description.split())
                yield [f"{name} (a tool of the toolset {toolset.name})", *_wrap(description, "  ")]


def _entry_blocks(name: str) -> Iterator[list[str]]:
    for kind, title in OTHERS.items():
        for entry in list_entries(kind):
            if entry["name"] == name:
                yield [f"{name} ({title})", *_wrap(" ".join(entry["description"].split()), "  ")]


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]


def _field_lines(name: str, text: str) -> list[str]:
    first, *rest = _wrap(text, " " * 11) or [""]
    return [f"  {name:<7}  {first.strip()}", *rest]


def _wrap(text: str, indent: str) -> list[str]:
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return [
        line
        for paragraph in paragraphs
        for line in textwrap.wrap(
            paragraph, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False
        )
    ]


def _example_lines(text: str) -> list[str]:
    return ["  example", *(f"    {line}".rstrip() for line in text.rstrip("\n").split("\n"))]
