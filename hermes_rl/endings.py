"""How a rollout ends: every ending by name, and the one table of whose doing it is.

The table decides what is graded (the policy's doing), what is played anew (ours), and what
`AgentResult.finished_naturally` says. A spec changes the treatment of an ending of the policy under
``endings:``; an ending of ours can never become a score.
"""

from __future__ import annotations

from enum import StrEnum


class Ending(StrEnum):
    """The last thing that happened to a rollout; the value is its name in specs and in records."""

    # The policy's doing: graded.
    FINISHED = "finished"
    """It answered without calling a tool."""
    MAX_TURNS = "max_turns"
    """`agent.max_turns` model calls were made."""
    TOKEN_BUDGET = "token_budget"
    """`agent.max_trajectory_tokens` was used up."""
    LENGTH = "length"
    """A turn was cut at `agent.max_tokens`."""
    TIMEOUT = "timeout"
    """`agent.timeout` seconds of working time were used up."""
    EMPTY = "empty"
    """It answered with no text and no tool call."""
    REFUSED = "refused"
    """The server reported a refusal or a content filter."""
    SANDBOX_KILLED = "sandbox_killed"
    """The agent's own commands hit a limit of the sandbox or killed it."""
    USER_STOP = "user_stop"
    """The simulated user said a stop phrase, or its turns were used up."""

    # Ours: never graded, played anew.
    SERVER_FAILURE = "server_failure"
    SANDBOX_FAILURE = "sandbox_failure"
    TOOL_SERVER_FAILURE = "tool_server_failure"
    REWARD_FAILURE = "reward_failure"
    JUDGE_FAILURE = "judge_failure"
    CANCELLED = "cancelled"
    STALE = "stale"
    """The weights that sampled it are older than `serve.max_staleness`."""

    @property
    def graded(self) -> bool:
        """True where the ending is the policy's doing, so that its rewards are computed."""
        return self not in OURS

    @property
    def finished_naturally(self) -> bool:
        """True where the model itself ended the conversation."""
        return self in {Ending.FINISHED, Ending.USER_STOP}


OURS = frozenset(
    {
        Ending.SERVER_FAILURE,
        Ending.SANDBOX_FAILURE,
        Ending.TOOL_SERVER_FAILURE,
        Ending.REWARD_FAILURE,
        Ending.JUDGE_FAILURE,
        Ending.CANCELLED,
        Ending.STALE,
    }
)
"""Endings that infrastructure caused: no score, played anew, then the group is dropped and replaced."""

POLICYS = tuple(ending for ending in Ending if ending not in OURS)
"""Endings that a spec may treat differently under `endings:`."""
