"""Declare `agent`: how the policy is asked, and the limits of a rollout."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hermes_rl.spec.section import EMPTY, EnvText, FreeMap, Late, Map, Section, Seq, SystemText
from hermes_rl.spec.sections.common import File, short_for


class Reasoning(Section):
    """Limit on the model's reasoning: exactly one of effort, max_tokens."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="Effort by name, where the server takes one."
    )
    max_tokens: int | None = Field(
        None, ge=1024, le=32000, description="Tokens of reasoning per turn, from 1024 to 32000."
    )


def _to_argv(value: Any) -> Any:
    """Take a text for a command of the shell."""
    return ("/bin/sh", "-c", value) if isinstance(value, str) else value


PROGRAM_VALUES = ("prompt", "system", "endpoint", "token", "context")
"""Values that templates of a `program` can use in addition to the row's columns."""


class ProgramSection(Section):
    """An agent program that runs instead of the built-in loop and reaches the model at an address in its sandbox.

    Its templates can use the row's columns and these values: `prompt` (text of the prompt's last message; with several
    seats, the message that the seat receives before this turn), `system` (text of the system message), `endpoint` (the
    model's address, without /v1), `token` (its API key) and `context` (the maximum number of tokens of a
    conversation).
    """

    recipe: str | None = Field(
        None,
        description="Name of a shipped recipe, such as mini-swe-agent, or path of one. Keys of the spec override the "
        "recipe's; lists of packages, files and setup are joined.",
    )
    name: str | None = Field(None, description="Name and version, for people; default: the recipe's.")
    command: Annotated[Seq[SystemText], BeforeValidator(_to_argv)] = Field(
        (), description="What is run in the sandbox: a list of words, or a text for a shell."
    )
    python: str | None = Field(
        None,
        description="file.py:function or package:function, called instead of a command, in a process outside of "
        "the sandbox.",
    )
    env: Map[EnvText] = Field(EMPTY, description="Environment variables of the program.")
    files: Seq[File] = Field(
        (), description="Files of the program, written before it starts, such as its configuration."
    )
    tools: Literal["mcp"] | None = Field(
        None, description="mcp: the spec's `tools` and `toolsets` are offered to it at the address, as …/mcp."
    )
    train: Seq[Literal["main", "subagents", "summaries", "side_calls", "rejected", "changed"]] = Field(
        ("main", "subagents"),
        description="Kinds of its calls that are trained on; all others are excluded, and counted in the record.",
    )


class Agent(Section):
    """Sampling and limits of one rollout."""

    max_turns: int = Field(30, ge=1, description="Model calls per rollout.")
    timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds of work (tools and generation, not queueing, retries or pauses); default: none.",
    )
    task_timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds of the agent's work and of its rewards' commands together; they get what it leaves.",
    )
    deadline: float | None = Field(
        None,
        gt=0,
        description="Seconds of the clock until the rollout is stopped, whatever it waits for except other seats; "
        "default: 4 × timeout, an hour at least, and 24 hours without a timeout.",
    )
    temperature: float = Field(1.0, ge=0, description="Sampling temperature.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling; default: the server's.")
    max_tokens: int | None = Field(None, ge=1, description="Tokens per turn; default: the server's.")
    max_trajectory_tokens: int | None = Field(
        None, ge=1, description="Tokens of the whole conversation; default: no bound."
    )
    tool_timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds per tool call; default: 300, or sandbox.timeout if it is longer.",
    )
    max_tool_errors: int | None = Field(
        None, ge=1, description="Tool calls that are errors, after which the rollout ends; default: no bound."
    )
    min_trained_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Minimum fraction of the sampled tokens that are trained on. A rollout of an agent program with "
        "less stops with `untrained`, which `on_stop` handles.",
    )
    repair_arguments: bool = Field(
        False,
        description="Convert arguments whose type differs from the tool's schema if possible, such as a list that is "
        "passed as JSON text; otherwise the model receives an error.",
    )
    reasoning: Late[Reasoning] | None = Field(None, description="How much the model should think.")
    seed: Literal["call", "none"] = Field(
        "call",
        description="call: every model call has its own sampling seed, drawn from the spec's seed; none: no seed is "
        "sent, for servers that refuse one.",
    )
    extra_body: FreeMap = Field(EMPTY, description="More fields for the body of each request; chat servers only.")
    program: Annotated[Late[ProgramSection], short_for("recipe", str)] | None = Field(
        None, description="An agent program that runs instead of the loop: the name of its recipe, or its full section."
    )


class AgentOverrides(Agent):
    """Agent settings for evaluation; absent keys take their values from `agent`."""

    temperature: float = Field(
        1.0, ge=0, description="Sampling temperature; default: 0 when evaluate.rollouts is 1, else the agent's."
    )
