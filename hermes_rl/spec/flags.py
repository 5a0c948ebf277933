"""Define the fields of Atropos' configuration: the spec key and the flag of each field.

Importing atroposlib takes seconds, so this table lists the fields; a test compares it with the class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from hermes_rl.spec.model import Mode
from hermes_rl.spec.nodes import Node, ScalarNode
from hermes_rl.spec.suggest import choices

_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "string": (str,),
}


class Flag(NamedTuple):
    """A flag of the command line, and the keys that it sets.

    Of two keys, the first is for serve and the second for process and evaluate. A flag without a key has no effect.
    """

    keys: tuple[str, ...]
    type: str
    help: str = ""
    choices: tuple[str, ...] = ()
    all_servers: bool = False
    value: Callable[[Any], Any] | None = None
    """Converts the flag's value to the key's value, if they differ."""

    def keys_in(self, mode: Mode | None) -> list[str]:
        """Return the keys that the flag sets in a mode; without a mode, the keys of both process and serve."""
        if mode is None or len(self.keys) < 2:
            return list(self.keys)
        return [self.keys[0] if mode == "serve" else self.keys[1]]

    def convert(self, node: Node) -> Node | None:
        """Return the value for the key, converted if it differs from the flag's, or None if the key stays unset."""
        if self.value is None or not isinstance(node, ScalarNode):
            return node
        value = self.value(node.value)
        return None if value is None else replace(node, value=value, text=str(value))


def _atropos(name: str, kind: str, description: str, possible: tuple[str, ...] = ()) -> Flag:
    return Flag((f"atropos.{name}",), kind, description, possible)


def _server_flag(key: str, kind: str, note: str = "") -> Flag:
    return Flag((f"servers.policy.{key}",), kind, note, all_servers=True)


_PASSED = (
    _atropos("max_num_workers", "integer", "Groups in flight at a time, -1 for max_num_workers_per_node per server."),
    _atropos("max_eval_workers", "integer", "Evaluation groups in flight at a time."),
    _atropos("max_num_workers_per_node", "integer", "Groups in flight per server."),
    _atropos(
        "eval_handling", "string", "What training does during an evaluation.", ("STOP_TRAIN", "LIMIT_TRAIN", "NONE")
    ),
    _atropos("eval_limit_ratio", "number", "Share of the workers that train during an evaluation, 0 to 1."),
    _atropos("inference_weight", "number", "Weight of this environment among the trainer's, -1 to ignore it."),
    _atropos("batch_size", "integer", "Sequences per training batch, -1 for the trainer's own."),
    _atropos("max_batches_offpolicy", "integer", "Batches that may wait at the trainer."),
    _atropos("num_rollouts_to_keep", "integer", "Rollouts shown in wandb."),
    _atropos("num_rollouts_per_group_for_logging", "integer", "Rollouts of a group shown in wandb, -1 for all."),
    _atropos("data_path_to_save_groups", "string", "File that groups are written to, instead of the run directory's."),
    _atropos(
        "data_dir_to_save_evals", "string", "Folder that evaluations are written to, instead of the run directory."
    ),
    _atropos("min_items_sent_before_logging", "integer", "Groups sent between two logs, 0 for each."),
    _atropos("include_messages", "boolean", "Send the messages to the trainer in addition to the tokens."),
    _atropos("min_batch_allocation", "number", "Minimum share of each batch for this environment, 0 to 1."),
    _atropos("worker_timeout", "number", "Accepted as -1; groups have no timeout, `agent.timeout` limits a rollout."),
    _atropos("custom_thinking_prompt", "string", "System text put in front for reasoning."),
    _atropos("tool_pool_size", "integer", "Accepted; tools need no pool of threads."),
)
PASSED = {flag.keys[0].removeprefix("atropos."): flag for flag in _PASSED}
"""Fields that are set under `atropos:` because the spec has no separate key for them."""

