"""Agentic reinforcement-learning environments from one YAML file.

Public names are loaded on first use, so that importing this package is cheap and configures nothing.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False  # for type checkers, without the time for importing `typing`
if TYPE_CHECKING:
    from typing import Any

    from hermes_rl.agent.loop import HermesAgentLoop as HermesAgentLoop
    from hermes_rl.agent.result import AgentResult as AgentResult
    from hermes_rl.api.environment import Env as Env
    from hermes_rl.api.environment import connect_ray as connect_ray
    from hermes_rl.api.environment import open_env as open_env
    from hermes_rl.api.session import Session as Session
    from hermes_rl.api.session import SessionTurn as SessionTurn
    from hermes_rl.api.sync import sync as sync
    from hermes_rl.data.rows import Row as Row
    from hermes_rl.env.base import HermesAgentBaseEnv as HermesAgentBaseEnv
    from hermes_rl.env.config import HermesAgentEnvConfig as HermesAgentEnvConfig
    from hermes_rl.env.spec_env import SpecEnv as SpecEnv
    from hermes_rl.env.spec_env import compile_spec as compile_spec
    from hermes_rl.env.tool_pool import _tool_executor as _tool_executor
    from hermes_rl.env.tool_pool import apply_patches as apply_patches
    from hermes_rl.env.tool_pool import resize_tool_pool as resize_tool_pool
    from hermes_rl.errors import AgentFault as AgentFault
    from hermes_rl.errors import Failure as Failure
    from hermes_rl.errors import HermesRLError as HermesRLError
    from hermes_rl.errors import JudgeFailure as JudgeFailure
    from hermes_rl.errors import RewardFailure as RewardFailure
    from hermes_rl.errors import RunError as RunError
    from hermes_rl.errors import SandboxFailure as SandboxFailure
    from hermes_rl.errors import ServerFailure as ServerFailure
    from hermes_rl.errors import SpecError as SpecError
    from hermes_rl.errors import ToolError as ToolError
    from hermes_rl.errors import ToolServerFailure as ToolServerFailure
    from hermes_rl.errors import UserError as UserError
    from hermes_rl.rollouts.advantages import discounted_returns as discounted_returns
    from hermes_rl.rollouts.rollout import Example as Example
    from hermes_rl.rollouts.rollout import Group as Group
    from hermes_rl.rollouts.rollout import Rollout as Rollout
    from hermes_rl.rollouts.rollout import attach_provenance as attach_provenance
    from hermes_rl.scoring.reward_value import Score as Score
    from hermes_rl.servers.base import Sampled as Sampled
    from hermes_rl.servers.base import Sampling as Sampling
    from hermes_rl.servers.policy import LogprobDifference as LogprobDifference
    from hermes_rl.servers.policy import Policy as Policy
    from hermes_rl.spec.load import load_spec as load_spec
    from hermes_rl.spec.model import Spec as Spec
    from hermes_rl.spec.server_types import ServerType as ServerType
    from hermes_rl.stop_reasons import StopReason as StopReason
    from hermes_rl.tools.base import Tool as Tool
    from hermes_rl.tools.base import ToolInputError as ToolInputError
    from hermes_rl.tools.base import Toolset as Toolset
    from hermes_rl.tools.base import clear_task_env_overrides as clear_task_env_overrides
    from hermes_rl.tools.base import register_task_env_overrides as register_task_env_overrides
    from hermes_rl.tools.context import ToolContext as ToolContext
    from hermes_rl.tools.context import cleanup_all_environments as cleanup_all_environments
    from hermes_rl.tools.context import cleanup_vm as cleanup_vm
    from hermes_rl.trainers.base import GroupRefused as GroupRefused
    from hermes_rl.trainers.base import Registered as Registered
    from hermes_rl.trainers.base import Registration as Registration
    from hermes_rl.trainers.base import Trainer as Trainer
    from hermes_rl.trainers.base import TrainerState as TrainerState

_NAMES = {
    "agent.loop": "HermesAgentLoop",
    "agent.result": "AgentResult",
    "api.environment": "Env connect_ray open_env",
    "api.session": "Session SessionTurn",
    "api.sync": "sync",
    "data.rows": "Row",
    "stop_reasons": "StopReason",
    "env.base": "HermesAgentBaseEnv",
    "env.config": "HermesAgentEnvConfig",
    "env.spec_env": "SpecEnv compile_spec",
    "errors": "AgentFault Failure HermesRLError JudgeFailure RewardFailure RunError SandboxFailure ServerFailure "
    "SpecError ToolError ToolServerFailure UserError",
    "rollouts.advantages": "discounted_returns",
    "rollouts.rollout": "Example Group Rollout attach_provenance",
    "scoring.reward_value": "Score",
    "servers.base": "Sampled Sampling",
    "servers.policy": "LogprobDifference Policy",
    "spec.load": "load_spec",
    "spec.model": "Spec",
    "spec.server_types": "ServerType",
    "tools.base": "Tool ToolInputError Toolset clear_task_env_overrides register_task_env_overrides",
    "tools.context": "ToolContext cleanup_all_environments cleanup_vm",
    "trainers.base": "GroupRefused Registered Registration Trainer TrainerState",
}
_HOMES = {name: f"hermes_rl.{home}" for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(["__version__", *_HOMES])

# Environments of the reference design import these names, which are not part of the public interface.
_HOMES |= dict.fromkeys(("_tool_executor", "apply_patches", "resize_tool_pool"), "hermes_rl.env.tool_pool")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from hermes_rl.spec.new_names import missing_attribute

        raise missing_attribute("hermes_rl", name)
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, most of which are not loaded yet."""
    return __all__
