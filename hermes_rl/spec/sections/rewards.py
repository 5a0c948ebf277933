"""Declare `rewards`, `score`, `on_stop` and `solution`: how a rollout is graded, and a correct one."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from hermes_rl.spec.section import EMPTY, Free, FreeMap, Late, Map, MayTemplate, Pair, Section, Seq
from hermes_rl.spec.sections.tools import Isolate

INJECTED = frozenset({"item", "result", "ctx", "state", "group", "roles", "seats", "paid"})
"""Parameters of a reward that the run fills in; all others are arguments or server roles."""


PaidSeats = Annotated[
    Annotated[Seq[str], Tag("names")] | Annotated[Map[float], Tag("factors")],
    Discriminator(lambda value: "factors" if isinstance(value, Mapping) else "names"),
]


class Reward(Section):
    """One function that looks at a finished rollout and returns a value."""

    fn: str = Field(
        description="Shipped name, file.py:function, package.module:function, atropos:<name>, or a name "
        "that a package publishes; default: the reward's own name."
    )
    weight: float = Field(1.0, description="Factor in the score; may be negative, 0 makes it a metric only.")
    gate: bool = Field(False, description="Multiplies the score, with a value from 0 to 1, instead of adding to it.")
    range: Pair | None = Field(
        None,
        description="[lowest, highest] value; others are clamped. A reward that fails because of the policy gets the "
        "lowest (the highest with a negative weight). Default: the function's range, else [0, 1].",
    )
    args: FreeMap = Field(EMPTY, description="Keyword arguments of the function; templates over the row.")
    per_step: Literal["mean", "last"] | None = Field(
        None,
        description="Call the reward after each step, that is after the agent's answer to a message of `user.turns`. "
        "Templates can use `step`, its index from 0. The value is the mean over the completed steps, or the value "
        "of the last.",
    )
    sandbox: Literal["rollout", "fresh"] = Field(
        "rollout",
        description="rollout: the agent's sandbox; fresh: a new sandbox with the artifacts restored.",
    )
    isolate: Isolate | None = Field(
        None,
        description="Where the function runs. process or reuse: in a worker process, which is ended when it takes too "
        "long (default); sandbox: in a process inside a sandbox; none: in the runner, for code that shares what it "
        "keeps in memory with other rollouts. One that names `state` runs where the state is.",
    )
    timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds that one call may take; default: 300, and 3600 where it asks a sandbox or a model. One "
        "that takes longer is ended.",
    )
    seats: PaidSeats | None = Field(
        None,
        description="Seats that it pays: names, for each of which it is called; or factors by name, by which they "
        "share what it gives for the first. Default: all.",
    )


def _add_function_names(value: Any) -> Any:
    """Return the rewards with `fn` filled in: without it, the key is the name of the function."""
    if not isinstance(value, Mapping):
        return value
    return {
        name: {"fn": name, **(reward or {})} if isinstance(reward, Mapping | None) else reward
        for name, reward in value.items()
    }


class ScoreRule(Section):
    """Rule that combines the values of the rewards into the score."""

    combine: Literal["sum", "product", "minimum"] = Field(
        "sum", description="What is made of weight × value of all rewards, before gates and clamp."
    )
    clamp: Pair | None = Field(None, description="[lowest, highest] score.")


EndingPolicy = Annotated[
    Annotated[Literal["grade", "mask", "drop", "worst"], Tag("name")] | Annotated[float, Tag("score")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "score"),
]


class Call(Section):
    """One tool call of a gold turn."""

    name: str = Field(description="Name of the tool.")
    args: Free = Field(EMPTY, description="Arguments; templates over the row.")


class Turn(Section):
    """One turn of the gold solution: tool calls, text, or both."""

    tools: Annotated[Seq[Call], MayTemplate()] | None = Field(None, description="Tool calls of this turn, in order.")
    say: str | None = Field(None, description="Text of this turn.")
    reasoning: str | None = Field(None, description="Reasoning of this turn.")
    user: str | None = Field(
        None, description="Message of a scripted user: a reply, or the first message in a separate turn."
    )
    seat: str | None = Field(None, description="Seat that has this turn; default: the first.")
    user_tools: Annotated[Seq[Call], MayTemplate()] | None = Field(
        None, description="What a scripted user calls before it says that, in order."
    )


class Solution(Section):
    """Reference solution, run by the scripted policy. Other keys are for rewards."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Free] = Field(init=False)

    turns: Annotated[Seq[Turn], MayTemplate()] | None = Field(None, description="Gold turns, in order.")
    patch: str | None = Field(None, description="Gold patch of the working directory, as git diff writes it.")


Rewards = Annotated[Map[Late[Reward]], BeforeValidator(_add_function_names)]
OnStop = Map[EndingPolicy]
