"""Declare `serve`, `process`, `evaluate`, `budget` and `wandb`: how many rollouts run, and where results go."""

from typing import Annotated, Literal

from pydantic import Field

from hermes_rl.spec.section import Late, Seconds, Section, Seq, UrlText
from hermes_rl.spec.sections.agent import AgentOverrides
from hermes_rl.spec.sections.common import short_for

_CONCURRENCY = "Rollouts in flight at a time; default: found by itself."
_WORKERS = "Processes that run rollouts; each has its own sandboxes and connections."


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
    api_url: UrlText = Field("http://localhost:8000", description="Address of the trajectory API.")
    eval_every: int = Field(100, ge=0, description="Trainer steps between evaluations; 0 is never.")
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="Maximum age of a rollout that is trained on, in weight versions; default: no limit.",
    )
    on_stale: Literal["drop", "keep"] = Field("drop", description="What happens to a group that is too old.")
    on_too_long: Literal["drop", "truncate", "mask"] = Field(
        "drop",
        description="A sequence longer than the trainer takes: drop its group, truncate its end, or mask it.",
    )
    drop_uniform: bool = Field(True, description="Leave out groups in which every score is the same.")
    concurrency: int | None = Field(None, ge=1, description=_CONCURRENCY)
    workers: int = Field(1, ge=1, le=256, description=_WORKERS)
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
    workers: int = Field(1, ge=1, le=256, description=_WORKERS)
    format: Literal["atropos", "sft", "dpo", "kto", "openai", "sharegpt", "parquet", "jsonl", "atif"] = Field(
        "atropos", description="Format of the files that are written besides the groups."
    )
    min_score: float | None = Field(
        None, description="Omit rollouts with a lower score from the files of `format`; default: omit none."
    )
    keep_best: int | None = Field(
        None, ge=1, description="Write at most this many rollouts of a group to them, those with the highest scores."
    )


class Evaluate(Section):
    """Scores on the evaluation rows."""

    limit: int | None = Field(None, ge=1, description="At most this many rows; default: all.")
    rollouts: int = Field(1, ge=1, description="Rollouts per row.")
    concurrency: int | None = Field(None, ge=1, description=_CONCURRENCY)
    workers: int = Field(1, ge=1, le=256, description=_WORKERS)
    agent: Late[AgentOverrides] = Field(
        AgentOverrides.model_construct(), description="What the agent does differently in evaluation."
    )
    group_by: Seq[str] = Field(
        (), description="Columns of the rows; metrics are also reported for the rows of each value."
    )
    success_threshold: float = Field(
        1.0, description="Score from which a rollout counts as solved, for pass@k and pass^k."
    )


class Budget(Section):
    """Limits that end a run early."""

    max_failures: int | None = Field(
        None, ge=0, description="Maximum number of groups that may fail; default: the number of groups of the run."
    )
    max_tokens: int | None = Field(None, ge=1, description="Tokens of the policy, prompts included, such as 10000000.")
    max_cost: float | None = Field(
        None, gt=0, description="US dollars for all models, such as 25, as servers tell them or `prices` says."
    )
    deadline: Seconds | None = Field(
        None, gt=0, description="Seconds from the start of the run, or a text such as 2h30m."
    )


class Wandb(Section):
    """Logging to Weights & Biases; absent is off."""

    project: str | None = Field(None, description="Project; default: the trainer's, else the name of the spec.")
    name: str | None = Field(None, description="Name of the run; default: the name of the spec.")
    mode: Literal["online", "offline", "disabled"] = Field("online", description="offline keeps it on this machine.")


WandbField = Annotated[Late[Wandb], short_for("project", str)]
