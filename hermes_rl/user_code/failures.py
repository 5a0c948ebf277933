"""Define the failures of a call of user code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
from hermes_rl.stop_reasons import StopReason
from hermes_rl.user_code.environment import with_way_out
from hermes_rl.user_code.messages import LONGEST_TEXT, Raised
from hermes_rl.user_code.wire import WireError


class ForeignError(Exception):
    """User code raised an exception.

    `claimed` is the hermes-rl exception that it raised. It is not proven: the code may have executed the policy's text.
    A caller that depends on the cause verifies it by running the code on other answers.
    """

    def __init__(self, text: str, claimed: UserError | Failure | None = None) -> None:
        super().__init__(text)
        self.claimed = claimed


class EndedError(Exception):
    """The process for user code ended, or was killed, before its reply; the text gives the cause as a predicate."""


class OvertimeError(EndedError):
    """The process was killed because of its timeout."""


class NotCarriedError(EndedError):
    """The arguments of a call cannot be pickled, so nothing was sent, and its process continues."""


def exception_of(raised: Raised, sent: Iterable[Exception]) -> Exception:
    """Return the exception that user code has raised.

    It is one of the exceptions that the runner has `sent` to the code as results, if the code passed it on; or an
    `AgentFault`, which grades a rollout regardless of its origin; else a `ForeignError`. Raises `WireError`.
    """
    text = with_way_out(raised.text)
    if raised.class_names is None:
        return ForeignError(text)
    name = next(iter(raised.class_names), "")
    for error in sent:
        if type(error).__name__ == name and str(error)[:LONGEST_TEXT] == raised.text:
            return error
    kind = next((OURS[name] for name in raised.class_names if name in OURS), None)
    if kind is AgentFault:
        return AgentFault(text)
    claimed: UserError | Failure | None = None
    if kind is not None and issubclass(kind, Failure):
        try:
            claimed = kind(text, stop_reason=StopReason(str(raised.stop_reason)))
        except ValueError as error:
            raise WireError("an unknown stop reason") from error
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
"""hermes-rl exceptions that are reconstructed here."""
