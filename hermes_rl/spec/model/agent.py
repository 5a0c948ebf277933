"""``agent``: how the policy is asked, and when a rollout has had enough."""

from typing import Literal

from pydantic import Field

from hermes_rl.spec.model.base import EMPTY, FreeMap, Late, Section


class Reasoning(Section):
    """How much the model should think: exactly one of effort, max_tokens."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="Effort by name, where the server takes one."
    )
    max_tokens: int | None = Field(
        None, ge=1024, le=32000, description="Tokens of reasoning per turn, from 1024 to 32000."
    )


class Agent(Section):
    """Sampling and limits of one rollout."""

    max_turns: int = Field(30, ge=1, description="Model calls per rollout.")
    timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds of work (tools and generation, not queueing, retries or pauses); default: none.",
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
        description="Seconds per tool call; default: 300, or sandbox.timeout where that is longer.",
    )
    reasoning: Late[Reasoning] | None = Field(None, description="How much the model should think.")
    seed: Literal["call", "none"] = Field(
        "call",
        description="call: every model call has a sampling seed of its own, drawn from the spec's seed; none: no seed "
        "is sent, for servers that refuse one.",
    )
    extra_body: FreeMap = Field(EMPTY, description="More fields for the body of each request; chat servers only.")


class AgentOverrides(Section):
    """What evaluation does differently; absent keys are those of `agent`."""

    max_turns: int | None = Field(None, ge=1, description="Model calls per rollout.")
    timeout: float | None = Field(None, gt=0, description="Seconds of working time.")
    temperature: float | None = Field(
        None,
        ge=0,
        description="Sampling temperature; default: 0 when evaluate.rollouts is 1, else the agent's.",
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling.")
    max_tokens: int | None = Field(None, ge=1, description="Tokens per turn.")
    max_trajectory_tokens: int | None = Field(None, ge=1, description="Tokens of the whole conversation.")
    tool_timeout: float | None = Field(None, gt=0, description="Seconds per tool call.")
    reasoning: Late[Reasoning] | None = Field(None, description="How much the model should think.")
    seed: Literal["call", "none"] | None = Field(None, description="Whether calls have a sampling seed.")
    extra_body: FreeMap | None = Field(None, description="More fields for the body of each request.")
