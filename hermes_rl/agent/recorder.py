"""Call the policy for one rollout and record its replies, for every driver.

A driver (`loop`, `program`) decides the content of a request and the handling of a reply. The recorder applies the
spec's sampling and budgets, and only the recorder writes replies, usage and times into the result; a token-level server
below it writes the tokens into the transcript. Therefore no driver can change the sampled tokens or their context.
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

from hermes_rl.agent.result import AgentResult, ManagedState, Message, ModelCall, reasoning_of, text_of, tokens_of
from hermes_rl.errors import Failure, RowFailure, ServerFailure
from hermes_rl.servers.base import (
    ChatReply,
    ChatRequest,
    ContextLengthExceeded,
    ReasoningOptions,
    TrajectoryFull,
    drawn_seed,
)
from hermes_rl.servers.client import TokenCounter
from hermes_rl.servers.completion import CompletionAdapter
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tokens.rendering import history_named, parse_in_thread
from hermes_rl.tokens.tokenizer import TemplateRefused, Tokenizer
from hermes_rl.tools.base import RewardTimeBudget, ToolRuntime, capped
from hermes_rl.tools.execute import ToolOutcome

if TYPE_CHECKING:
    from hermes_rl.agent.user import AnswersAgent, UserAnswer


@dataclass(frozen=True)
class ResultBudget:
    """Limits in characters for tool results shown to the model; a longer result is cut to its head and tail."""

    default_result_size: int
    """Maximum for one result."""
    turn_budget: int
    """Maximum for all results of a turn together; the longest ones are cut first."""
    preview_size: int
    """Number of characters of a cut result that the model receives."""
    tool_overrides: Mapping[str, int] = field(default_factory=dict)
    """Maximum for one result, by tool name."""

    def apply(self, outcomes: Sequence[ToolOutcome]) -> list[ToolOutcome]:
        """Cut results that are too long. A file that the model reads is cut only to meet the limit of the turn."""
        cut = [
            self._cut(outcome) if len(outcome.content) > self._limit(outcome.name) else outcome for outcome in outcomes
        ]
        for index in sorted(range(len(cut)), key=lambda place: -len(cut[place].content)):
            if sum(len(one.content) for one in cut) <= self.turn_budget:
                break
            cut[index] = self._cut(cut[index])
        return cut

    def _limit(self, tool: str) -> float:
        return math.inf if tool == "read_file" else self.tool_overrides.get(tool, self.default_result_size)

    def _cut(self, outcome: ToolOutcome) -> ToolOutcome:
        return replace(outcome, content=capped(outcome.content, self.preview_size))


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Limits and sampling options of one rollout. Times are in seconds, sizes in tokens; None means no limit."""

    max_turns: int = 30
    timeout: float | None = None
    task_timeout: float | None = None
    """Limit for the agent's work and the commands of its rewards together."""
    deadline: float | None = None
    """Wall-clock limit, excluding the turns of other seats; None: see `most_seconds`."""
    tool_timeout: float | None = None
    max_tool_errors: int | None = None
    max_turns_per_answer: int | None = None
    """Maximum number of model calls until the agent must reply to its user."""
    ending_tools: frozenset[str] = frozenset()
    """Tools whose first call without an error ends the rollout."""
    repair_arguments: bool = False
    """True if arguments whose type differs from the tool's schema are converted when possible."""
    max_tokens: int | None = None
    """Limit for one turn; None leaves it to the server."""
    max_trajectory_tokens: int | None = None
    """Limit for prompt, turns and results together: no turn starts beyond it. A token-level server counts exactly and
    limits a turn to the remaining tokens. For a chat server, the reported usage is used and newer messages are
    estimated.
    """
    temperature: float | None = 1.0
    top_p: float | None = None
    seed: int | None = None
    """Seed of the rollout, from which the seed of each call of the policy and of a simulated user is drawn. None: calls
    have no seed.
    """
    min_trained_share: float = 0.0
    """If a smaller fraction of the sampled tokens is trained on, the rollout gets the stop reason `untrained`."""
    seeded: bool = True
    """If False, rollouts with these options get no seed."""
    reasoning: ReasoningOptions | None = None
    extra_body: Mapping[str, Any] | None = None
    logprobs: bool = False
    results: ResultBudget | None = None
    """Limits for tool results, in addition to the limits of the tools themselves."""

    @property
    def working_time(self) -> float | None:
        """Maximum working time of the agent in seconds."""
        return min((seconds for seconds in (self.timeout, self.task_timeout) if seconds is not None), default=None)

    @property
    def most_seconds(self) -> float:
        """Wall-clock seconds after which the rollout is stopped."""
        if self.deadline is not None:
            return self.deadline
        return LONGEST_DEADLINE if self.timeout is None else max(SHORTEST_DEADLINE, 4 * self.timeout)


