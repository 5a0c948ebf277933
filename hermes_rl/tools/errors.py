"""What goes wrong with a call of the model: data for the record, told to the model, never a crash."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolError:
    """One call that failed by the policy's doing or by the tool's own; the rollout goes on."""

    turn: int
    """Counts from 1."""
    tool_name: str
    arguments: str
    """As the model wrote them; an object is written as JSON."""
    error: str
    """What happened, for people; may hold more than the model was told."""
    tool_result: str
    """What the model was told."""


class ToolInputError(Exception):
    """The arguments of a call are not what the tool takes; the message is meant for the model."""
