"""The typed, frozen spec: `Spec` has a section of `hermes_rl.spec.sections` for each key of the YAML."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PrivateAttr, SecretStr

from hermes_rl.errors import Problem
from hermes_rl.spec.nodes import (
    MappingNode,
    Mark,
    NodePath,
    ScalarNode,
    SourceText,
    find,
    locate,
    rewrite,
    to_builtins,
    walk,
)
from hermes_rl.spec.origin import find_position, line_mark
from hermes_rl.spec.section import EMPTY, FreeMap, Late, Map, Section, Seq
from hermes_rl.spec.sections.agent import Agent, ProgramSection
from hermes_rl.spec.sections.common import short_for
from hermes_rl.spec.sections.dataset import Dataset
from hermes_rl.spec.sections.modes import Budget, Evaluate, Process, Serve, WandbField
from hermes_rl.spec.sections.prompt import Distill, Prompt, ScheduleSection, SeatSection, User
from hermes_rl.spec.sections.rewards import OnStop, Reward, Rewards, ScoreRule, Solution
from hermes_rl.spec.sections.sandbox import Artifact, SandboxSection
from hermes_rl.spec.sections.servers import Servers
from hermes_rl.spec.sections.tools import NO_TOOLSETS, StateField, ToolSection, ToolsetsField, UserCode

if TYPE_CHECKING:
    from hermes_rl.spec.templates import TemplateError


# It stores the position of each part in its file, which equality ignores, so that later checks can report it.

Mode = Literal["serve", "process", "evaluate"]
NOWHERE = MappingNode(Mark(SourceText("spec", Path(), has_lines=False), 1, 1))
"""The tree of a spec that was not read from anywhere."""
PROCESS_MEGABYTES = 4
"""Memory of a process for a state that keeps nothing, beyond what it shares with others; measured on Linux 6.18."""
TOOL_TIMEOUT = 300.0
"""Seconds per tool call where the spec says nothing."""


class Spec(Section):
    """An environment: rows, prompt, tools, sandbox, agent, rewards, and the number of rollouts."""

    version: Literal[1] = Field(1, description="Version of the format: 1.")
    name: str = Field("spec", min_length=1, description="Name of the environment; default: the name of the file.")
    description: str | None = Field(None, description="One line for lists.")
    seed: int = Field(
        0,
        ge=0,
        description="Feeds split, distributions, scripted deviations and the sampling seed of each rollout.",
    )
    dataset: Late[Dataset] = Field(description="The rows that rollouts start from.")
    prompt: Late[Prompt] = Field(Prompt.model_construct(), description="How a rollout starts.")
    toolsets: ToolsetsField = Field(NO_TOOLSETS, description="Groups of tools by name; none when absent.")
    tools: Seq[Late[ToolSection]] = Field(
        (), description="User-defined tools: Python functions, state objects, MCP servers."
    )
    state: StateField | None = Field(
        None,
        description="file.py:Class, or {python: file.py:Class, isolate: reuse}; one object Class(item) per rollout.",
    )
    user_code: Late[UserCode] = Field(
        UserCode.model_construct(), description="Which environment variables the code of the spec sees."
    )
    user: Late[User] | None = Field(None, description="Who answers the agent's turns without tool calls.")
    agents: Map[Late[SeatSection]] = Field(EMPTY, description="The seats of an episode of several agents, by name.")
    schedule: Annotated[Late[ScheduleSection], short_for("order", str)] | None = Field(
        None, description="Who of several agents speaks when."
    )
    distill: Late[Distill] | None = Field(None, description="A teacher whose log-probabilities groups carry.")
    sandbox: Late[SandboxSection] = Field(SandboxSection.model_construct(), description="Where commands run.")
    artifacts: Map[Late[Artifact]] = Field(EMPTY, description="Files saved from the sandbox, by name.")
    agent: Late[Agent] = Field(Agent.model_construct(), description="Sampling and limits of one rollout.")
    rewards: Rewards = Field(EMPTY, description="Functions that grade a rollout, by name, in order.")
    score: Late[ScoreRule] = Field(
        ScoreRule.model_construct(), description="How the values of the rewards become the score."
    )
    on_stop: OnStop = Field(
        EMPTY, description="Stop reason → grade, mask, drop, or a number as score; retries_exhausted → drop or worst."
    )
    solution: Late[Solution] | None = Field(None, description="What a perfect agent would do.")
    checks: Map[Literal["off", "warning", "error"]] = Field(
        EMPTY,
        description="Checks of `validate --deep`, each off, a warning or an error; default: as docs/rewards.md has.",
    )
    servers: Servers = Field(EMPTY, description="Model servers by role; policy is the model that acts.")
    serve: Late[Serve] = Field(Serve.model_construct(), description="Groups for a trainer.")
    process: Late[Process] = Field(Process.model_construct(), description="Groups into a file.")
    evaluate: Late[Evaluate] = Field(Evaluate.model_construct(), description="Scores on the evaluation rows.")
    budget: Late[Budget] = Field(Budget.model_construct(), description="What ends a run early.")
    atropos: FreeMap = Field(EMPTY, description="Other fields of Atropos' environment configuration.")
    wandb: WandbField | None = Field(None, description="Project, or {project, name, mode}; absent is off.")

    _tree: MappingNode = PrivateAttr(default_factory=lambda: NOWHERE)  # merged and substituted
    _policy_key: SecretStr | None = PrivateAttr(default=None)
    _demo: bool = PrivateAttr(default=False)
    _overrides: Any = PrivateAttr(default=None)
    _repository: dict[str, str] | None = PrivateAttr(default=None)

    def __eq__(self, other: object) -> bool:
        """Return True if all keys are equal, regardless of their positions."""
        return isinstance(other, Spec) and dict(self) == dict(other)

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def demo(self) -> bool:
        """True where the spec was changed to run without model, network and containers."""
        return self._demo

    @property
    def overrides(self) -> Any:
        """Changes by a command line or a program (`overrides.Overrides`), or None."""
        return self._overrides

    @property
    def repository(self) -> dict[str, str] | None:
        """The repository that the spec came from: `address`, `commit` and `digest`; None for a file of this machine."""
        return self._repository

    @property
    def policy_api_key(self) -> SecretStr | None:
        """The key given as `--openai.api_key`; it is nowhere else."""
        return self._policy_key

    @property
    def trained_seats(self) -> list[str]:
        """Seats that are trained; empty for a single agent.

        A seat without a reward has no score. Training on a score of 0 would teach it that it always loses.
        """
        return [name for name, seat in self.agents.items() if seat.train and name not in self.unpaid_seats]

    @property
    def unpaid_seats(self) -> list[str]:
        """Seats without a reward whose weight and factor are not 0; empty if no reward counts."""
        counting = [reward for reward in self.rewards.values() if reward.gate or reward.weight]
        return [
            name
            for name in self.agents
            if counting and not any(each.seats is None or self._factor(each, name) for each in counting)
        ]

    @staticmethod
    def _factor(reward: Reward, seat: str) -> float:
        """Return the factor by which a reward with `seats` pays one of them."""
        return reward.seats.get(seat, 0.0) if isinstance(reward.seats, Mapping) else float(seat in (reward.seats or ()))

    @property
    def other_policies(self) -> str:
        """Description of the trained seats that have another server than `policy`; empty if there are none."""
        others = {name: self.agents[name].server for name in self.trained_seats}
        return ", ".join(f"{name} by `{role}`" for name, role in others.items() if role != "policy")

    @property
    def folder(self) -> Path:
        """The folder that relative paths in the spec's own file start from."""
        return self.folder_of(())

    @property
    def folders(self) -> frozenset[Path]:
        """The folders of all files that the spec was read from."""
        sources = {node.position.source for node in (self._tree, *(node for _, _, node in walk(self._tree)))}
        return frozenset(source.folder for source in sources if source.has_lines)

    @property
    def source(self) -> str:
        """The file as the user named it."""
        return self._tree.position.source.name

    @property
    def in_sandboxes(self) -> list[NodePath]:
        """The keys that let user code run in a sandbox."""
        entries: dict[NodePath, str | None] = {
            **{(*path, "isolate"): tool.isolate for path, tool in self.all_tools.items()},
            **{("rewards", name, "isolate"): reward.isolate for name, reward in self.rewards.items()},
            ("state", "isolate"): None if self.state is None else self.state.isolate,
        }
        return [path for path, isolate in entries.items() if isolate == "sandbox"]

    @property
    def state_apart(self) -> bool:
        """True if the state of a rollout lives in a separate process."""
        return self.state is not None and self.state.isolate != "none"

    def describe_processes(self, *modes: Mode) -> str | None:
        """Return what the processes of rollouts take at the concurrency of these modes; None if they have none."""
        if not self.state_apart and not any(tool.isolate == "process" for tool in self.all_tools.values()):
            return None
        counts = {mode: self.section(mode).concurrency for mode in modes}
        sizes = [
            f"{PROCESS_MEGABYTES * count / 1000:.2g} GB with {mode}.concurrency {count}"
            if count
            else f"{PROCESS_MEGABYTES / 10:.2g} GB for each hundred"
            for mode, count in counts.items()
        ]
        return (
            f"each rollout in flight has a process of {PROCESS_MEGABYTES} MB, and what its state and tools keep: "
            + ", ".join(dict.fromkeys(sizes))
        )

    @property
    def tool_timeout(self) -> float:
        """Seconds per tool call: the agent's setting, else 300 or the sandbox's timeout, whichever is longer."""
        timeout = self.agent.tool_timeout or max(TOOL_TIMEOUT, self.sandbox.timeout)
        return min(timeout, self.agent.timeout or timeout)

    @property
    def command_timeout(self) -> float:
        """Seconds per command: never longer than the tool call that it is part of."""
        return min(self.sandbox.timeout, self.tool_timeout)

    @property
    def programs(self) -> dict[tuple[str, ...], ProgramSection]:
        """Agent programs by their path in the spec: the single agent's, or one per seat."""
        agents: dict[tuple[str, ...], Agent] = {("agent",): self.agent}
        agents |= {("agents", seat, "agent"): seat_config.agent for seat, seat_config in self.agents.items()}
        return {(*path, "program"): agent.program for path, agent in agents.items() if agent.program is not None}

    @property
    def all_tools(self) -> dict[NodePath, ToolSection]:
        """The tools of the agent and of the simulated user, by where they stand."""
        owners: dict[NodePath, Seq[ToolSection]] = {("tools",): self.tools}
        owners |= {("user", "tools"): self.user.tools} if self.user is not None else {}
        return {(*path, index): tool for path, tools in owners.items() for index, tool in enumerate(tools)}

    def section(self, mode: Mode) -> Serve | Process | Evaluate:
        """Return the section of a mode."""
        return self.evaluate if mode == "evaluate" else self.process if mode == "process" else self.serve

    def group_size(self, mode: Mode) -> int:
        """Return the rollouts per row."""
        section = self.section(mode)
        return section.rollouts if isinstance(section, Evaluate) else section.group_size

    def drops_uniform(self, mode: Mode) -> bool:
        """Return True if groups whose scores are all equal are dropped."""
        section = self.section(mode)
        return not isinstance(section, Evaluate) and section.drop_uniform

    def agent_for(self, mode: Mode) -> Agent:
        """Return the agent's settings in a mode: with the overrides for evaluation."""
        if mode != "evaluate":
            return self.agent
        agent = self.evaluate.agent
        changes: dict[str, Any] = {key: getattr(agent, key) for key in agent.model_fields_set}
        if self.evaluate.rollouts == 1:
            changes.setdefault("temperature", 0.0)
        return self.agent.model_copy(update=changes)

    def problem(self, path: NodePath, message: str, *, part: Literal["key", "value"] = "value") -> Problem:
        """Return a problem with the place where `path` was written, or where its nearest parent was."""
        return find_position(self._tree, path, part).problem(message)

    def is_written(self, path: NodePath) -> bool:
        """Return True if the spec itself contains the key; False for a default."""
        return len(locate(self._tree, path)[0]) == len(path)

    def written_at(self, path: NodePath) -> str | None:
        """Return the text of a value before it was made an absolute path, or None for a value that is not written."""
        node = find(self._tree, path)
        return node.text if isinstance(node, ScalarNode) else None

    def template_problem(self, path: NodePath, error: "TemplateError") -> Problem:
        """Return the problem of a template at its line, inside a block if the error is there."""
        row = f" (row {error.row})" if error.row else ""
        node = locate(self._tree, path)[2]
        return line_mark(node, error.line or 1, error.column).problem(f"{error.message}{row}")

    def row_problem(self, error: "TemplateError", path: NodePath = ()) -> Problem:
        """Return the problem of a value from a row, at the place that the error names, else at `path`."""
        if error.location.startswith("/"):
            return Problem(error.location, error.line or 1, 1, f"{error.message} (row {error.row})")
        steps = [step for step in re.split(r"[.\[\]]", error.location) if step]
        error_path: NodePath = tuple(int(step) if step.isdecimal() else step for step in steps)
        subpath = error.path if not error.location.endswith(".".join(map(str, error.path))) else ()
        return self.template_problem((*error_path, *subpath) or path, error)

    def folder_of(self, path: NodePath) -> Path:
        """Return the folder that a relative path written at `path` starts from."""
        return locate(self._tree, path)[2].position.source.folder.absolute()

    def resolved(self) -> dict[str, Any]:
        """Return the spec that ran, for `spec.yaml`: `${VAR}` unexpanded, no secrets, paths absolute."""
        if not self._tree.entries:
            return dict(self.model_dump(mode="json", by_alias=True, exclude_unset=True))
        as_written = rewrite(
            self._tree, lambda _, node: node if node.written is None else replace(node, value=node.written)
        )
        return dict(to_builtins(as_written))
