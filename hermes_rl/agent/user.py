"""Respond to the agent as its user: a model with its own goals and tools, code of the spec, or fixed messages of the
row.

This module owns the user's side of the conversation: its history with swapped roles, its tool calls, which the agent
never sees, and the stop reason that it sets. Its messages are user messages, so none of them is trained on. If the user
fails, infrastructure has failed, which raises a `ServerFailure` and never gives a score. However, if the user replies
once the agent's messages are replaced by neutral ones, the agent's messages silenced it: then the conversation is over
and graded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hermes_rl.agent.history import kept_message, sendable
from hermes_rl.agent.result import AgentResult, Message, text_of
from hermes_rl.errors import Failure, ServerFailure, UserError
from hermes_rl.servers.base import ChatReply, ChatRequest, ContextLengthExceeded, drawn_seed, without_thinking
from hermes_rl.servers.completion import as_chat_server
from hermes_rl.spec.new_names import REPLY
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tools.base import ToolFailedError, Toolkit, ToolRuntime, capped
from hermes_rl.tools.execute import execute_calls
from hermes_rl.values import is_number

GREETING = "Hi! How can I help you today?"
"""The agent's first message in the history of a user that speaks first."""
ATTEMPTS = 3
"""Number of empty replies after which a user has failed."""
MOST_ROUNDS = 10
"""Maximum rounds of tool calls before a user must speak."""
LEAST = 1000
"""Minimum characters of each agent message that must fit into the user's context."""
PLAIN = "Can you tell me more?"
"""Replaces the agent's messages to test if the user would reply to a different agent."""


def user_id(rollout: str) -> str:
    """Return the id of a rollout's user, so that a server for agent and user can distinguish them."""
    return f"{rollout}-user"


class _EmptyReplyError(Exception):
    """The simulated user returned an empty reply.

    Args:
        detail: the cause.
        is_infrastructure: True if the cause is independent of the conversation.
        by_server: True if its server failed.
        too_long: True if the conversation does not fit its context.
    """

    def __init__(
        self, detail: str, *, is_infrastructure: bool = False, by_server: bool = False, too_long: bool = False
    ) -> None:
        super().__init__(detail)
        self.is_infrastructure, self.by_server, self.too_long = is_infrastructure, by_server, too_long


@dataclass(frozen=True)
class UserAnswer:
    """Message of the user to the agent, with its effects."""

    message: Message | None
    """Message for the agent's history, or None if the user sends no further message."""
    stop_reason: StopReason | None = None
    """Stop reason if this message is the last."""
    tools: Collection[str] | None = None
    """Names of the tools that the agent may call from now on; None: unchanged."""
    reward: float | None = None
    """Reward of the environment for the turn that the user responds to."""
    error: str | None = None
    """Error raised by the user's code."""
    by_agents: bool = False
    """True if other agents, which are trained or may be hostile, influenced this message."""


class AnswersAgent(Protocol):
    """Respond to the agent's turns without tool calls in one rollout."""

    @property
    def speaks_first(self) -> bool:
        """True if it speaks first."""

    def start(self, result: AgentResult, seed: int | None = None) -> None:
        """Take over the conversation so far. `result` is updated as it continues; `seed` is the rollout's seed."""

    async def speak(self, message: str | None = None) -> UserAnswer:
        """Return the reply to the agent's message, or the opening message if there is none yet. Raises Failure."""


