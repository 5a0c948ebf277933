"""Names of public things that have a new name: keys and values of a spec, fields of a run's files, commands and options
of the command line, and names of the Python API.

The old names are errors that give the new ones. `hermes_rl.spec.renamed` applies the keys to specs,
`hermes_rl.runs.record_check` the fields to the files of older runs, and `hermes_rl.cli.main` checks commands and
options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

KEYS: Mapping[str, str] = {
    "agents.*.choose": "opponent_sampling",
    "agents.*.hears": "message_template",
    "agents.*.rivals": "opponents",
    "artifacts.*.lay": "restore",
    "dataset.sampling": "row_selection",
    "endings": "on_stop",
    "env": "atropos",
    "evaluate.by": "group_by",
    "evaluate.success": "success_threshold",
    "on_stop.gave_up": "program_aborted",
    "on_stop.lost": "retries_exhausted",
    "on_stop.world_failed": "environment_error",
    "on_stop.world_over": "environment_done",
    "play": "schedule",
    "process.best": "keep_best",
    "rewards.*.process": "isolate",
    "rewards.*.steps": "per_step",
    "rewards.world_rewards": "environment_rewards",
    "servers.*.*.deviate": "error_rate",
    "servers.*.deviate": "error_rate",
    "state.between": "before_user_turn",
    "state.over": "done",
    "state.process": "isolate",
    "tools.*.ends": "ends_rollout",
    "tools.*.marked": "decorated_with",
    "tools.*.outside": "external",
    "tools.*.process": "isolate",
    "toolsets.canned": "demo_answers",
    "user.edit": "transform",
    "user.opens": "speaks_first",
    "user.says": "turns",
    "user.tools.*.ends": "ends_rollout",
    "user.tools.*.marked": "decorated_with",
    "user.tools.*.outside": "external",
    "user.tools.*.process": "isolate",
}
"""Old key, with `*` for one step → its new name. The keys above it have their new names."""
_ISOLATE: Mapping[Any, str] = {False: "none", True: "process", "reused": "reuse"}
VALUES: Mapping[str, Mapping[Any, str]] = {
    "dataset.row_selection": {"differing": "skip_uniform"},
    "rewards.*.fn": {"world_rewards": "environment_rewards"},
    "rewards.*.isolate": _ISOLATE,
    "state.isolate": _ISOLATE,
    "tools.*.isolate": _ISOLATE,
    "user.tools.*.isolate": _ISOLATE,
}
"""New key → the new names of its values."""

STOP_REASONS: Mapping[str, str] = {
    key.removeprefix("on_stop."): name for key, name in KEYS.items() if key.startswith("on_stop.")
}
"""Old stop reason → its new name."""
RECORD: Mapping[str, str] = {
    "certificate": "provenance",
    "compared": "comparison",
    "ending": "stop_reason",
    "played": "first_stop_reason",
    "world_rewards": "environment_rewards",
}
"""Old field of a record in `rollouts.jsonl` or `groups.jsonl` → its new name."""
STATES: Mapping[str, str] = {"left_out": "excluded", "lost": "retries_exhausted"}
"""Old state of a rollout → its new name."""
FIELDS: Mapping[str, str] = {"begins": "preview", "left_out": "excluded"}
"""Old name of a part of a field → its new name."""
REWARDS: Mapping[str, str] = {"world_rewards": "environment_rewards"}
"""Old name of a shipped reward → its new name; no other name that a spec chose changes."""
DESCRIPTION: Mapping[str, str] = {"endings": "stop_reasons", "lost": "failure_rates"}
"""Old field of `run.json` → its new name."""

COMMANDS: Mapping[str, str] = {"openenv": "serve-openenv", "rollouts": "serve-http"}
"""Old command → its new name."""
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "compare": {"--anyway": "--force", "--families": "--cluster-by"},
    "serve-http": {"--most": "--max-requests"},
    "show": {"--ending": "--stop-reason"},
}
"""Command, by its new name → old option → its new name."""

PYTHON: Mapping[str, str] = {
    "AgentResult.ending": "stop_reason",
    "AgentResult.world_rewards": "environment_rewards",
    "Env.announce": "sync_policies",
    "Env.play": "run",
    "Env.play_group": "run_group",
    "Group.certificate": "provenance",
    "Rollout.ending": "stop_reason",
    "SyncEnv.announce": "sync_policies",
    "SyncEnv.play": "run",
    "SyncEnv.play_group": "run_group",
    "ToolContext.brought": "restored_files",
    "ToolContext.provided": "spec_files",
    "ToolContext.untouched": "pristine_sandbox",
    "hermes_rl.Ending": "StopReason",
    "hermes_rl.certify": "attach_provenance",
}
"""Old name of the Python API, with its class or module → its new name."""
REPLY: Mapping[str, str] = {"over": "done"}
"""Old key of the reply of a user implemented in code → its new name."""
PARAMETERS: Mapping[str, str] = {"replays": "retries"}
"""Old parameter of functions of the Python API → its new name."""


def missing_attribute(owner: str, name: str) -> AttributeError:
    """Return the error for an attribute that a class or module does not have, with its new name if it has one."""
    if (new := PYTHON.get(f"{owner}.{name}")) is not None:
        return AttributeError(f"`{owner}.{name}` is now `{owner}.{new}`")
    return AttributeError(f"{owner!r} has no attribute {name!r}")


class RenamedAttributes:
    """Base of classes whose attributes have new names: an old name raises AttributeError with the new one."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError for an attribute that does not exist."""
            raise missing_attribute(type(self).__name__, name)


def with_renamed_parameters(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let a call with an old parameter raise TypeError with the new name."""

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        for name in kwargs.keys() & PARAMETERS.keys():
            raise TypeError(f"`{name}` of `{function.__qualname__}` is now `{PARAMETERS[name]}`")
        return function(*args, **kwargs)

    return call
