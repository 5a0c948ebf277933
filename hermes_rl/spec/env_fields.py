"""The fields of Atropos' environment configuration: which key of the spec owns each, which are passed on.

Importing atroposlib takes seconds, so the fields stand here as a table; a test compares it with the class.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from hermes_rl.spec.suggest import choices

_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "string": (str,),
}


class Passed(NamedTuple):
    """A field without a key of its own: given under `env:`."""

    type: str
    help: str
    choices: tuple[str, ...] = ()


class Owned(NamedTuple):
    """A field that follows from a key of the spec; in process and evaluate mode maybe from another one."""

    key: str
    type: str
    in_process: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that own the field: that of serve first."""
        return (self.key,) if self.in_process is None else (self.key, self.in_process)

    def shown(self) -> str:
        """Return the keys in the words of a message."""
        return " or ".join(f"`{key}`" for key in self.keys)


PASSED: dict[str, Passed] = {
    "max_num_workers": Passed("integer", "Groups in flight at a time, -1 for max_num_workers_per_node per server."),
    "max_eval_workers": Passed("integer", "Evaluation groups in flight at a time."),
    "max_num_workers_per_node": Passed("integer", "Groups in flight per server."),
    "eval_handling": Passed(
        "string", "What training does during an evaluation.", ("STOP_TRAIN", "LIMIT_TRAIN", "NONE")
    ),
    "eval_limit_ratio": Passed("number", "Share of the workers that train during an evaluation, 0 to 1."),
    "inference_weight": Passed("number", "Weight of this environment among those of a trainer, -1 to ignore it."),
    "batch_size": Passed("integer", "Sequences per training batch, -1 for the trainer's own."),
    "max_batches_offpolicy": Passed("integer", "Batches that may wait at the trainer."),
    "num_rollouts_to_keep": Passed("integer", "Rollouts shown in wandb."),
    "num_rollouts_per_group_for_logging": Passed("integer", "Rollouts of a group shown in wandb, -1 for all."),
    "data_path_to_save_groups": Passed("string", "File that groups are written to, instead of the run directory's."),
    "data_dir_to_save_evals": Passed("string", "Folder that evaluations are written to, instead of the run directory."),
    "min_items_sent_before_logging": Passed("integer", "Groups sent between two logs, 0 for each."),
    "include_messages": Passed("boolean", "Send the messages to the trainer beside the tokens."),
    "min_batch_allocation": Passed("number", "Share of each batch that this environment is to have, 0 to 1."),
    "worker_timeout": Passed("number", "Accepted as -1; no group is given up, `agent.timeout` bounds a rollout."),
    "custom_thinking_prompt": Passed("string", "System text put in front for reasoning."),
    "tool_pool_size": Passed("integer", "Accepted; tools need no pool of threads."),
}

OWNED: dict[str, Owned] = {
    "group_size": Owned("serve.group_size", "integer", "process.group_size"),
    "steps_per_eval": Owned("serve.eval_every", "integer"),
    "max_token_length": Owned("serve.max_token_length", "integer"),
    "tokenizer_name": Owned("servers.policy.tokenizer", "string"),
    "use_wandb": Owned("wandb.mode", "boolean"),
    "rollout_server_url": Owned("serve.api_url", "string"),
    "total_steps": Owned("serve.total_steps", "integer", "process.groups"),
    "wandb_name": Owned("wandb.name", "string"),
    "ensure_scores_are_not_same": Owned("serve.drop_uniform", "boolean", "process.drop_uniform"),
    "thinking_mode": Owned("agent.reasoning", "boolean"),
    "reasoning_effort": Owned("agent.reasoning.effort", "string"),
    "max_reasoning_tokens": Owned("agent.reasoning.max_tokens", "integer"),
    "enabled_toolsets": Owned("toolsets.enabled", "list"),
    "disabled_toolsets": Owned("toolsets.disabled", "list"),
    "distribution": Owned("toolsets.distribution", "string"),
    "eval_by": Owned("evaluate.by", "list"),
    "agent_timeout": Owned("agent.timeout", "number"),
    "agent_task_timeout": Owned("agent.task_timeout", "number"),
    "agent_max_tokens": Owned("agent.max_tokens", "integer"),
    "seed": Owned("seed", "integer"),
    "max_agent_turns": Owned("agent.max_turns", "integer"),
    "system_prompt": Owned("prompt.system", "string"),
    "agent_temperature": Owned("agent.temperature", "number"),
    "terminal_backend": Owned("sandbox.backend", "string"),
    "terminal_timeout": Owned("sandbox.timeout", "number"),
    "terminal_lifetime": Owned("sandbox.lifetime", "number"),
    "dataset_name": Owned("dataset.path", "string"),
    "dataset_split": Owned("dataset.split", "string"),
    "prompt_field": Owned("prompt.user", "string"),
    "tool_call_parser": Owned("servers.policy.renderer.tool_parser", "string"),
    "extra_body": Owned("agent.extra_body", "mapping"),
}


def check_field(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with one entry of `env:`, and whether its key or its value is to be shown."""
    if name in OWNED:
        yield f"`{name}` has a key of its own: {OWNED[name].shown()}", "key"
    elif name not in PASSED:
        yield f"unknown field `{name}` of the environment's configuration{choices(name, PASSED)}", "key"
    if name not in PASSED or name in OWNED or value is None:
        return
    field = PASSED[name]
    if not isinstance(value, _TYPES[field.type]) or (isinstance(value, bool) and field.type != "boolean"):
        yield f"expected {'an' if field.type == 'integer' else 'a'} {field.type}", "value"
    elif field.choices and str(value) not in field.choices:
        yield f'the text "{value}" is not possible here{choices(str(value), field.choices)}', "value"
