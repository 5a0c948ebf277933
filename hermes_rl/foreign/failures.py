"""How a call of foreign code fails."""

from __future__ import annotations

from collections.abc import Mapping

from hermes_rl.endings import Ending
from hermes_rl.errors import (
    AgentFault,
    Failure,
    HermesRLError,
    JudgeFailure,
    RewardFailure,
    RunError,
    SandboxFailure,
    ServerFailure,
    ToolServerFailure,
    UserError,
)
from hermes_rl.foreign.environment import with_way_out
from hermes_rl.foreign.messages import Raised
from hermes_rl.foreign.wire import WireError


class ForeignError(Exception):
    """Foreign code raised."""


class EndedError(Exception):
    """The process of foreign code ended, or was ended, before it had answered; the text says why, as a predicate."""


class OvertimeError(EndedError):
    """It was ended because its time was up."""


class NotCarriedError(EndedError):
    """What a call is to be given cannot be pickled, so that nothing was sent, and its process goes on."""


def exception_of(raised: Raised) -> Exception:
    """Make the exception anew: one of ours as it was, by name; else a `ForeignError`. Raises `WireError`."""
    text = with_way_out(raised.text)
    if raised.ours is None:
        return ForeignError(text)
    kind = next((OURS[name] for name in raised.ours if name in OURS), HermesRLError)
    if not issubclass(kind, Failure):
        return kind(text)
    try:
        return kind(text, ending=Ending(str(raised.ending)))
    except ValueError as error:
        raise WireError("an ending that there is not") from error


OURS: Mapping[str, type[HermesRLError]] = {
    kind.__name__: kind
    for kind in (
        *(UserError, RunError, AgentFault, Failure, ServerFailure, SandboxFailure, ToolServerFailure, RewardFailure),
        JudgeFailure,
    )
}
"""Exceptions of ours that are raised here as they were raised there."""