SHORTEST_DEADLINE, LONGEST_DEADLINE = 3600.0, 24 * 3600.0


ROUNDS = 3
"""How often a conversation and its prompt alone are sent again, to find out which of them the server fails on."""


class BudgetExhausted(Exception):
    """Raised when a budget leaves no room for another call, or the server refuses the conversation."""

    def __init__(self, stop_reason: StopReason) -> None:
        super().__init__(f"the rollout is over: {stop_reason}")
        self.stop_reason = stop_reason


@dataclass(frozen=True)
class PolicyAnswer:
    """One reply of the policy."""

    index: int
    """Index of the reply in the rollout, from 0: the turn of the transcript."""
    reply: ChatReply
    limit: int | None
    """Maximum number of tokens for the reply."""


class TimeIntervals:
    """Time intervals that may overlap: each second counts once."""

    __slots__ = ("_apart",)

    def __init__(self) -> None:
        self._apart: Sequence[tuple[float, float]] = ()

    def add(self, end: float, seconds: float) -> float:
        """Add the interval of `seconds` that ends at `end`; return its seconds that no other interval has counted."""
        start = end - seconds
        touching = [each for each in self._apart if each[0] <= end and start <= each[1]]
        if not touching:
            self._apart = (*self._apart, (start, end))
            return seconds
        union = min(start, touching[0][0]), max(end, touching[-1][1])
        self._apart = sorted([*(each for each in self._apart if each not in touching), union])
        return union[1] - union[0] - sum(after - before for before, after in touching)


