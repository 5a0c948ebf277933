"""How a call of foreign code fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hermes_rl.endings import Ending
from hermes_rl.errors import (
    AgentFault,
    Failure,
    HermesRLError,
    JudgeFailure,
    RewardFailure,
    SandboxFailure,
    ServerFailure,
    ToolServerFailure,
    UserError,
)
from hermes_rl.foreign.environment import with_way_out
from hermes_rl.foreign.messages import LONGEST_TEXT, Raised
from hermes_rl.foreign.wire import WireError


class ForeignError(Exception):
    """Foreign code raised.

    `claimed` is the exception of ours that it raised. The code alone says so, and it may have run the text of a policy:
    whoever believes it has to find out by experiment who caused it.
    """

    def __init__(self, text: str, claimed: UserError | Failure | None = None) -> None:
        super().__init__(text)
        self.claimed = claimed


class EndedError(Exception):
    """The process of foreign code ended, or was ended, before it had answered; the text says why, as a predicate."""


class OvertimeError(EndedError):
    """It was ended because its time was up."""


class NotCarriedError(EndedError):
    """What a call is to be given cannot be pickled, so that nothing was sent, and its process goes on."""


def exception_of(raised: Raised, sent: Iterable[Exception]) -> Exception:
    """Return the exception that user code has raised.

    It is one of those that the runner has `sent` the code as answers, if the code lets that one pass; or an
    `AgentFault`, which grades a rollout whoever raised it; else a `ForeignError`. Raises `WireError`.
    """
    text = with_way_out(raised.text)
    if raised.ours is None:
        return ForeignError(text)
    name = next(iter(raised.ours), "")
    for error in sent:
        if type(error).__name__ == name and str(error)[:LONGEST_TEXT] == raised.text:
            return error
    kind = next((OURS[name] for name in raised.ours if name in OURS), None)
    if kind is AgentFault:
        return AgentFault(text)
    claimed: UserError | Failure | None = None
    if kind is not None and issubclass(kind, Failure):
        try:
            claimed = kind(text, ending=Ending(str(raised.ending)))
        except ValueError as error:
            raise WireError("an ending that there is not") from error
    elif kind is UserError:
        claimed = UserError(text)
    return ForeignError(f"{name}: {text}", claimed)


OURS: Mapping[str, type[HermesRLError]] = {
    kind.__name__: kind
    for kind in (
        *(UserError, AgentFault, Failure, ServerFailure, SandboxFailure, ToolServerFailure, RewardFailure),
        JudgeFailure,
    )
}
"""Exceptions of ours that are made anew here."""
