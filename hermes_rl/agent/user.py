"""Who answers the agent: another model, with wishes and tools of its own; code of the spec; or fixed words of the row.

Owns the user's side of the conversation: its history with the roles swapped, its tool calls, which the agent never
sees, and the end that it sets. Its words are user messages, so none of them is trained on. When the user fails, the
infrastructure has failed: it raises a `ServerFailure`, never a score. But a user that speaks where plain words stand in
the place of the agent's was silenced by these: then the conversation is over, and graded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hermes_rl.agent.history import kept_message, sendable
from hermes_rl.agent.result import AgentResult, Message, Usage, text_of
from hermes_rl.endings import Ending
from hermes_rl.errors import Failure, ServerFailure, UserError
from hermes_rl.servers.base import ChatReply, ChatRequest, ContextLengthExceeded, drawn_seed, without_thinking
from hermes_rl.servers.completion import as_chat_server
from hermes_rl.tools.base import ToolFailedError, Toolkit, ToolRuntime, capped
from hermes_rl.tools.execute import execute_calls
from hermes_rl.values import is_number

GREETING = "Hi! How can I help you today?"
"""Stands as the agent's first words in the history of a user that speaks first."""
ATTEMPTS = 3
"""Empty answers after which a user has failed."""
MOST_ROUNDS = 10
"""Rounds of tool calls before a user has to speak."""
LEAST = 1000
"""Characters of each of the agent's messages that have to fit into the user's context."""
PLAIN = "Can you tell me more?"
"""Stands in the place of the agent's words, to see whether the user would speak to somebody else."""


def user_id(rollout: str) -> str:
    """Return the id of a rollout's user, so that a server that plays agent and user keeps them apart."""
    return f"{rollout}-user"


class _SpeechlessError(Exception):
    """The user has no words.

    Args:
        detail: why.
        ours: for a reason that has nothing to do with what it was asked.
        by_server: its server failed.
        too_long: the conversation does not fit its context.
    """

    def __init__(self, detail: str, *, ours: bool = False, by_server: bool = False, too_long: bool = False) -> None:
        super().__init__(detail)
        self.ours, self.by_server, self.too_long = ours, by_server, too_long


@dataclass(frozen=True)
class UserAnswer:
    """What the agent hears from its user, and what comes with it."""

    message: Message | None
    """For the agent's history; None where the user says nothing more."""
    ending: Ending | None = None
    """Set where these are the last words."""
    tools: Collection[str] | None = None
    """Names of the tools that the agent may call from now on; None: those of before."""
    reward: float | None = None
    """What the world gives for the turn that is answered."""
    error: str | None = None
    """What the user's code raised."""
    by_agents: bool = False
    """Whether other agents, which are trained or may be hostile, have had a hand in these words."""


class AnswersAgent(Protocol):
    """Who answers the agent's turns without tool calls, for one rollout."""

    @property
    def opens(self) -> bool:
        """Whether it speaks first."""

    def begin(self, result: AgentResult, seed: int | None = None) -> None:
        """Take over the conversation so far, which is written into `result` as it goes on; `seed` is the rollout's."""

    async def speak(self, words: str | None = None) -> UserAnswer:
        """Answer the agent's words, or open the conversation where there are none yet. Raises Failure."""