class PolicyRecorder:
    """Call one policy for one rollout. Several calls may run concurrently.

    Args:
        result: the result that is filled in.
        server: the policy.
        tokenizer: estimates the tokens that a chat server has not counted yet; None: only the server's count is used.
    """

    def __init__(
        self, result: AgentResult, server: Any, options: LoopOptions, tokenizer: Tokenizer | None = None
    ) -> None:
        self.result = result
        self.server = server
        self.options = options
        self.tokenizer = tokenizer
        self.by_agents = False
        """True if agents have influenced the first request, so that they may have caused its failure."""
        self._deadline: asyncio.Timeout | None = None
        self._silent: str | None = None
        """The component that had not responded when the deadline passed."""
        self._call_count = 0
        """Number of calls so far, including failed ones."""
        self._under_way = 0
        self._generating, self._queueing = TimeIntervals(), TimeIntervals()
        """Times of the calls since the last moment without a call in flight."""

    async def play(self, drive: Callable[[], Awaitable[StopReason]], runtime: ToolRuntime) -> AgentResult:
        """Run a driver to its end and return the result with its stop reason.

        Raises:
            Failure: a model server, the sandbox or a tool's server failed; `.result` is the part run so far.
        """
        result, bound = self.result, self.options.task_timeout
        runtime.time_left = None if bound is None else RewardTimeBudget(bound)
        try:
            result.stop_reason = await self._in_time(drive)
            runtime.lifetime_expired(result.timings.queue)
        except Failure as failure:
            if failure.stop_reason is StopReason.SANDBOX_FAILURE and runtime.lifetime_expired(result.timings.queue):
                failure.stop_reason = StopReason.SANDBOX_KILLED
            result.stop_reason = failure.stop_reason
            failure.result = result
            # If the agent's own commands killed the sandbox, the policy caused it: the rollout is scored.
            if not failure.stop_reason.graded:
                raise
        if result.trained_share is not None and result.trained_share < self.options.min_trained_share:
            result.stop_reason = StopReason.UNTRAINED
        result.finished_naturally = result.stop_reason.finished_naturally
        if runtime.time_left is not None:
            runtime.time_left.work(result.timings.working)
        if result.transcript is not None and result.transcript.turns:
            result.managed_state = ManagedState(result.transcript.sequences)
        elif isinstance(self.server, CompletionAdapter):
            result.managed_state = self.server.state()
        return result

    async def _in_time(self, drive: Callable[[], Awaitable[StopReason]]) -> StopReason:
        """Run a driver until the deadline; the component it then waits for decides who caused the timeout."""
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
        return StopReason.TIMEOUT

    @contextmanager
    def _record_wait(self, whom: str) -> Iterator[None]:
        """Record the component that the rollout waits for, if the deadline ends the wait."""
        try:
            yield
        except asyncio.CancelledError:
            if self._deadline is not None and self._deadline.expired():
                self._silent = whom
            raise

    async def hear(self, user: AnswersAgent, message: str | None = None) -> UserAnswer:
        """Return the next message of the user or of another agent.

        The deadline is suspended during the turns of other agents. Each agent has its own deadline.
        """
        deadline = self._deadline if getattr(user, "waits_for_seats", False) else None
        ends, started_at = None if deadline is None else deadline.when(), time.monotonic()
        if deadline is not None:
            deadline.reschedule(None)
        with self._record_wait("the user"):
            answer = await user.speak(message)
        if deadline is not None and ends is not None:
            deadline.reschedule(ends + time.monotonic() - started_at)
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
        """Make one policy call and record its reply; replies are recorded in the order of their arrival.

        Args:
            prompt: the part of the conversation that neither the policy nor its tools wrote.
            resent: bytes of the program's request that contains the whole conversation; 0: the loop wrote the messages.

        Raises:
            BudgetExhausted: there is no room for this call.
            ContextLengthExceeded: a program's request does not fit the model's context; a shorter one may.
            ServerFailure: the server failed.
            RowFailure: the first request, which no agent influenced, does not fit or is refused.
        """
        result = self.result
        if (stop_reason := self._exhausted_budget()) is not None:
            raise BudgetExhausted(stop_reason)
        first, self._call_count, self._under_way = result.turns_used == 0, self._call_count + 1, self._under_way + 1
        seed = drawn_seed(self.options.seed, "turn", self._call_count - 1)
        try:
            request = await self._request(messages, tools, rollout_id, resent, seed)
            with self._record_wait("the policy's server"):
                try:
                    reply: ChatReply = await self.server.chat(request)
                except ServerFailure as failure:
                    reply = await self._asked_again(failure, request, None if first and not self.by_agents else prompt)
            if first:
                self._require_room(tokens_of(reply.usage, "prompt_tokens"))
        except ContextLengthExceeded as error:
            if first and not self.by_agents:
                # The policy has not written anything yet: the prompt or the requested limit is too large.
                raise RowFailure(
                    f"the first request does not fit ({error}): the prompt or agent.max_tokens is too large"
                ) from error
            if resent and not isinstance(error, TrajectoryFull):
                raise
            raise BudgetExhausted(StopReason.TOKEN_BUDGET) from error
        finally:
            self._under_way -= 1
        # No await between here and the transcript's turn: both must count replies in the same order.
        result.turns_used += 1
        result.replies.append(reply)
        result.usage.add(reply.usage)
        tokens = (tokens_of(reply.usage, name) for name in ("prompt_tokens", "completion_tokens"))
        started_at = time.time() - reply.timing.generating
        result.model_calls.append(ModelCall(started_at, reply.timing.generating, *tokens))
        result.reasoning_per_turn.append(reasoning_of(reply.message))
        # Seconds that a call shares with other calls count once.
        timings, timing, now = result.timings, reply.timing, time.monotonic()
        timings.generation += self._generating.add(now, timing.generating)
        queued = timing.queued + timing.retrying + timing.paused
        timings.queue += self._queueing.add(now - timing.generating, queued)
        if not self._under_way:
            self._generating, self._queueing = TimeIntervals(), TimeIntervals()
        return PolicyAnswer(result.turns_used - 1, reply, request.max_tokens)

    @property
    def turns_left(self) -> int:
        """Number of further replies that `max_turns` allows."""
        return self.options.max_turns - self.result.turns_used

    async def count(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, resent: int
    ) -> int | None:
        """Return the token count of a program's conversation as a prompt, or None if there is no tokenizer.

        Raises:
            AttemptFailed: the chat template refuses the conversation.
        """
        if isinstance(self.server, TokenCounter):
            transcript = self.result.transcript
            count = await self.server.count(ChatRequest(messages, tools or None, resent=resent, transcript=transcript))
            if count is not None:
                return count
        return None if self.tokenizer is None else await self._prompt_tokens(messages, tools, resent)

    def ended_by(self, answer: PolicyAnswer, calls: Sequence[Any]) -> StopReason | None:
        """Return the stop reason of the last reply itself, or None if it has tool calls to run."""
        stop_reason = _stop_reason_of(answer.reply, calls)
        if stop_reason is None:
            return None
        used, bound = _token_count(answer.reply), self.options.max_trajectory_tokens or math.inf
        cut = used == bound or answer.limit != self.options.max_tokens
        return StopReason.TOKEN_BUDGET if used > bound or (cut and stop_reason is StopReason.LENGTH) else stop_reason

    def _exhausted_budget(self) -> StopReason | None:
        """Return the stop reason of the first exhausted budget, or None."""
        if self.turns_left <= 0:
            return StopReason.MAX_TURNS
        if (bound := self.options.working_time) is not None and self.result.timings.working >= bound:
            return StopReason.TIMEOUT
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
            # Without a `max_tokens` no limit is sent: servers refuse a limit that exceeds their context.
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
        """Retry a failed request and return its reply; raise the cause if it fails again.

        Servers report an unprocessable request with any status code, and a server that fails temporarily recovers.
        Therefore the policy is the cause only if the request fails `ROUNDS` times while the prompt alone succeeds each
        time.
        """
        failed_rounds = 0
        while failure.refused or (prompt is not None and failure.about_the_call):
            cause = await self._find_out(failure, request, prompt)
            if cause is None:
                break
            if failure.refused:
                raise cause from failure
            try:
                reply: ChatReply = await self.server.chat(request)
            except ServerFailure as retry_failure:
                if not retry_failure.about_the_call:
                    raise
                failed_rounds += 1
                if failed_rounds == ROUNDS:
                    raise cause from failure
            else:
                return reply
        raise failure

    async def _find_out(
        self, failure: ServerFailure, request: ChatRequest, prompt: Sequence[Message] | None
    ) -> BudgetExhausted | RowFailure | None:
        """Return an error with the cause of a refused request, or None if the server refuses every request.

        `prompt` is the row's part of a conversation to which agents have added; None if they have added nothing.
        """
        if prompt is None:
            if not request.resent and await self._can_still_reply(replace(request, messages=[])):
                return RowFailure(f"the prompt of the row is refused: {failure.detail}")
        elif await self._can_still_reply(
            replace(request, messages=prompt, tools=None)
        ):  # a program may have sent any tools
            return BudgetExhausted(StopReason.REFUSED)
        return None

    async def _can_still_reply(self, request: ChatRequest) -> bool:
        """Return True if the server, which refused a conversation, replies to this one.

        Otherwise it refuses everything, for example because of an expired key, which neither the policy nor a row
        caused.
        """
        messages = list(request.messages)
        if not any(message["role"] == "user" for message in messages):
            # some templates reject a conversation without a user message
            messages.append({"role": "user", "content": "Hello."})
        try:
            await self.server.chat(replace(request, messages=messages, max_tokens=1, transcript=None))
        except (ServerFailure, ContextLengthExceeded):
            return False
        return True

    async def _prompt_tokens(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, resent: int
    ) -> int:
        """Return the token count of the next prompt: the server's count plus an estimate for newer messages.

        For a program's request everything is estimated, because it may continue any of its conversations.
        """
        used = _token_count(self.result.replies[-1]) if self.result.replies and not resent else 0
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
            return used + len(await parse_in_thread(partial(self.tokenizer.encode, text), len(text)))
        except TemplateRefused:
            return used  # the server counts text that the local tokenizer fails on

    def _require_room(self, size: int, about: str = "") -> None:
        """Raise `TrajectoryFull` if a prompt of `size` tokens leaves no room for a turn."""
        bound = self.options.max_trajectory_tokens
        if bound is not None and size >= bound:
            raise TrajectoryFull(f"{about}{size}", bound)


def _token_count(reply: ChatReply) -> int:
    """Return the tokens of a turn and its prompt as counted by the server; 0 if not counted."""
    return tokens_of(reply.usage, "prompt_tokens") + tokens_of(reply.usage, "completion_tokens")


def _stop_reason_of(reply: ChatReply, calls: Sequence[Any]) -> StopReason | None:
    """Return the stop reason of a reply itself, or None if it has tool calls to run."""
    if reply.finish_reason == "length":
        return StopReason.LENGTH
    if reply.finish_reason == "content_filter" or reply.message.get("refusal"):
        return StopReason.REFUSED
    if calls:
        return None
    return StopReason.FINISHED if text_of(reply.message.get("content")).strip() else StopReason.EMPTY
