"""Define the interface between the core and an environment, implemented by compiled specs and hand-written
environments.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol, runtime_checkable

from hermes_rl.agent.program import ProgramOf
from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.agent.result import Message
from hermes_rl.agent.seats import MultiAgentEpisode, Schedule
from hermes_rl.agent.user import AnswersAgent
from hermes_rl.data.rows import Row
from hermes_rl.rollouts.rollout import Rollout, RolloutKey, Seat
from hermes_rl.rollouts.teacher import Teacher
from hermes_rl.servers.base import ChatServer
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.tools.base import ToolRuntime

EndingPolicy = Literal["grade", "mask", "drop"] | float
"""Handling of a rollout by its stop reason: graded; graded but not trained on; not graded; a fixed score."""


class Environment(Protocol):
    """One task with its tools and rewards, ready to run."""

    name: str
    seed: int

    @property
    def has_group_rewards(self) -> bool:
        """True if a reward compares the members of a group."""

    @property
    def policy(self) -> ChatServer:
        """The acting model."""

    @property
    def teacher(self) -> Teacher | None:
        """Teacher that scores the tokens of training rollouts, or None."""

    def options(self, split: str) -> LoopOptions:
        """Return the limits of one rollout in training (`train`) or evaluation (`eval`)."""

    def prompt(self, row: Row) -> list[Message]:
        """Return the initial messages of a rollout."""

    def runtime(self, key: RolloutKey) -> AbstractAsyncContextManager[ToolRuntime]:
        """Return the runtime that the rollout's tools act on; it is released at the end, also on cancellation."""

    async def user(self, key: RolloutKey, runtime: ToolRuntime) -> AnswersAgent | None:
        """Return the user that responds to turns without tool calls, or None."""

    def program(self, key: RolloutKey, runtime: ToolRuntime, context: Callable[[], Awaitable[int]]) -> ProgramOf | None:
        """Return the function that prepares the agent program, or None if the loop runs the rollout.

        `context` returns the maximum tokens of a conversation.
        """

    async def grade(self, rollout: Rollout, runtime: ToolRuntime) -> None:
        """Fill `rollout.rewards` while its sandbox exists. Raises Failure."""

    async def grade_group(self, rollouts: list[Rollout]) -> None:
        """Add the rewards that need the whole group. Raises Failure."""

    def score(self, rollout: Rollout) -> float:
        """Return the score from `rollout.rewards`. Raises Failure."""

    def credit(self, rollout: Rollout) -> tuple[float, ...] | None:
        """Return the credit of each turn from the rewards, or None if no reward assigns credit."""

    def on_stop_policy(self, stop_reason: StopReason) -> EndingPolicy:
        """Return the handling of rollouts with a stop reason that the policy caused."""


@runtime_checkable
class MultiAgentEnvironment(Protocol):
    """An environment whose episodes may have several agents."""

    seed: int
    seats: Sequence[Seat]
    """Seats in the order of the spec; empty for a single agent."""

    def seated(self, key: RolloutKey) -> Sequence[Seat]:
        """Return the seats of an episode, with the role that acts for each."""

    def table(
        self,
        key: RolloutKey,
        seats: Sequence[Seat],
        runtime: ToolRuntime,
        policy: ChatServer,
        options: LoopOptions,
        seeds: Mapping[str, int | None],
        tokenizer: Tokenizer | None,
        user: AnswersAgent | None,
    ) -> MultiAgentEpisode:
        """Return the seats of an episode, ready to run; `seeds` are by seat, and the first seat talks to the user."""

    def schedule(self, key: RolloutKey, runtime: ToolRuntime) -> Schedule:
        """Return the schedule, which decides the order of speakers."""
