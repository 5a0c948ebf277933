"""Asking the policy for one rollout, and writing down what it answered, whoever drives the rollout.

A driver decides what is asked and what is done with an answer: `loop` is one, `program` another. The recorder imposes
the spec's sampling and its budgets, and is the only one that writes answers, usage and times into the result; below it
a token-level server writes the tokens into the transcript. So no driver can change what was sampled, or in which
context.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from hermes_rl.agent.result import AgentResult, ManagedState, Message, reasoning_of, text_of, tokens_of
from hermes_rl.endings import Ending
from hermes_rl.errors import Failure, RowFailure, ServerFailure
from hermes_rl.servers.base import (
    ChatReply,
    ChatRequest,
    ContextLengthExceeded,
    ReasoningOptions,
    TrajectoryFull,
    drawn_seed,
)
from hermes_rl.servers.client import CountsTokens
from hermes_rl.servers.completion import CompletionAdapter
from hermes_rl.tokens.rendering import history_named, read_aside
from hermes_rl.tokens.tokenizer import TemplateRefused, Tokenizer
from hermes_rl.tools.base import TimeLeft, ToolRuntime, capped
from hermes_rl.tools.execute import ToolOutcome

if TYPE_CHECKING:
    from hermes_rl.agent.user import AnswersAgent, UserAnswer


@dataclass(frozen=True)
class ResultBudget:
    """Characters of tool results that the model is told; of a longer result, head and tail are kept."""

    default_result_size: int
    """The most of one result."""
    turn_budget: int
    """The most of all results of a turn together; the longest ones are cut first."""
    preview_size: int
    """What is kept of a result that is cut."""
    tool_overrides: Mapping[str, int] = field(default_factory=dict)
    """The most of one result, by the name of its tool."""

    def apply(self, outcomes: Sequence[ToolOutcome]) -> list[ToolOutcome]:
        """Cut what is too long. What a model reads of a file on purpose is only cut for the whole turn's sake."""
        cut = [
            self._cut(outcome) if len(outcome.content) > self._limit(outcome.name) else outcome for outcome in outcomes
        ]
        for place in sorted(range(len(cut)), key=lambda place: -len(cut[place].content)):
            if sum(len(one.content) for one in cut) <= self.turn_budget:
                break
            cut[place] = self._cut(cut[place])
        return cut

    def _limit(self, tool: str) -> float:
        return math.inf if tool == "read_file" else self.tool_overrides.get(tool, self.default_result_size)

    def _cut(self, outcome: ToolOutcome) -> ToolOutcome:
        return replace(outcome, content=capped(outcome.content, self.preview_size))


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """The bounds and the sampling of one rollout. Times are in seconds, sizes in tokens; None is no bound."""

    max_turns: int = 30
    timeout: float | None = None
    task_timeout: float | None = None
    """Of the agent's work and of the commands of its rewards together."""
    deadline: float | None = None
    """Of the clock, from which nothing but the turns of other seats is subtracted; None: see `most_seconds`."""
    tool_timeout: float | None = None
    max_tool_errors: int | None = None
    max_turns_per_answer: int | None = None
    """Model calls until the agent has to answer its user."""
    ending_tools: frozenset[str] = frozenset()
    """Tools whose first call without an error is the end."""
    repair_arguments: bool = False
    """Whether arguments of another type than the tool's schema says are converted where they can be."""
    max_tokens: int | None = None
    """Of one turn; None leaves it to the server."""
    max_trajectory_tokens: int | None = None
    """Of prompt, turns and results together: no turn begins beyond it. A token-level server counts exactly and gives a
    turn no more than the rest of it; of a chat server the usage is known, and what is new since then is estimated."""
    temperature: float | None = 1.0
    top_p: float | None = None
    seed: int | None = None
    """Of the rollout: each model call of the policy and of a simulated user gets a seed drawn from it. None: calls have
    no seed."""
    min_trained_share: float = 0.0
    """A rollout of which less of the sampled tokens is trained on ends as `untrained`."""
    seeded: bool = True
    """False: rollouts with these options get no seed."""
    reasoning: ReasoningOptions | None = None
    extra_body: Mapping[str, Any] | None = None
    logprobs: bool = False
    results: ResultBudget | None = None
    """Of what tools answer, beside the bounds of the tools themselves."""

    @property
    def working_time(self) -> float | None:
        """The most seconds that the agent itself may work."""
        return min((seconds for seconds in (self.timeout, self.task_timeout) if seconds is not None), default=None)

    @property
    def most_seconds(self) -> float:
        """The seconds of the clock after which the rollout is stopped."""
        if self.deadline is not None:
            return self.deadline
        return LONGEST_DEADLINE if self.timeout is None else max(SHORTEST_DEADLINE, 4 * self.timeout)


