"""``serve``, ``process``, ``evaluate``, ``budget`` and ``wandb``: how much is played, and where it goes."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hermes_rl.spec.model.agent import AgentOverrides
from hermes_rl.spec.model.base import Late, Seconds, Section, Seq

_CONCURRENCY = "Rollouts in flight at a time; default: found by itself."


class Serve(Section):
    """Groups for a trainer."""

    trainer: str = Field(
        "atropos",
        description="Who is served: atropos is its trajectory API; or your own as file.py:Class, "
        "package.module:Class, or a name that a package publishes.",
    )
    group_size: int = Field(4, ge=1, description="Rollouts per row.")
    total_steps: int = Field(1000, ge=1, description="Trainer steps after which the environment ends.")
    max_token_length: int | None = Field(
        None, ge=1, description="Tokens of the longest sequence sent; default: the trainer's."
    )
    api_url: str = Field("http://localhost:8000", description="Address of the trajectory API.")
    eval_every: int = Field(100, ge=0, description="Trainer steps between evaluations; 0 is never.")
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="Oldest weights that may be trained on, in versions behind; default: no bound.",
    )
    on_stale: Literal["drop", "keep"] = Field("drop", description="What happens to a group that is too old.")
    on_too_long: Literal["drop", "truncate", "mask"] = Field(
        "drop",
        description="A sequence longer than the trainer takes: drop its group, truncate its end, or mask it.",
    )
    drop_uniform: bool = Field(True, description="Leave out groups in which every score is the same.")
    concurrency: int | None = Field(None, ge=1, description=_CONCURRENCY)
    allow_inexact: bool = Field(
        False,
        description="Send groups whose tokens were not recorded as sampled; they train on a reconstruction.",
    )


class Process(Section):
    """Groups into a file, without a trainer."""

    group_size: int = Field(4, ge=1, description="Rollouts per row.")
    groups: int = Field(100, ge=1, description="Groups that are written.")
    drop_uniform: bool = Field(False, description="Leave out groups in which every score is the same.")
    concurrency: int | None = Field(None, ge=1, description=_CONCURRENCY)
    format: Literal["atropos", "sft", "dpo"] = Field("atropos", description="What is written.")


class Evaluate(Section):
    """Scores on the evaluation rows."""

    limit: int | None = Field(None, ge=1, description="At most this many rows; default: all.")
    rollouts: int = Field(1, ge=1, description="Rollouts per row.")
    concurrency: int | None = Field(None, ge=1, description=_CONCURRENCY)
    agent: Late[AgentOverrides] = Field(
        AgentOverrides.model_construct(), description="What the agent does differently in evaluation."
    )
    by: Seq[str] = Field((), description="Columns of the rows; metrics are also told for the rows of each value.")
    success: float = Field(1.0, description="Score from which a rollout counts as solved, for pass@k and pass^k.")


class Budget(Section):
    """What ends a run early."""

    max_failures: int | None = Field(
        None, ge=0, description="Groups that may be lost to failures; default: as many as the run is to have."
    )
    max_tokens: int | None = Field(None, ge=1, description="Tokens of the policy, prompts included.")
    max_cost: float | None = Field(None, gt=0, description="US dollars, where the server tells the cost.")
    deadline: Seconds | None = Field(None, gt=0, description="Seconds from the start of the run, or 2h30m.")


def _project(value: Any) -> Any:
    return {"project": value} if isinstance(value, str) else value


class Wandb(Section):
    """Logging to Weights & Biases; absent is off."""

    project: str | None = Field(None, description="Project; default: the trainer's, else the name of the spec.")
    name: str | None = Field(None, description="Name of the run; default: the name of the spec.")
    mode: Literal["online", "offline", "disabled"] = Field("online", description="offline keeps it on this machine.")


WandbField = Annotated[Late[Wandb], BeforeValidator(_project)]
