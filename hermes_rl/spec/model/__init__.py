"""The typed, frozen spec, one module per subject; attribute names are the keys of the YAML.

Annotations are not postponed in these modules: pydantic would have to evaluate the text of each at every start.
"""

from hermes_rl.spec.model.agent import Agent, AgentOverrides, Reasoning
from hermes_rl.spec.model.base import FrozenDict, Section, freeze, is_template, thaw
from hermes_rl.spec.model.dataset import Dataset, EvalRows, Source
from hermes_rl.spec.model.modes import Budget, Evaluate, Process, Serve, Wandb
from hermes_rl.spec.model.prompt import Message, Part, Prompt, TextFile, User
from hermes_rl.spec.model.sandbox import BACKENDS, Artifact, File, Limits, Sandbox
from hermes_rl.spec.model.scoring import Call, Reward, ScoreRule, Solution, Turn
from hermes_rl.spec.model.servers import Renderer, Server
from hermes_rl.spec.model.spec import Mode, Spec
from hermes_rl.spec.model.tools import NO_TOOLSETS, Mcp, Tool, Toolsets

__all__ = [
    "BACKENDS",
    "NO_TOOLSETS",
    "Agent",
    "AgentOverrides",
    "Artifact",
    "Budget",
    "Call",
    "Dataset",
    "EvalRows",
    "Evaluate",
    "File",
    "FrozenDict",
    "Limits",
    "Mcp",
    "Message",
    "Mode",
    "Part",
    "Process",
    "Prompt",
    "Reasoning",
    "Renderer",
    "Reward",
    "Sandbox",
    "ScoreRule",
    "Section",
    "Serve",
    "Server",
    "Solution",
    "Source",
    "Spec",
    "TextFile",
    "Tool",
    "Toolsets",
    "Turn",
    "User",
    "Wandb",
    "freeze",
    "is_template",
    "thaw",
]