OWNED: dict[str, Flag] = {
    "group_size": Flag(("serve.group_size", "process.group_size"), "integer"),
    "steps_per_eval": Flag(("serve.eval_every",), "integer"),
    "max_token_length": Flag(("serve.max_token_length",), "integer"),
    "tokenizer_name": Flag(("servers.policy.tokenizer",), "string"),
    "use_wandb": Flag(
        ("wandb.mode",),
        "boolean",
        "true: `online`, false: `disabled`",
        value=lambda value: {True: "online", False: "disabled"}[value] if isinstance(value, bool) else value,
    ),
    "rollout_server_url": Flag(("serve.api_url",), "string"),
    "total_steps": Flag(
        ("serve.total_steps", "process.groups"), "integer", "number of groups in Atropos' process mode"
    ),
    "wandb_name": Flag(("wandb.name",), "string"),
    "ensure_scores_are_not_same": Flag(("serve.drop_uniform", "process.drop_uniform"), "boolean"),
    "thinking_mode": Flag(
        ("agent.reasoning.effort",),
        "boolean",
        "true: effort `medium`, false: `none`",
        value=lambda value: {True: "medium", False: "none"}[value] if isinstance(value, bool) else value,
    ),
    "reasoning_effort": Flag(("agent.reasoning.effort",), "string"),
    "max_reasoning_tokens": Flag(("agent.reasoning.max_tokens",), "integer"),
    "enabled_toolsets": Flag(("toolsets.enabled",), "list"),
    "disabled_toolsets": Flag(("toolsets.disabled",), "list"),
    "distribution": Flag(("toolsets.distribution",), "string"),
    "eval_by": Flag(("evaluate.group_by",), "list"),
    "agent_timeout": Flag(("agent.timeout",), "number"),
    "agent_task_timeout": Flag(("agent.task_timeout",), "number"),
    "agent_max_tokens": Flag(("agent.max_tokens",), "integer"),
    "seed": Flag(("seed",), "integer"),
    "max_agent_turns": Flag(("agent.max_turns",), "integer"),
    "system_prompt": Flag(("prompt.system",), "string"),
    "agent_temperature": Flag(("agent.temperature",), "number"),
    "terminal_backend": Flag(
        ("sandbox.backend",),
        "string",
        "`local` is the default sandbox, bubblewrap",
        value=lambda value: "bubblewrap" if value == "local" else value,
    ),
    "terminal_timeout": Flag(("sandbox.timeout",), "number"),
    "terminal_lifetime": Flag(("sandbox.lifetime",), "number"),
    "dataset_name": Flag(("dataset.path",), "string"),
    "dataset_split": Flag(("dataset.split",), "string"),
    "prompt_field": Flag(
        ("prompt.user",),
        "string",
        "the column that is the user message",
        value=lambda value: f"{{{{ row[{value!r}] }}}}" if isinstance(value, str) else value,
    ),
    "tool_call_parser": Flag(("servers.policy.renderer.tool_parser",), "string"),
    "extra_body": Flag(("agent.extra_body",), "mapping"),
}
"""Fields that follow from keys of the spec."""

_OPENAI_FLAGS = {
    "base_url": _server_flag("base_url", "string", "a scripted policy becomes type `openai`"),
    "model_name": _server_flag("model", "string"),
    "server_type": _server_flag("type", "string"),
    "timeout": _server_flag("timeout", "number"),
    "num_max_requests_at_once": _server_flag("max_concurrency", "integer"),
    "tokenizer_name": _server_flag("tokenizer", "string"),
    "api_key": Flag((), "string", "held in memory only; in a spec, name its variable in `api_key_env`"),
    "health_check": Flag((), "boolean", "accepted; nothing is polled"),
    "n_kwarg_is_ignored": Flag((), "boolean", "accepted; each request asks for one completion"),
    "num_requests_for_eval": Flag((), "integer", "accepted; `evaluate.concurrency` bounds evaluation"),
    "rolling_buffer_length": Flag((), "integer", "accepted; metrics need no buffer"),
}
FLAGS: dict[str, Flag] = {
    **{f"--env.{name}": flag for name, flag in {**PASSED, **OWNED}.items()},
    **{f"--openai.{name}": flag for name, flag in _OPENAI_FLAGS.items()},
}
"""Every flag by its name."""

REFUSED = {
    "--slurm": "servers are not found through Slurm; list them under `servers.policy` (a list spreads the load)",
    "--testing": "there is no testing mode; `--demo` runs the spec without model, network and containers",
    "--config": "give the spec itself: hermes-rl run SPEC MODE; keys of `env:` and `openai:` are in the table of flags",
}
"""Flags of Atropos that are not taken here, and what to do instead."""


def check_field(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield each fault of one `atropos:` entry, and whether to report it at the key or at the value."""
    if name in OWNED:
        keys = " or ".join(f"`{key}`" for key in OWNED[name].keys)
        yield f"`{name}` has its own spec key: {keys}", "key"
    elif name not in PASSED:
        yield f"unknown field `{name}` of the environment's configuration{choices(name, PASSED)}", "key"
    if name not in PASSED or name in OWNED or value is None:
        return
    field = PASSED[name]
    if not isinstance(value, _TYPES[field.type]) or (isinstance(value, bool) and field.type != "boolean"):
        yield f"expected {'an' if field.type == 'integer' else 'a'} {field.type}", "value"
    elif field.choices and str(value) not in field.choices:
        yield f'the text "{value}" is not possible here{choices(str(value), field.choices)}', "value"