SHORTEST_DEADLINE, LONGEST_DEADLINE = 3600.0, 24 * 3600.0


ROUNDS = 3
"""How often a conversation, and its prompt alone, are asked again to find out which of them a server fails over."""


class OverError(Exception):
    """A budget of the rollout leaves no room for another call, or the server refuses the conversation: it is over."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(f"the rollout is over: {ending}")
        self.ending = ending


@dataclass(frozen=True)
class PolicyAnswer:
    """One answer of the policy."""

    number: int
    """Which of the rollout's answers it is, from 0: the turn of the transcript."""
    reply: ChatReply
    limit: int | None
    """Tokens that it was given."""


class Stretches:
    """Stretches of time some of which overlap: each second counts once."""

    __slots__ = ("_apart",)

    def __init__(self) -> None:
        self._apart: Sequence[tuple[float, float]] = ()

    def add(self, end: float, seconds: float) -> float:
        """Add the stretch of so many seconds up to a time; returns how many of them no other one has counted."""
        begin = end - seconds
        touching = [each for each in self._apart if each[0] <= end and begin <= each[1]]
        if not touching:
            self._apart = (*self._apart, (begin, end))
            return seconds
        whole = min(begin, touching[0][0]), max(end, touching[-1][1])
        self._apart = sorted([*(each for each in self._apart if each not in touching), whole])
        return whole[1] - whole[0] - sum(after - before for before, after in touching)