class SimulatedUser:
    """A user that a model plays.

    Args:
        server: who plays it.
        system: who it is and what it wants.
        runtime: the rollout's machine; the user's tools act on the same state as the agent's.
        toolkit: its own tools.
        stop: phrases that end the conversation when it says one.
        max_turns: how often it speaks at most.
        opens: it speaks first.
        edit: puts its words to code of the spec, whose answer the agent hears; raises `ToolFailedError`.
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
        opens: bool = False,
        edit: Callable[[str], Awaitable[Any]] | None = None,
    ) -> None:
        self.opens = opens
        self._edit = edit
        self.usage = Usage()
        self.turns = 0
        self._server = as_chat_server(server)
        self._runtime = runtime
        self._toolkit = toolkit or Toolkit()
        self._stop = tuple(stop)
        self._max_turns = max_turns
        self._seed: int | None = None
        self._calls = 0
        self._heard = False
        """The agent has said something, and not only the prompt for it."""
        self._history: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def begin(self, result: AgentResult, seed: int | None = None) -> None:
        """Take over the conversation so far; its user messages count as this user's own words.

        `seed` is the rollout's; each call of the user gets a seed drawn from it.
        """
        self._seed = seed
        spoken = [message for message in result.messages if message["role"] in ("user", "assistant")]
        if not spoken or spoken[0]["role"] == "user":
            self._history.append({"role": "user", "content": GREETING})
        for message in spoken:
            role = "assistant" if message["role"] == "user" else "user"
            self._history.append({"role": role, "content": text_of(message.get("content"))})

    async def speak(self, words: str | None = None) -> UserAnswer:
        """Answer the agent's words, or open the conversation where there are none yet. Raises Failure."""
        if words is not None:
            self._history.append({"role": "user", "content": words})
            self._heard = True
        text = await self._words_or_whose_doing()
        self.turns += 1
        ending = Ending.USER_TURNS if self.turns >= self._max_turns else None
        if any(phrase in text for phrase in self._stop):
            ending = Ending.USER_STOP
        if self._edit is None:
            return UserAnswer({"role": "user", "content": text}, ending)
        try:
            answer = user_answer(await self._edit(text), self._runtime.toolkit.names)
        except ToolFailedError as error:  # what it fails at was said to the agent, and may be what the agent asked for
            return UserAnswer(None, Ending.WORLD_FAILED, error=f"user.edit: {error.detail}")
        if answer.message is not None:  # it has said what the agent hears
            self._history[-1] = {"role": "assistant", "content": text_of(answer.message["content"])}
        return replace(answer, ending=answer.ending or ending)

    async def _words_or_whose_doing(self) -> str:
        """Return the words. Raises a `Failure`; its ending is the policy's where that left the user without any."""
        before = len(self._history)
        try:
            return await self._words()
        except _SpeechlessError as speechless:
            problem = speechless
        del self._history[before:]
        innocent = not self._heard or problem.ours or not await self._speaks_otherwise()
        if self._heard and problem.too_long and (not innocent or self.turns > 1):
            # With the turns that the agent draws out the user's own words may become too long, too.
            raise Failure(str(problem), ending=Ending.TOKEN_BUDGET) from problem
        if not innocent:
            if problem.by_server:  # which may have been down for a while
                try:
                    return await self._words()
                except _SpeechlessError as again:
                    problem = again
            if not problem.ours:
                raise Failure(f"{problem}, and speaks where the agent says something else", ending=Ending.USER_STOP)
        raise ServerFailure(str(problem)) from problem

    async def _speaks_otherwise(self) -> bool:
        """Ask the user, which may not act, what it would say if the agent's words were plain ones."""
        plain = [{**message, "content": PLAIN} if message["role"] == "user" else message for message in self._history]
        try:
            reply = await self._answer(plain, tools=None)
        except _SpeechlessError:
            return False
        return bool(without_thinking(text_of(kept_message(reply.message, 0)["content"])).strip())

    async def _words(self) -> str:
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
                raise _SpeechlessError("the simulated user says nothing")
        raise _SpeechlessError(f"the simulated user calls tools {MOST_ROUNDS} times in a row and says nothing")

    async def _ask(self) -> ChatReply:
        """Ask for the next words or calls; what the agent said is cut, with a mark, until all of it fits."""
        texts = [text_of(message.get("content")) for message in self._history if message["role"] == "user"]
        limit = max(LEAST, *map(len, texts)) if texts else LEAST
        while True:
            try:
                return await self._answer(self._cut(limit), tools=self._toolkit.schemas or None)
            except _SpeechlessError as speechless:
                if not speechless.too_long or limit <= LEAST:
                    raise
                limit = max(limit // 2, LEAST)

    def _cut(self, limit: int) -> list[Message]:
        return [
            {**message, "content": capped(text_of(message.get("content")), limit)}
            if message["role"] == "user"
            else message
            for message in self._history
        ]

    async def _answer(self, history: list[Message], tools: Sequence[dict[str, Any]] | None) -> ChatReply:
        seed = drawn_seed(self._seed, "user", self._calls)
        request = ChatRequest(sendable(history), tools=tools, seed=seed, rollout_id=user_id(self._runtime.task_id))
        try:
            reply = await self._server.chat(request)
        except ContextLengthExceeded as error:
            what = f"the conversation does not fit the context of the simulated user: {error}"
            raise _SpeechlessError(what, too_long=True) from error
        except ServerFailure as failure:
            raise _SpeechlessError(failure.detail, ours=not failure.about_the_call, by_server=True) from failure
        self._calls += 1
        self.usage.add(reply.usage)
        if reply.finish_reason == "length":
            raise _SpeechlessError("the simulated user's words were cut; is its server's limit of tokens too small?")
        return reply

    async def _act(self, calls: Sequence[dict[str, Any]]) -> None:
        for outcome in await execute_calls(calls, self._toolkit, self._runtime, turn=self.turns + 1):
            self._history.append({"role": "tool", "tool_call_id": outcome.id, "content": outcome.content})


class WithHook:
    """A user before whose answers code of the spec is called, once the agent has said something.

    Args:
        user: who answers.
        hook: calls the code; raises `ToolFailedError`, which ends the rollout and is the agent's doing.
    """

    def __init__(self, user: AnswersAgent, hook: Callable[[], Awaitable[Any]]) -> None:
        self.opens, self._user, self._hook = user.opens, user, hook

    def begin(self, result: AgentResult, seed: int | None = None) -> None:
        self._user.begin(result, seed)

    async def speak(self, words: str | None = None) -> UserAnswer:
        """Call the hook, and let the user answer."""
        if words is not None:
            try:
                await self._hook()
            except ToolFailedError as error:
                return UserAnswer(None, Ending.WORLD_FAILED, error=error.detail)
        return await self._user.speak(words)


# ------------------------------------------------------------------------------------------------- A user that is code


class UserOfCode:
    """A user that is code of the spec, such as the world of a game: what it is told it answers by rules.

    Its answer is a text; None, where it has nothing more to say; or a mapping with any of `say`, `over` (true: these
    are the last words), `tools` (names of those that the agent may call from now on) and `reward` (for this turn).

    Args:
        ask: puts the agent's words to the code, None for the opening; raises `ToolFailedError`.
        where: names the code in messages.
        tools: names of all tools that the agent can have.
        max_turns: how often it speaks at most.
        opens: it speaks first.
    """

    def __init__(
        self,
        ask: Callable[[str | None], Awaitable[Any]],
        where: str,
        tools: Collection[str],
        *,
        max_turns: int = 30,
        opens: bool = False,
    ) -> None:
        self.opens = opens
        self._ask, self._where, self._tools = ask, where, tools
        self._turns_left = max_turns

    def begin(self, result: AgentResult, seed: int | None = None) -> None:
        """Do nothing: the code knows its row, and hears what the agent says."""

    async def speak(self, words: str | None = None) -> UserAnswer:
        """Answer the agent's words, or open the conversation.

        Where the code raises at what the agent has said, that is the end, and the agent's doing. Raises `UserError`
        where it raised before the agent had said anything.
        """
        self._turns_left -= 1
        try:
            answer = user_answer(await self._ask(words), self._tools)
            if words is None and answer.ending is not None:
                raise ToolFailedError("", "is over before the agent has said anything")
        except ToolFailedError as error:
            if words is None:
                raise UserError(f"{self._where}: {error.detail}") from error
            return UserAnswer(None, Ending.WORLD_FAILED, error=error.detail)
        last = answer.ending is None and self._turns_left <= 0
        return replace(answer, ending=Ending.USER_TURNS) if last else answer


def user_answer(value: Any, tools: Collection[str]) -> UserAnswer:
    """Read what a user by code answers; `tools` are the names that there are. See `UserOfCode`. Raises
    `ToolFailedError` where it is nothing of that form; the detail is a predicate."""
    if value is None or isinstance(value, str):
        value = {"say": value, "over": value is None}
    if not isinstance(value, Mapping) or not value.keys() <= {"say", "over", "tools", "reward"}:
        raise _malformed("a text, null, or a mapping of `say`, `over`, `tools` and `reward`", value)
    say, over, offered, reward = (value.get(key) for key in ("say", "over", "tools", "reward"))
    if not isinstance(over, bool | None) or not isinstance(say, str if not over else str | None):
        raise _malformed("`say` with a text, unless `over` is true", value)
    if offered is not None and not (isinstance(offered, list | tuple) and set(tools).issuperset(map(str, offered))):
        raise _malformed(
            f"`tools` with names of the agent's tools ({', '.join(sorted(tools)) or 'it has none'})", value
        )
    if reward is not None and not is_number(reward):
        raise _malformed("`reward` with a number", value)
    message = None if say is None else {"role": "user", "content": say}
    return UserAnswer(message, Ending.WORLD_OVER if over else None, offered, reward)


def _malformed(needed: str, value: Any) -> ToolFailedError:
    return ToolFailedError("", f"has to answer with {needed}, not {capped(repr(value), 200)}")


class FixedWords:
    """A user whose words the row has, one after the other; what the agent answers to the last ones is the end.

    Args:
        words: mappings as `UserOfCode` answers them.
        where: names the words in messages.
        tools: names of all tools that the agent can have.
        before: what happens before the words of a number are said, such as laying down files for them; it returns an
            ending where they are not to be said, and raises `ToolFailedError` where the agent is in its way.
        opens: the first words come before the agent's.
    """

    def __init__(
        self,
        words: Sequence[Mapping[str, Any]],
        where: str,
        tools: Collection[str],
        before: Callable[[AgentResult, int], Awaitable[Ending | None]] | None = None,
        *,
        opens: bool = False,
    ) -> None:
        self.opens = opens
        self._where, self._before, self._spoken = where, before, 0
        self._result = AgentResult()
        try:
            self._answers = [user_answer(each, tools) for each in words]
        except ToolFailedError as error:
            raise UserError(f"{where} {error.detail}") from error

    def begin(self, result: AgentResult, seed: int | None = None) -> None:
        """Remember where the conversation is written: the words are there already."""
        self._result = result

    async def speak(self, words: str | None = None) -> UserAnswer:
        """Answer with the next words, or open the conversation with the first. Raises `UserError` where what comes with
        the first words cannot be laid down, `Failure` where a reward failed that looks at the step before."""
        number, self._spoken = self._spoken, self._spoken + 1
        if number >= len(self._answers):
            return UserAnswer(None, Ending.FINISHED)
        try:
            ending = None if self._before is None else await self._before(self._result, number)
        except ToolFailedError as error:
            if words is None:
                raise UserError(f"{self._where}.{number}: {error.detail}") from error
            return UserAnswer(None, Ending.WORLD_FAILED, error=error.detail)
        return self._answers[number] if ending is None else UserAnswer(None, ending)
