"""What the core asks of an environment. A compiled spec and a hand-written environment both answer it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol, runtime_checkable

from hermes_rl.agent.program import ProgramOf
from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.agent.result import Message
from hermes_rl.agent.seats import Schedule, Table
from hermes_rl.agent.user import AnswersAgent
from hermes_rl.data.rows import Row
from hermes_rl.endings import Ending
from hermes_rl.rollouts.rollout import Rollout, RolloutKey, Seat
from hermes_rl.rollouts.teacher import Teacher
from hermes_rl.servers.base import ChatServer
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.tools.base import ToolRuntime

EndingPolicy = Literal["grade", "mask", "drop"] | float
"""What is done with a rollout by its ending: graded; graded but not trained on; not graded; a fixed score."""


class Environment(Protocol):
    """One task with its tools and rewards, ready to be played."""

    name: str
    seed: int

    @property
    def has_group_rewards(self) -> bool:
        """True where some reward compares the members of a group."""

    @property
    def policy(self) -> ChatServer:
        """The model that acts."""

    @property
    def teacher(self) -> Teacher | None:
        """Who is asked about the tokens of rollouts that are trained on; None where nobody is."""

    def options(self, split: str) -> LoopOptions:
        """Return the bounds of one rollout in training (`train`) or evaluation (`eval`)."""

    def prompt(self, row: Row) -> list[Message]:
        """Return the messages that a rollout begins with."""

    def runtime(self, key: RolloutKey) -> AbstractAsyncContextManager[ToolRuntime]:
        """Return what the rollout's tools act on, released at the end, also on cancellation."""

    async def user(self, key: RolloutKey, runtime: ToolRuntime) -> AnswersAgent | None:
        """Who answers the agent's turns without tool calls; None where nobody does."""

    def program(self, key: RolloutKey, runtime: ToolRuntime, context: Callable[[], Awaitable[int]]) -> ProgramOf | None:
        """Return how the agent program that plays is started; None where the loop plays.

        `context` returns the tokens of the longest conversation that it may hold.
        """

    async def grade(self, rollout: Rollout, runtime: ToolRuntime) -> None:
        """Fill `rollout.rewards` while its machine is alive. Raises Failure."""

    async def grade_group(self, rollouts: list[Rollout]) -> None:
        """Add the rewards that need the whole group. Raises Failure."""

    def score(self, rollout: Rollout) -> float:
        """Return the score from `rollout.rewards`. Raises Failure."""

    def credit(self, rollout: Rollout) -> tuple[float, ...] | None:
        """Return what the rewards give to each turn; None where none does."""

    def ending_policy(self, ending: Ending) -> EndingPolicy:
        """Return what the environment does with an ending of the policy's doing."""


@runtime_checkable
class PlaysSeats(Protocol):
    """An environment whose episodes may have several agents."""

    seed: int
    seats: Sequence[Seat]
    """In the order of the spec; none where one agent plays."""

    def seated(self, key: RolloutKey) -> Sequence[Seat]:
        """Return the seats of an episode, with the role that plays each."""

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
    ) -> Table:
        """Return the seats of an episode, ready to be played; `seeds` are by seat, the first one talks to the user."""

    def schedule(self, key: RolloutKey, runtime: ToolRuntime) -> Schedule:
        """Return who speaks when."""
