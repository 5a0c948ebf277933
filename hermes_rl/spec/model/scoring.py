"""``rewards``, ``score``, ``endings`` and ``solution``: how a rollout is graded, and a right one."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from hermes_rl.spec.model.base import EMPTY, Free, FreeMap, Late, Map, MayTemplate, Pair, Section, Seq

INJECTED = frozenset({"item", "result", "ctx", "state", "group", "roles"})
"""Parameters of a reward that the run fills in; all others are arguments or server roles."""


class Reward(Section):
    """One function that looks at a finished rollout and returns a value."""

    fn: str = Field(
        description="Shipped name, file.py:function, package.module:function, atropos:<name>, or a name "
        "that a package publishes; default: the reward's own name."
    )
    weight: float = Field(1.0, description="Factor in the score; may be negative, 0 makes it a metric only.")
    gate: bool = Field(False, description="Multiplies the score, with a value from 0 to 1, instead of adding to it.")
    args: FreeMap = Field(EMPTY, description="Keyword arguments of the function; templates over the row.")
    sandbox: Literal["rollout", "fresh"] = Field(
        "rollout",
        description="rollout: where the agent worked; fresh: a new sandbox with the artifacts laid in.",
    )


def _named(value: Any) -> Any:
    """Without `fn` the key is the name of the function."""
    if not isinstance(value, Mapping):
        return value
    return {
        name: {"fn": name, **({} if reward is None else reward)}
        if reward is None or isinstance(reward, Mapping)
        else reward
        for name, reward in value.items()
    }


class ScoreRule(Section):
    """What happens to the weighted sum."""

    clamp: Pair | None = Field(None, description="[lowest, highest] score.")


def _treatment_shape(value: Any) -> str:
    return "name" if isinstance(value, str) else "score"


Treatment = Annotated[
    Annotated[Literal["grade", "mask", "drop"], Tag("name")] | Annotated[float, Tag("score")],
    Discriminator(_treatment_shape),
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
    user: str | None = Field(None, description="What a scripted user answers, or opens with in a turn of its own.")


class Solution(Section):
    """What a perfect agent would do: played by the scripted policy. Other keys are for rewards to use."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Free] = Field(init=False)

    turns: Annotated[Seq[Turn], MayTemplate()] | None = Field(None, description="Gold turns, in order.")
    patch: str | None = Field(None, description="Gold patch of the working directory, as git diff writes it.")


Rewards = Annotated[Map[Late[Reward]], BeforeValidator(_named)]
Endings = Map[Treatment]
