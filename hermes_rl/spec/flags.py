"""The flags that Atropos users know, and the key of the spec that each stands for; also as a table for the docs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from hermes_rl.spec.env_fields import OWNED, PASSED
from hermes_rl.spec.model import Mode
from hermes_rl.spec.nodes import Node, ScalarNode


class Flag(NamedTuple):
    """One flag and the keys it sets: of serve, then of process and evaluate. Without a key it has no effect."""

    name: str
    keys: tuple[str, ...]
    type: str
    help: str = ""
    all_servers: bool = False
    value: Callable[[Any], Any] | None = None

    def keys_in(self, mode: Mode | None) -> list[str]:
        """Return the keys that the flag sets in a mode; without a mode those of process and of serve."""
        if mode is None or len(self.keys) < 2:
            return list(self.keys)
        return [self.keys[0] if mode == "serve" else self.keys[1]]

    def convert(self, node: Node) -> Node | None:
        """Return the value of the key, where it is not the flag's own; None where there is nothing to set."""
        if self.value is None or not isinstance(node, ScalarNode):
            return node
        value = self.value(node.value)
        return None if value is None else replace(node, value=value, text=str(value))


_VALUES: dict[str, Callable[[Any], Any]] = {
    "use_wandb": lambda value: {True: "online", False: "disabled"}[value] if isinstance(value, bool) else value,
    "terminal_backend": lambda value: "bubblewrap" if value == "local" else value,
    "prompt_field": lambda value: f"{{{{ row[{value!r}] }}}}" if isinstance(value, str) else value,
    "thinking_mode": lambda value: {True: "medium", False: "none"}[value] if isinstance(value, bool) else value,
}
_NOTES = {
    "use_wandb": "true: `online`, false: `disabled`",
    "terminal_backend": "`local` is the default sandbox, bubblewrap",
    "prompt_field": "the column that is the user message",
    "thinking_mode": "true: effort `medium`, false: `none`",
    "total_steps": "Atropos' process mode runs so many groups",
}
_KEYS = {"thinking_mode": ("agent.reasoning.effort",)}


def _openai(name: str, key: str | None, kind: str, note: str = "") -> Flag:
    path = (f"servers.policy.{key}",) if key else ()
    return Flag(f"--openai.{name}", path, kind, note, all_servers=True)


_OPENAI = (
    _openai("base_url", "base_url", "string", "a scripted policy becomes type `openai`"),
    _openai("model_name", "model", "string"),
    _openai("server_type", "type", "string"),
    _openai("timeout", "timeout", "number"),
    _openai("num_max_requests_at_once", "max_concurrency", "integer"),
    _openai("tokenizer_name", "tokenizer", "string"),
    Flag("--openai.api_key", (), "string", "kept in memory only; in a spec name its variable in `api_key_env`"),
    _openai("health_check", None, "boolean", "accepted; nothing is polled"),
    _openai("n_kwarg_is_ignored", None, "boolean", "accepted; each request asks for one completion"),
    _openai("num_requests_for_eval", None, "integer", "accepted; `evaluate.concurrency` bounds evaluation"),
    _openai("rolling_buffer_length", None, "integer", "accepted; metrics need no buffer"),
)

_ENV = [Flag(f"--env.{name}", (f"env.{name}",), field.type, field.help) for name, field in PASSED.items()] + [
    Flag(f"--env.{name}", _KEYS.get(name, owned.keys), owned.type, _NOTES.get(name, ""), value=_VALUES.get(name))
    for name, owned in OWNED.items()
]
FLAGS: dict[str, Flag] = {flag.name: flag for flag in (*_ENV, *_OPENAI)}
"""Every flag by its name."""

REFUSED = {
    "--slurm": "servers are not found through Slurm; list them under `servers.policy` (a list spreads the load)",
    "--testing": "there is no testing mode; `--demo` plays the spec without model, network and containers",
    "--config": "give the spec itself: hermes-rl run SPEC MODE; keys of `env:` and `openai:` are in the table of flags",
}
"""Flags of Atropos that are not taken here, and what to do instead."""


def flags_page() -> str:
    """docs/flags.md."""
    lines = [
        "# The flags of Atropos, and the keys they stand for",
        "",
        "`hermes-rl run`, `validate`, `render` and `doctor` accept the flags of Atropos' programs beside `--set`.",
        "Each stands for one key of the spec; giving a key twice is an error. Where there are two keys, the first is",
        "set in serve, the second in process and evaluate. Values are YAML: `-1`, `[a, b]` and `{a: 1}` work.",
        "",
        "| flag | key | value | note |",
        "|---|---|---|---|",
    ]
    for flag in FLAGS.values():
        key = ", ".join(f"`{key}`" for key in flag.keys) or "none"
        lines.append(f"| `{flag.name}` | {key} | {flag.type} | {flag.help} |")
    lines += ["", "Refused, with the way to do it here:", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in REFUSED.items()]
    return "\n".join(lines) + "\n"