class PolicyRecorder:
    """Asks one policy for one rollout. Several calls may be under way at a time.

    Args:
        result: what is played is written into it.
        server: the policy.
        tokenizer: estimates the tokens of what a chat server has not counted yet; None: only its own count is known.
    """

    def __init__(
        self, result: AgentResult, server: Any, options: LoopOptions, tokenizer: Tokenizer | None = None
    ) -> None:
        self.result = result
        self.server = server
        self.options = options
        self.tokenizer = tokenizer
        self.by_agents = False
        """Whether agents have had a hand in the first request already, so that its failing may be their doing."""
        self._deadline: asyncio.Timeout | None = None
        self._silent: str | None = None
        """Who had not answered when the deadline was over."""
        self._begun = 0
        """Calls so far, those included that failed."""
        self._under_way = 0
        self._generating, self._queueing = Stretches(), Stretches()
        """Of the calls since the last moment in which none was under way."""

    async def play(self, drive: Callable[[], Awaitable[Ending]], runtime: ToolRuntime) -> AgentResult:
        """Let a driver play the rollout, and return the result with its ending. Raises `Failure` where a model server,
        the sandbox or a tool's server failed; `.result` is the part played so far."""
        result, bound = self.result, self.options.task_timeout
        runtime.time_left = None if bound is None else TimeLeft(bound)
        try:
            result.ending = await self._in_time(drive)
            runtime.overslept(result.timings.queue)
        except Failure as failure:
            if failure.ending is Ending.SANDBOX_FAILURE and runtime.overslept(result.timings.queue):
                failure.ending = Ending.SANDBOX_KILLED
            result.ending = failure.ending
            failure.result = result
            # Where the agent's own commands killed the sandbox, the policy did it: the rollout is scored.
            if not failure.ending.graded:
                raise
        if result.trained_share is not None and result.trained_share < self.options.min_trained_share:
            result.ending = Ending.UNTRAINED
        result.finished_naturally = result.ending.finished_naturally
        if runtime.time_left is not None:
            runtime.time_left.work(result.timings.working)
        if result.transcript is not None and result.transcript.turns:
            result.managed_state = ManagedState(result.transcript.sequences)
        elif isinstance(self.server, CompletionAdapter):
            result.managed_state = self.server.state()
        return result

    async def _in_time(self, drive: Callable[[], Awaitable[Ending]]) -> Ending:
        """Let a driver play until the deadline; what it waits for then tells whose doing it is that it has no end."""
        seconds = self.options.most_seconds
        try:
            async with asyncio.timeout(seconds) as deadline:
                self._deadline = deadline
                return await drive()
        except TimeoutError:
            if not deadline.expired():
                raise
        if self._silent is not None:
            raise ServerFailure(f"{self._silent} had not answered when agent.deadline ({seconds:g} s) was over")
        return Ending.TIMEOUT

    @contextmanager
    def _awaits(self, whom: str) -> Iterator[None]:
        """Note whom the rollout waits for in the block, where the deadline ends the wait."""
        try:
            yield
        except asyncio.CancelledError:
            if self._deadline is not None and self._deadline.expired():
                self._silent = whom
            raise

    async def hear(self, user: AnswersAgent, words: str | None = None) -> UserAnswer:
        """Return what the user, or another agent, says next.

        The clock stands still during the turns of other agents. Each has its own deadline and uses up no other one.
        """
        deadline = self._deadline if getattr(user, "waits_for_seats", False) else None
        ends, began = None if deadline is None else deadline.when(), time.monotonic()
        if deadline is not None:
            deadline.reschedule(None)
        with self._awaits("the user"):
            answer = await user.speak(words)
        if deadline is not None and ends is not None:
            deadline.reschedule(ends + time.monotonic() - began)
        return answer

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        prompt: Sequence[Message],
        rollout_id: str,
        resent: int = 0,
    ) -> PolicyAnswer:
        """Make one call of the policy and write its answer down, in the order in which answers come.

        Args:
            prompt: the part of the conversation that neither the policy nor its tools have written.
            resent: bytes of the request in which a program has sent all of this; 0: the messages are our own.

        Raises:
            OverError: there is no room for this call.
            ContextLengthExceeded: a program's request does not fit the model's context; a shorter one may.
            ServerFailure: the server failed.
            RowFailure: the first request, in which no agent has had a hand, does not fit or is refused.
        """
        result = self.result
        if (ending := self._spent()) is not None:
            raise OverError(ending)
        first, self._begun, self._under_way = result.turns_used == 0, self._begun + 1, self._under_way + 1
        seed = drawn_seed(self.options.seed, "turn", self._begun - 1)
        try:
            request = await self._request(messages, tools, rollout_id, resent, seed)
            with self._awaits("the policy's server"):
                try:
                    reply: ChatReply = await self.server.chat(request)
                except ServerFailure as failure:
                    reply = await self._asked_again(failure, request, None if first and not self.by_agents else prompt)
            if first:
                self._require_room(tokens_of(reply.usage, "prompt_tokens"))
        except ContextLengthExceeded as error:
            if first and not self.by_agents:
                # The policy has not written anything yet: the prompt, or the limit that we asked for, is too large.
                raise RowFailure(
                    f"the first request does not fit ({error}): the prompt or agent.max_tokens is too large"
                ) from error
            if resent and not isinstance(error, TrajectoryFull):
                raise
            raise OverError(Ending.TOKEN_BUDGET) from error
        finally:
            self._under_way -= 1
        # Between here and the transcript's own turn nothing waits: both count the answers in one order.
        result.turns_used += 1
        result.replies.append(reply)
        result.usage.add(reply.usage)
        result.reasoning_per_turn.append(reasoning_of(reply.message))
        # The seconds of a call that it has shared with others count once.
        timings, timing, now = result.timings, reply.timing, time.monotonic()
        timings.generation += self._generating.add(now, timing.generating)
        queued = timing.queued + timing.retrying + timing.paused
        timings.queue += self._queueing.add(now - timing.generating, queued)
        if not self._under_way:
            self._generating, self._queueing = Stretches(), Stretches()
        return PolicyAnswer(result.turns_used - 1, reply, request.max_tokens)

    @property
    def turns_left(self) -> int:
        """How many more answers `max_turns` allows."""
        return self.options.max_turns - self.result.turns_used

    async def count(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, resent: int
    ) -> int | None:
        """Return how many tokens a program's conversation has as a prompt; None where there is no tokenizer. Raises
        `AttemptFailed` where the template refuses it."""
        if isinstance(self.server, CountsTokens):
            transcript = self.result.transcript
            count = await self.server.count(ChatRequest(messages, tools or None, resent=resent, transcript=transcript))
            if count is not None:
                return count
        return None if self.tokenizer is None else await self._prompt_tokens(messages, tools, resent)

    def ended_by(self, answer: PolicyAnswer, calls: Sequence[Any]) -> Ending | None:
        """Return the ending that the last answer brings by itself; None where its tool calls go on."""
        ending = _ending_of(answer.reply, calls)
        if ending is None:
            return None
        used, bound = _counted(answer.reply), self.options.max_trajectory_tokens or math.inf
        cut = used == bound or answer.limit != self.options.max_tokens
        return Ending.TOKEN_BUDGET if used > bound or (cut and ending is Ending.LENGTH) else ending

    def _spent(self) -> Ending | None:
        """Return the ending by the first budget that leaves no room for another call."""
        if self.turns_left <= 0:
            return Ending.MAX_TURNS
        if (bound := self.options.working_time) is not None and self.result.timings.working >= bound:
            return Ending.TIMEOUT
        return None

    async def _request(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        rollout_id: str,
        resent: int,
        seed: int | None,
    ) -> ChatRequest:
        options = self.options
        limit, bound = options.max_tokens, options.max_trajectory_tokens
        if bound is not None and not getattr(self.server, "exact", False):
            size = await self._prompt_tokens(messages, tools, resent)
            self._require_room(size, "about ")
            # Without a `max_tokens` the rest is not sent: servers refuse a limit that does not fit their context.
            limit = None if limit is None else min(limit, bound - size)
        return ChatRequest(
            messages=messages,
            tools=tools or None,
            temperature=options.temperature,
            top_p=options.top_p,
            max_tokens=limit,
            max_trajectory_tokens=bound,
            seed=seed,
            reasoning=options.reasoning,
            extra_body=options.extra_body,
            logprobs=options.logprobs,
            rollout_id=rollout_id,
            resent=resent,
            transcript=self.result.transcript,
        )

    async def _asked_again(
        self, failure: ServerFailure, request: ChatRequest, prompt: Sequence[Message] | None
    ) -> ChatReply:
        """Return the reply to a request that failed, where it does not fail again; raises what made it fail.

        Servers answer what they cannot process with any status, and one that was down for a while, or fails now and
        then, answers again: the policy's doing is what fails `ROUNDS` times while the prompt is answered each time.
        """
        asked = 0
        while failure.refused or (prompt is not None and failure.about_the_call):
            cause = await self._find_out(failure, request, prompt)
            if cause is None:
                break
            if failure.refused:
                raise cause from failure
            try:
                reply: ChatReply = await self.server.chat(request)
            except ServerFailure as again:
                if not again.about_the_call:
                    raise
                asked += 1
                if asked == ROUNDS:
                    raise cause from failure
            else:
                return reply
        raise failure

    async def _find_out(
        self, failure: ServerFailure, request: ChatRequest, prompt: Sequence[Message] | None
    ) -> OverError | RowFailure | None:
        """Return an error that says what made the server refuse a request; None where it answers no other one.

        `prompt` is what the row gave of a conversation to which agents have added; None where they have added nothing.
        """
        if prompt is None:
            if not request.resent and await self._answers(replace(request, messages=[])):
                return RowFailure(f"the prompt of the row is refused: {failure.detail}")
        elif await self._answers(replace(request, messages=prompt, tools=None)):  # a program may have sent any tools
            return OverError(Ending.REFUSED)
        return None

    async def _answers(self, request: ChatRequest) -> bool:
        """Return True if the server, which refused a conversation, answers this one.

        Else it refuses everything, such as a key that is no longer valid, which neither the policy nor a row caused.
        """
        messages = list(request.messages)
        if not any(message["role"] == "user" for message in messages):
            messages.append({"role": "user", "content": "Hello."})  # some templates take no conversation without one
        try:
            await self.server.chat(replace(request, messages=messages, max_tokens=1, transcript=None))
        except (ServerFailure, ContextLengthExceeded):
            return False
        return True

    async def _prompt_tokens(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, resent: int
    ) -> int:
        """Return the tokens of the next prompt: those that the server has counted, and an estimate of what is new.

        Of what a program has sent all is estimated: it may go on with any of its conversations.
        """
        used = _counted(self.result.replies[-1]) if self.result.replies and not resent else 0
        if self.tokenizer is None:
            return used
        if used:
            new = list(takewhile(lambda message: message["role"] != "assistant", reversed(messages)))
            text = "\n".join(text_of(message.get("content")) for message in new)
        else:
            try:
                text = self.tokenizer.render(history_named(messages), tools or None, add_generation_prompt=True)
            except TemplateRefused:
                text = json.dumps([messages, tools])
        try:
            return used + len(await read_aside(partial(self.tokenizer.encode, text), len(text)))
        except TemplateRefused:
            return used  # the server counts what our tokenizer fails at

    def _require_room(self, size: int, about: str = "") -> None:
        """Raise `TrajectoryFull` where a prompt of so many tokens leaves no room for a turn."""
        bound = self.options.max_trajectory_tokens
        if bound is not None and size >= bound:
            raise TrajectoryFull(f"{about}{size}", bound)


def _counted(reply: ChatReply) -> int:
    """Return the tokens of a turn and its prompt as the server counted them; 0 where it did not."""
    return tokens_of(reply.usage, "prompt_tokens") + tokens_of(reply.usage, "completion_tokens")


def _ending_of(reply: ChatReply, calls: Sequence[Any]) -> Ending | None:
    """Return the ending that a reply brings by itself; None where its tool calls go on."""
    if reply.finish_reason == "length":
        return Ending.LENGTH
    if reply.finish_reason == "content_filter" or reply.message.get("refusal"):
        return Ending.REFUSED
    if calls:
        return None
    return Ending.FINISHED if text_of(reply.message.get("content")).strip() else Ending.EMPTY
