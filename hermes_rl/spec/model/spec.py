"""`Spec`: the whole of a spec as one frozen value.

It remembers, outside of what is compared, where each part was written: later checks name the place.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PrivateAttr, SecretStr

from hermes_rl.errors import Problem
from hermes_rl.spec.model.agent import Agent
from hermes_rl.spec.model.base import EMPTY, FreeMap, Late, Map, Section, Seq
from hermes_rl.spec.model.dataset import Dataset
from hermes_rl.spec.model.modes import Budget, Evaluate, Process, Serve, WandbField
from hermes_rl.spec.model.prompt import Prompt, User
from hermes_rl.spec.model.sandbox import Artifact, Sandbox
from hermes_rl.spec.model.scoring import Endings, Rewards, ScoreRule, Solution
from hermes_rl.spec.model.servers import Servers
from hermes_rl.spec.model.tools import NO_TOOLSETS, Tool, ToolsetsField
from hermes_rl.spec.nodes import NodePath

if TYPE_CHECKING:
    from hermes_rl.spec.origin import Origin
    from hermes_rl.spec.templates import TemplateError

Mode = Literal["serve", "process", "evaluate"]
TOOL_TIMEOUT = 300.0
"""Seconds per tool call where the spec says nothing."""


class Spec(Section):
    """An environment: rows, prompt, tools, sandbox, agent, rewards, and how much of it is played."""

    version: Literal[1] = Field(1, description="Version of the format: 1.")
    name: str = Field("spec", min_length=1, description="Name of the environment; default: the name of the file.")
    description: str | None = Field(None, description="One line for lists.")
    seed: int = Field(
        0,
        ge=0,
        description="Feeds split, distributions, scripted deviations and the sampling seed of each rollout.",
    )
    dataset: Late[Dataset] = Field(description="The rows that rollouts start from.")
    prompt: Late[Prompt] = Field(description="How a rollout starts.")
    toolsets: ToolsetsField = Field(NO_TOOLSETS, description="Groups of tools by name; none when absent.")
    tools: Seq[Late[Tool]] = Field((), description="Tools of your own: Python functions, state objects, MCP servers.")
    state: str | None = Field(None, description="file.py:Class; one object Class(item) per rollout.")
    user: Late[User] | None = Field(None, description="A simulated user that answers the agent.")
    sandbox: Late[Sandbox] = Field(Sandbox.model_construct(), description="Where commands run.")
    artifacts: Map[Late[Artifact]] = Field(EMPTY, description="What is kept of the sandbox, by name.")
    agent: Late[Agent] = Field(Agent.model_construct(), description="Sampling and limits of one rollout.")
    rewards: Rewards = Field(EMPTY, description="Functions that grade a rollout, by name, in order.")
    score: Late[ScoreRule] = Field(
        ScoreRule.model_construct(), description="What happens to the weighted sum of the rewards."
    )
    endings: Endings = Field(EMPTY, description="Ending → grade, mask, drop, or a number as score.")
    solution: Late[Solution] | None = Field(None, description="What a perfect agent would do.")
    servers: Servers = Field(EMPTY, description="Model servers by role; policy is the model that acts.")
    serve: Late[Serve] = Field(Serve.model_construct(), description="Groups for a trainer.")
    process: Late[Process] = Field(Process.model_construct(), description="Groups into a file.")
    evaluate: Late[Evaluate] = Field(Evaluate.model_construct(), description="Scores on the evaluation rows.")
    budget: Late[Budget] = Field(Budget.model_construct(), description="What ends a run early.")
    env: FreeMap = Field(EMPTY, description="Other fields of Atropos' environment configuration.")
    wandb: WandbField | None = Field(None, description="Project, or {project, name, mode}; absent is off.")

    _origin: Origin | None = PrivateAttr(default=None)
    _policy_key: SecretStr | None = PrivateAttr(default=None)
    _demo: bool = PrivateAttr(default=False)

    def __eq__(self, other: object) -> bool:
        """Equal where all keys are, wherever they were written."""
        return isinstance(other, Spec) and dict(self) == dict(other)

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def demo(self) -> bool:
        """True where the spec was changed to run without model, network and containers."""
        return self._demo

    @property
    def policy_api_key(self) -> SecretStr | None:
        """The key given as `--openai.api_key`; it is nowhere else."""
        return self._policy_key

    @property
    def folder(self) -> Path:
        """The folder that relative paths in the spec's own file start from."""
        return self._origin.root.mark.source.folder if self._origin else Path.cwd()

    @property
    def source(self) -> str:
        """The file as the user named it."""
        return self._origin.root.mark.source.name if self._origin else "spec"

    @property
    def tool_timeout(self) -> float:
        """Seconds per tool call: the agent's own, else 300, or the sandbox's where that is longer."""
        own = self.agent.tool_timeout or max(TOOL_TIMEOUT, self.sandbox.timeout)
        return min(own, self.agent.timeout or own)

    @property
    def command_timeout(self) -> float:
        """Seconds per command: never longer than the tool call that it is part of."""
        return min(self.sandbox.timeout, self.tool_timeout)

    def agent_for(self, mode: Mode) -> Agent:
        """The agent's settings in a mode: with the overrides for evaluation."""
        if mode != "evaluate":
            return self.agent
        changes: dict[str, Any] = {key: value for key, value in self.evaluate.agent if value is not None}
        if self.evaluate.rollouts == 1:
            changes.setdefault("temperature", 0.0)
        return self.agent.model_copy(update=changes)

    def problem(self, path: NodePath, message: str, *, at: Literal["key", "value"] = "value") -> Problem:
        """A problem with the place where `path` was written, or where its nearest parent was."""
        if self._origin is None:
            return Problem(self.source, None, None, message)
        return self._origin.problem(path, message, at=at)

    def is_written(self, path: NodePath) -> bool:
        """True where the key stands in the spec itself, not just in the defaults."""
        return self._origin is not None and self._origin.is_written(path)

    def written_at(self, path: NodePath) -> str | None:
        """The text of a value before it was made an absolute path; None where none was written."""
        return self._origin.written_at(path) if self._origin is not None else None

    def template_problem(self, path: NodePath, error: TemplateError) -> Problem:
        """The problem of a template at the line that is to blame, inside a block where it is one."""
        row = f" (row {error.row})" if error.row else ""
        message = f"{error.message}{row}"
        if self._origin is None:
            return self.problem(path, message)
        return self._origin.line_problem(path, error.line or 1, message, near=error.column)

    def folder_of(self, path: NodePath) -> Path:
        """The folder that a relative path written at `path` starts from."""
        return self._origin.folder_of(path) if self._origin else Path.cwd()

    def resolved(self) -> dict[str, Any]:
        """The spec as it ran, for `spec.yaml`: `${VAR}` as it was written, no secrets, paths absolute."""
        if self._origin is None:
            return dict(self.model_dump(mode="json", by_alias=True, exclude_unset=True))
        return self._origin.resolved()