class SimulatedUser:
    """A user simulated by a model.

    Args:
        server: model server of the user.
        system: description of the user and its goal.
        runtime: the rollout's sandbox; the user's tools act on the same state as the agent's.
        toolkit: tools of the user.
        stop: phrases that end the conversation when the user sends one.
        max_turns: maximum number of messages.
        speaks_first: True if it speaks first.
        transform: passes its message to code of the spec, whose result the agent receives; raises `ToolFailedError`.
    """

    def __init__(
        self,
        server: Any,
        system: str | None,
        runtime: ToolRuntime,
        *,
        toolkit: Toolkit | None = None,
        stop: Sequence[str] = (),
        max_turns: int = 30,
        speaks_first: bool = False,
        transform: Callable[[str], Awaitable[Any]] | None = None,
    ) -> None:
        self.speaks_first = speaks_first
        self._transform = transform
        self.turns = 0
        self._server = as_chat_server(server)
        self._runtime = runtime
        self._toolkit = toolkit or Toolkit()
        self._stop = tuple(stop)
        self._max_turns = max_turns
        self._seed: int | None = None
        self._calls = 0
        self._has_agent_message = False
        """True if the agent has sent a message, in addition to the prompt."""
        self._history: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def start(self, result: AgentResult, seed: int | None = None) -> None:
        """Take over the conversation so far; its user messages count as messages of this user.

        `seed` is the rollout's seed, from which each call of the user gets a seed.
        """
        self._seed = seed
        spoken = [message for message in result.messages if message["role"] in ("user", "assistant")]
        if not spoken or spoken[0]["role"] == "user":
            self._history.append({"role": "user", "content": GREETING})
        for message in spoken:
            role = "assistant" if message["role"] == "user" else "user"
            self._history.append({"role": role, "content": text_of(message.get("content"))})

    async def speak(self, message: str | None = None) -> UserAnswer:
        """Return the reply to the agent's message, or the opening message if there is none yet. Raises Failure."""
        if message is not None:
            self._history.append({"role": "user", "content": message})
            self._has_agent_message = True
        text = await self._reply_or_failure()
        self.turns += 1
        stop_reason = StopReason.USER_TURNS if self.turns >= self._max_turns else None
        if any(phrase in text for phrase in self._stop):
            stop_reason = StopReason.USER_STOP
        if self._transform is None:
            return UserAnswer({"role": "user", "content": text}, stop_reason)
        try:
            answer = user_answer(await self._transform(text), self._runtime.toolkit.names)
        except ToolFailedError as error:  # its input was sent to the agent, and may be what the agent asked for
            return UserAnswer(None, StopReason.ENVIRONMENT_ERROR, error=f"user.transform: {error.detail}")
        if answer.message is not None:  # the user has said what the agent receives
            self._history[-1] = {"role": "assistant", "content": text_of(answer.message["content"])}
        return replace(answer, stop_reason=answer.stop_reason or stop_reason)

    async def _reply_or_failure(self) -> str:
        """Return the user's message.

        Raises:
            Failure: the user has no message; the stop reason tells if the policy caused it.
        """
        before = len(self._history)
        try:
            return await self._generate_message()
        except _EmptyReplyError as speechless:
            problem = speechless
        del self._history[before:]
        innocent = not self._has_agent_message or problem.is_infrastructure or not await self._speaks_otherwise()
        if self._has_agent_message and problem.too_long and (not innocent or self.turns > 1):
            # The user's own messages may become too long, too, if the agent prolongs the conversation.
            raise Failure(str(problem), stop_reason=StopReason.TOKEN_BUDGET) from problem
        if not innocent:
            if problem.by_server:  # the server may have been down temporarily
                try:
                    return await self._generate_message()
                except _EmptyReplyError as retry_error:
                    problem = retry_error
            if not problem.is_infrastructure:
                raise Failure(
                    f"{problem}, and speaks where the agent says something else", stop_reason=StopReason.USER_STOP
                )
        raise ServerFailure(str(problem)) from problem

    async def _speaks_otherwise(self) -> bool:
        """Return True if the user, without tools, would reply to neutral agent messages."""
        neutral_history = [
            {**message, "content": PLAIN} if message["role"] == "user" else message for message in self._history
        ]
        try:
            reply = await self._complete_reply(neutral_history, tools=None)
        except _EmptyReplyError:
            return False
        return bool(without_thinking(text_of(kept_message(reply.message, 0)["content"])).strip())

    async def _generate_message(self) -> str:
        silent = 0
        for _ in range(MOST_ROUNDS):
            message = kept_message((await self._ask()).message, self.turns + 1)
            text = without_thinking(text_of(message["content"])).strip()
            if "tool_calls" in message:
                self._history.append(message)
                await self._act(message["tool_calls"])
            elif text:
                self._history.append({"role": "assistant", "content": text})
                return text
            else:
                silent += 1
            if silent == ATTEMPTS:
                raise _EmptyReplyError("the simulated user returned an empty reply")
        raise _EmptyReplyError(f"the simulated user calls tools {MOST_ROUNDS} times in a row without a message")

    async def _ask(self) -> ChatReply:
        """Return the user's next reply or calls; agent messages are cut, with a mark, until all of them fit."""
        texts = [text_of(message.get("content")) for message in self._history if message["role"] == "user"]
        limit = max(LEAST, *map(len, texts)) if texts else LEAST
        while True:
            try:
                return await self._complete_reply(self._shorten_messages(limit), tools=self._toolkit.schemas or None)
            except _EmptyReplyError as speechless:
                if not speechless.too_long or limit <= LEAST:
                    raise
                limit = max(limit // 2, LEAST)

    def _shorten_messages(self, limit: int) -> list[Message]:
        return [
            {**message, "content": capped(text_of(message.get("content")), limit)}
            if message["role"] == "user"
            else message
            for message in self._history
        ]

    async def _complete_reply(self, history: list[Message], tools: Sequence[dict[str, Any]] | None) -> ChatReply:
        seed = drawn_seed(self._seed, "user", self._calls)
        request = ChatRequest(sendable(history), tools=tools, seed=seed, rollout_id=user_id(self._runtime.task_id))
        try:
            reply = await self._server.chat(request)
        except ContextLengthExceeded as error:
            detail = f"the conversation does not fit the context of the simulated user: {error}"
            raise _EmptyReplyError(detail, too_long=True) from error
        except ServerFailure as failure:
            raise _EmptyReplyError(
                failure.detail, is_infrastructure=not failure.about_the_call, by_server=True
            ) from failure
        self._calls += 1
        if reply.finish_reason == "length":
            raise _EmptyReplyError(
                "the simulated user's reply was cut off; is the token limit of its server too small?"
            )
        return reply

    async def _act(self, calls: Sequence[dict[str, Any]]) -> None:
        for outcome in await execute_calls(calls, self._toolkit, self._runtime, turn=self.turns + 1):
            self._history.append({"role": "tool", "tool_call_id": outcome.id, "content": outcome.content})


class WithHook:
    """A user that calls code of the spec before its replies, once the agent has sent a message.

    Args:
        user: the wrapped user.
        hook: calls the code; raises `ToolFailedError`, which stops the rollout and counts as caused by the agent.
    """

    def __init__(self, user: AnswersAgent, hook: Callable[[], Awaitable[Any]]) -> None:
        self.speaks_first, self._user, self._hook = user.speaks_first, user, hook

    def start(self, result: AgentResult, seed: int | None = None) -> None:
        self._user.start(result, seed)

    async def speak(self, message: str | None = None) -> UserAnswer:
        """Call the hook, then return the user's reply."""
        if message is not None:
            try:
                await self._hook()
            except ToolFailedError as error:
                return UserAnswer(None, StopReason.ENVIRONMENT_ERROR, error=error.detail)
        return await self._user.speak(message)


# ------------------------------------------------------------------------------------------------- A user that is code


class CodeUser:
    """A user implemented in code of the spec, such as a game environment, which replies by rules.

    Its reply is a text; None if it has nothing more to say; or a mapping with any of `say`, `done` (true: this message
    is the last), `tools` (names of the tools that the agent may call from now on) and `reward` (for this turn).

    Args:
        ask: passes the agent's message to the code, None for the opening; raises `ToolFailedError`.
        spec_key: key of the code in the spec, for error messages.
        tools: names of all tools that the agent can have.
        max_turns: maximum number of messages.
        speaks_first: True if it speaks first.
    """

    def __init__(
        self,
        ask: Callable[[str | None], Awaitable[Any]],
        spec_key: str,
        tools: Collection[str],
        *,
        max_turns: int = 30,
        speaks_first: bool = False,
    ) -> None:
        self.speaks_first = speaks_first
        self._ask, self._spec_key, self._tools = ask, spec_key, tools
        self._turns_left = max_turns

    def start(self, result: AgentResult, seed: int | None = None) -> None:
        """Do nothing: the code knows its row, and receives the agent's messages."""

    async def speak(self, message: str | None = None) -> UserAnswer:
        """Return the reply to the agent's message, or the opening message.

        If the code raises on a message of the agent, the conversation ends, caused by the agent.

        Raises:
            UserError: the code raised before the agent had sent a message.
        """
        self._turns_left -= 1
        try:
            answer = user_answer(await self._ask(message), self._tools)
            if message is None and answer.stop_reason is not None:
                raise ToolFailedError("", "is done before the agent has sent a message")
        except ToolFailedError as error:
            if message is None:
                raise UserError(f"{self._spec_key}: {error.detail}") from error
            return UserAnswer(None, StopReason.ENVIRONMENT_ERROR, error=error.detail)
        last = answer.stop_reason is None and self._turns_left <= 0
        return replace(answer, stop_reason=StopReason.USER_TURNS) if last else answer


def user_answer(value: Any, tools: Collection[str]) -> UserAnswer:
    """Parse the reply of a user implemented in code; see `CodeUser`.

    Args:
        tools: names of the existing tools.

    Raises:
        ToolFailedError: the reply has another form; the detail is a predicate.
    """
    if value is None or isinstance(value, str):
        value = {"say": value, "done": value is None}
    if isinstance(value, Mapping) and (renamed := value.keys() & REPLY.keys()):
        raise ToolFailedError("", "; ".join(f"`{old}` of a reply is now `{REPLY[old]}`" for old in renamed))
    if not isinstance(value, Mapping) or not value.keys() <= {"say", "done", "tools", "reward"}:
        raise _malformed_reply("a text, null, or a mapping of `say`, `done`, `tools` and `reward`", value)
    say, done, offered, reward = (value.get(key) for key in ("say", "done", "tools", "reward"))
    if not isinstance(done, bool | None) or not isinstance(say, str if not done else str | None):
        raise _malformed_reply("`say` with a text, unless `done` is true", value)
    if offered is not None and not (isinstance(offered, list | tuple) and set(tools).issuperset(map(str, offered))):
        raise _malformed_reply(
            f"`tools` with names of the agent's tools ({', '.join(sorted(tools)) or 'it has none'})", value
        )
    if reward is not None and not is_number(reward):
        raise _malformed_reply("`reward` with a number", value)
    message = None if say is None else {"role": "user", "content": say}
    return UserAnswer(message, StopReason.ENVIRONMENT_DONE if done else None, offered, reward)


def _malformed_reply(needed: str, value: Any) -> ToolFailedError:
    return ToolFailedError("", f"has to answer with {needed}, not {capped(repr(value), 200)}")


class ScriptedUser:
    """A user whose messages are fixed in the row; the agent's reply to the last one ends the conversation.

    Args:
        turns: mappings in the form of `CodeUser` replies.
        spec_key: key of the messages in the spec, for error messages.
        tools: names of all tools that the agent can have.
        before: called with the index of a message before it is sent, for example to write its files. Returns a stop
            reason if the message must not be sent; raises `ToolFailedError` if the agent prevents the call.
        speaks_first: True if the first message comes before the agent's.
    """

    def __init__(
        self,
        turns: Sequence[Mapping[str, Any]],
        spec_key: str,
        tools: Collection[str],
        before: Callable[[AgentResult, int], Awaitable[StopReason | None]] | None = None,
        *,
        speaks_first: bool = False,
    ) -> None:
        self.speaks_first = speaks_first
        self._spec_key, self._before, self._spoken = spec_key, before, 0
        self._result = AgentResult()
        try:
            self._answers = [user_answer(each, tools) for each in turns]
        except ToolFailedError as error:
            raise UserError(f"{spec_key} {error.detail}") from error

    def start(self, result: AgentResult, seed: int | None = None) -> None:
        """Store the result that holds the conversation; the messages are fixed."""
        self._result = result

    async def speak(self, message: str | None = None) -> UserAnswer:
        """Return the next message, or the first one as the opening.

        Raises:
            UserError: the files of the first message cannot be written.
            Failure: a reward of the step before failed.
        """
        index, self._spoken = self._spoken, self._spoken + 1
        if index >= len(self._answers):
            return UserAnswer(None, StopReason.FINISHED)
        try:
            stop_reason = None if self._before is None else await self._before(self._result, index)
        except ToolFailedError as error:
            if message is None:
                raise UserError(f"{self._spec_key}.{index}: {error.detail}") from error
            return UserAnswer(None, StopReason.ENVIRONMENT_ERROR, error=error.detail)
        return self._answers[index] if stop_reason is None else UserAnswer(None, stop_reason)
