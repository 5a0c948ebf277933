"""Configuration class of agent environments: atroposlib's class, plus fields for the agent.

The reference design has the same field names. A spec sets these options under its own keys.
"""

from __future__ import annotations

from typing import Any

from atroposlib.envs.base import BaseEnvConfig, EvalHandlingEnum
from pydantic import ConfigDict, Field

from hermes_rl.agent.recorder import ResultBudget
from hermes_rl.tools.base import RESULT_LIMIT


class HermesAgentEnvConfig(BaseEnvConfig):  # type: ignore[misc]
    """Atropos' BaseEnvConfig, plus fields for tools, prompt, agent and sandbox. Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    # atroposlib does not validate these two, and fails later.
    group_size: int = Field(default=4, ge=1)
    """How many responses are grouped together for scoring."""
    max_token_length: int = Field(default=2048, ge=1)
    """Maximum token length used in generations."""
    # atroposlib's defaults would log to wandb and cancel rollouts, during evaluations or after a timeout.
    use_wandb: bool = False
    """Log to Weights & Biases."""
    eval_handling: EvalHandlingEnum = EvalHandlingEnum.LIMIT_TRAIN
    """During an evaluation: STOP_TRAIN cancels rollouts in flight, LIMIT_TRAIN starts fewer, NONE."""
    worker_timeout: float = -1
    """Seconds until Atropos cancels a group; -1: never, the agent's own bounds hold."""

    enabled_toolsets: list[str] | None = None
    """Toolsets by name; None: all, with a warning."""
    disabled_toolsets: list[str] | None = None
    """Toolsets to take away again."""
    distribution: str | dict[str, float] | None = None
    """Toolset → probability, drawn once per group; wins over enabled_toolsets."""
    max_agent_turns: int = Field(default=30, ge=1)
    """Model calls per rollout."""
    agent_timeout: float | None = None
    """Seconds of working time per rollout."""
    agent_task_timeout: float | None = None
    """Seconds of an agent's work and of the commands of its reward together."""
    system_prompt: str | None = None
    """System message of every rollout."""
    agent_temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature."""
    agent_max_tokens: int | None = None
    """Tokens per turn; None: max_token_length."""
    terminal_backend: str = "local"
    """Sandbox backend; local means the default sandbox."""
    terminal_timeout: float = Field(default=120, gt=0)
    """Seconds per command."""
    terminal_lifetime: float = Field(default=3600, gt=0)
    """Seconds that a sandbox may live."""
    terminal_image: str | None = None
    """Image of the sandbox: a folder or archive for the default one, else by name."""
    terminal_workdir: str | None = None
    """Working directory in the sandbox."""
    terminal_network: bool | list[str] | None = None
    """Network of the sandbox, or its hosts; None: on for modal and daytona, else off."""
    terminal_env: dict[str, str] = Field(default_factory=dict)
    """Environment variables in the sandbox."""
    eval_size: int = Field(default=20, ge=0)
    """Items of an evaluation, for environments that read it."""
    eval_by: list[str] = Field(default_factory=list)
    """Columns of the samples of an evaluation: metrics are also told for each of their values."""
    dataset_name: str | None = None
    """Dataset, for environments that load one."""
    dataset_split: str = "train"
    """Split of the dataset."""
    prompt_field: str = "prompt"
    """Column that holds the prompt."""
    tool_pool_size: int = Field(default=128, ge=1)
    """Accepted for compatibility; tools need no thread pool."""
    tool_call_parser: str = "hermes"
    """Format of tool calls, for token-level servers."""
    default_result_size_chars: int = Field(default=RESULT_LIMIT, ge=1)
    """Characters of one tool result that the model receives."""
    turn_budget_chars: int = Field(default=2 * RESULT_LIMIT, ge=1)
    """Characters of all tool results of one turn together."""
    preview_size_chars: int = Field(default=1500, ge=1)
    """Characters of the head and tail to which a result beyond these bounds is cut."""
    tool_result_overrides: dict[str, int] | None = None
    """Characters of one result by the name of the tool; read_file has no such bound."""
    extra_body: dict[str, Any] | None = None
    """More fields for the body of each request."""
    seed: int = Field(default=0, ge=0)
    """Feeds distributions and the sampling seed of each rollout."""

    def build_budget_config(self) -> ResultBudget:
        """Return the limits on tool results, for `budget_config` of an agent loop; rollouts apply them anyway."""
        return ResultBudget(
            default_result_size=self.default_result_size_chars,
            turn_budget=self.turn_budget_chars,
            preview_size=self.preview_size_chars,
            tool_overrides=dict(self.tool_result_overrides or {}),
        )
