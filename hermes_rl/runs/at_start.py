"""Problems that a run reports before its first rollout and that `validate` can find without running the spec's code.

Each check calls the same function as the run, so both report the same message. A problem that depends on the machine
and not on the spec, such as a key that is not set, is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

from hermes_rl.errors import Problem, UserError
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.section import is_template


def refusals(spec: Spec) -> list[Problem]:
    """Return the problems for which a run of the spec would refuse to start."""
    return [*_check_workers(spec), *_check_rewards(spec), *_check_replay(spec)]


def unset_variables(spec: Spec, environ: Mapping[str, str]) -> tuple[list[Problem], list[Problem]]:
    """Return the variables of keys and headers that cannot be sent, and the variables that are not set."""
    references: list[tuple[NodePath, str, str]] = []
    headers: list[tuple[NodePath, Mapping[str, str]]] = []
    for role, servers in spec.servers.items():
        for index, server in enumerate(servers):
            path: NodePath = ("servers", role, index)
            path = path if spec.is_written(path) else path[:2]
            has_policy_key = role == "policy" and spec.policy_api_key is not None
            if server.api_key_env is not None and not has_policy_key:
                references.append(((*path, "api_key_env"), server.api_key_env, "api_key_env"))
            headers.append((path, server.headers_env))
    headers += [((*path, "mcp"), tool.mcp.headers_env) for path, tool in spec.all_tools.items() if tool.mcp is not None]
    for path, header_variables in headers:
        references += [
            ((*path, "headers_env", key), name, f"headers_env.{key}") for key, name in header_variables.items()
        ]
    wrong: list[Problem] = []
    unset: list[Problem] = []
    for path, name, key in references:
        from hermes_rl.servers.factory import UnsetVariable, variable

        try:
            variable(environ, name, key)
        except UserError as error:
            (unset if isinstance(error, UnsetVariable) else wrong).append(spec.problem(path, str(error)))
    return wrong, unset


def _check_workers(spec: Spec) -> Iterator[Problem]:
    modes: tuple[Mode, ...] = get_args(Mode)
    for mode in modes:
        if spec.section(mode).workers > 1:
            from hermes_rl.runs.workers import require_shares

            try:
                require_shares(spec, spec.section(mode).workers)
            except UserError as error:
                yield spec.problem((mode, "workers"), str(error))


def _check_rewards(spec: Spec) -> Iterator[Problem]:
    for name, reward in spec.rewards.items():
        file = reward.args.get("calibrate") if reward.fn == "llm_judge" else None
        try:
            if reward.fn.startswith("atropos:"):
                from hermes_rl.scoring.reward_function import find_reward

                find_reward(name, reward.fn)
            if isinstance(file, str) and not is_template(file):
                from hermes_rl.scoring.judge import labelled_cases

                labelled_cases(str(spec.folder / file))
        except UserError as error:
            yield spec.problem(
                ("rewards", name, "fn") if file is None else ("rewards", name, "args", "calibrate"), str(error)
            )


def _check_replay(spec: Spec) -> Iterator[Problem]:
    if spec.toolsets.replay is None:
        return
    from hermes_rl.rollouts.sandboxes import named_toolsets
    from hermes_rl.tools.recording import Replay

    try:
        replay = Replay(Path(spec.toolsets.replay))
    except UserError as error:
        yield spec.problem(("toolsets", "replay"), str(error))
        return
    sources = [name for _, name in named_toolsets(spec)]
    sources += [f"mcp {tool.mcp.name}" for tool in spec.tools if tool.mcp is not None and tool.mcp.where == "host"]
    for source in sources:
        try:
            replay.tools(source)
        except UserError as error:
            yield spec.problem(("toolsets", "replay"), str(error))
