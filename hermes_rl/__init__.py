"""Agentic reinforcement-learning environments from one YAML file.

Public names are loaded when they are first used, so that importing this package costs nothing and configures nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hermes_rl.version import __version__

if TYPE_CHECKING:
    from hermes_rl.agent.loop import HermesAgentLoop
    from hermes_rl.agent.result import AgentResult
    from hermes_rl.api.environment import Env, connect_ray, open_env
    from hermes_rl.api.session import Session, SessionTurn
    from hermes_rl.api.sync import sync
    from hermes_rl.data.rows import Row
    from hermes_rl.endings import Ending
    from hermes_rl.env.base import HermesAgentBaseEnv
    from hermes_rl.env.config import HermesAgentEnvConfig
    from hermes_rl.env.spec_env import SpecEnv, compile_spec
    from hermes_rl.errors import ToolError
    from hermes_rl.rollouts.rollout import Example, Group, Rollout, certify
    from hermes_rl.scoring.value import Score
    from hermes_rl.servers.base import Sampled, Sampling
    from hermes_rl.servers.policy import LogprobDifference, Policy
    from hermes_rl.spec.load import load_spec
    from hermes_rl.spec.model import Spec
    from hermes_rl.tools.base import clear_task_env_overrides, register_task_env_overrides
    from hermes_rl.tools.context import ToolContext, cleanup_all_environments, cleanup_vm


_HOMES = {
    "AgentResult": "hermes_rl.agent.result",
    "Ending": "hermes_rl.endings",
    "Env": "hermes_rl.api.environment",
    "Example": "hermes_rl.rollouts.rollout",
    "Group": "hermes_rl.rollouts.rollout",
    "HermesAgentBaseEnv": "hermes_rl.env.base",
    "HermesAgentEnvConfig": "hermes_rl.env.config",
    "HermesAgentLoop": "hermes_rl.agent.loop",
    "LogprobDifference": "hermes_rl.servers.policy",
    "Policy": "hermes_rl.servers.policy",
    "Rollout": "hermes_rl.rollouts.rollout",
    "Row": "hermes_rl.data.rows",
    "Sampled": "hermes_rl.servers.base",
    "Sampling": "hermes_rl.servers.base",
    "Score": "hermes_rl.scoring.value",
    "Session": "hermes_rl.api.session",
    "SessionTurn": "hermes_rl.api.session",
    "Spec": "hermes_rl.spec.model",
    "SpecEnv": "hermes_rl.env.spec_env",
    "ToolContext": "hermes_rl.tools.context",
    "ToolError": "hermes_rl.errors",
    "certify": "hermes_rl.rollouts.rollout",
    "cleanup_all_environments": "hermes_rl.tools.context",
    "cleanup_vm": "hermes_rl.tools.context",
    "clear_task_env_overrides": "hermes_rl.tools.base",
    "register_task_env_overrides": "hermes_rl.tools.base",
    "compile_spec": "hermes_rl.env.spec_env",
    "connect_ray": "hermes_rl.api.environment",
    "load_spec": "hermes_rl.spec.load",
    "open_env": "hermes_rl.api.environment",
    "sync": "hermes_rl.api.sync",
}

__all__ = [
    "AgentResult",
    "Ending",
    "Env",
    "Example",
    "Group",
    "HermesAgentBaseEnv",
    "HermesAgentEnvConfig",
    "HermesAgentLoop",
    "LogprobDifference",
    "Policy",
    "Rollout",
    "Row",
    "Sampled",
    "Sampling",
    "Score",
    "Session",
    "SessionTurn",
    "Spec",
    "SpecEnv",
    "ToolContext",
    "ToolError",
    "__version__",
    "certify",
    "cleanup_all_environments",
    "cleanup_vm",
    "clear_task_env_overrides",
    "compile_spec",
    "connect_ray",
    "load_spec",
    "open_env",
    "register_task_env_overrides",
    "sync",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hermes_rl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
