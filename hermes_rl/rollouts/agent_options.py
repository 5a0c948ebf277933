"""From the `agent` sections of a spec to the limits and sampling options of a rollout or a seat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.errors import UserError
from hermes_rl.servers.base import ReasoningOptions
from hermes_rl.spec.model import Spec
from hermes_rl.spec.sections.agent import Agent
from hermes_rl.spec.suggest import choices


def loop_options(agent: Agent, spec: Spec) -> LoopOptions:
    """Return the limits of a rollout from the agent's settings."""
    thinking = agent.reasoning
    return LoopOptions(
        max_turns=agent.max_turns,
        timeout=agent.timeout,
        task_timeout=agent.task_timeout,
        deadline=agent.deadline,
        tool_timeout=spec.tool_timeout,
        max_tool_errors=agent.max_tool_errors,
        max_turns_per_answer=spec.user.max_agent_turns if spec.user is not None else None,
        ending_tools=ending_tools(spec),
        repair_arguments=agent.repair_arguments,
        min_trained_share=agent.min_trained_share,
        max_tokens=agent.max_tokens,
        max_trajectory_tokens=agent.max_trajectory_tokens,
        temperature=agent.temperature,
        top_p=agent.top_p,
        seeded=agent.seed != "none",
        reasoning=None if thinking is None else ReasoningOptions(thinking.effort, thinking.max_tokens),
        extra_body=dict(agent.extra_body) or None,
    )


def ending_tools(spec: Spec) -> frozenset[str]:
    """Return the names of the tools whose first call without an error ends a rollout."""
    return frozenset(name for tool in spec.tools for name in tool.ends_rollout)


def options_of_seat(options: LoopOptions, agent: Agent, spec: Spec) -> LoopOptions:
    """Return the options of an episode with the settings of a seat's `agent`."""
    # otherwise the timeout of the spec's agent applies
    bounds = replace(loop_options(agent, spec), tool_timeout=agent.tool_timeout)
    changed = {"seeded" if name == "seed" else name for name in agent.model_fields_set - {"program"}}
    return replace(options, **{name: getattr(bounds, name) for name in changed})


def read_settings(sampling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a caller's settings of `agent`; raise `UserError` if it is no mapping of names."""
    if not isinstance(sampling, Mapping | None) or not all(isinstance(name, str) for name in sampling or ()):
        raise UserError(f"sampling is {sampling!r:.60}: write settings of `agent`, such as {{'max_turns': 4}}")
    return dict(sampling or {})


def changed_agent(agent: Agent, sampling: Mapping[str, Any]) -> Agent:
    """Return the agent's settings, changed by the settings of one call; raises `UserError` if one does not fit."""
    settings = Agent.model_fields.keys() - {"program"}
    for name in sampling:
        if name not in settings:
            raise UserError(f"sampling: there is no setting {name!r}{choices(name, settings)}")
    try:
        changes = Agent.model_validate(dict(sampling))
    except ValidationError as error:
        problems = [f"sampling.{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise UserError("\n".join(problems)) from error
    return agent.model_copy(update={name: getattr(changes, name) for name in sampling})
