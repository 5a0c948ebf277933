"""A simulated user: another model that answers the agent, with wishes and tools of its own.

Owns the user's side of the conversation: its history with the roles swapped, its tool calls, which the agent never
sees, and the end that it sets. Its words are user messages, so none of them is trained on. When the user fails, the
infrastructure has failed: it raises a `ServerFailure`, never a score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hermes_rl.agent.result import Message, Usage, as_chat_server, text_of
from hermes_rl.endings import Ending
from hermes_rl.errors import ServerFailure
from hermes_rl.servers.base import ChatReply, ChatRequest, ContextLengthExceeded, drawn_seed, without_thinking
from hermes_rl.tools.base import Toolkit, ToolRuntime
from hermes_rl.tools.execute import execute_calls

GREETING = "Hi! How can I help you today?"
"""Stands as the agent's first words in the history of a user that speaks first."""
ATTEMPTS = 3
"""Empty answers after which a user has failed."""
MOST_ROUNDS = 10
"""Rounds of tool calls before a user has to speak."""


def user_id(rollout: str) -> str:
    """Return the id of a rollout's user, so that a server that plays agent and user keeps them apart."""
    return f"{rollout}-user"


class SimulatedUser:
    """The user of one rollout.

    Args:
        server: who plays it.
        system: who it is and what it wants.
        runtime: the rollout's machine; the user's tools act on the same state as the agent's.
        toolkit: its own tools.
        stop: phrases that end the conversation when it says one.
        max_turns: how often it speaks at most.
        opens: it speaks first.
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
    ) -> None:
        self.opens = opens
        self.usage = Usage()
        self.turns = 0
        self._server = as_chat_server(server)
        self._runtime = runtime
        self._toolkit = toolkit or Toolkit()
        self._stop = tuple(stop)
        self._max_turns = max_turns
        self._seed: int | None = None
        self._calls = 0
        self._history: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def begin(self, messages: Sequence[Message], seed: int | None = None) -> None:
        """Take over the conversation so far; its user messages count as this user's own words.

        `seed` is the rollout's; each call of the user gets a seed drawn from it.
        """
        self._seed = seed
        said = [message for message in messages if message["role"] in ("user", "assistant")]
        if not said or said[0]["role"] == "user":
            self._history.append({"role": "user", "content": GREETING})
        for message in said:
            role = "assistant" if message["role"] == "user" else "user"
            self._history.append({"role": role, "content": text_of(message.get("content"))})

    async def speak(self, said: str | None = None) -> tuple[Message, Ending | None]:
        """Return the user's next words as a message for the agent's history, and the ending if they are the last.

        `said` are the agent's words; None where the user opens the conversation.
        """
        if said is not None:
            self._history.append({"role": "user", "content": said})
        text = await self._words()
        self.turns += 1
        over = self.turns >= self._max_turns or any(phrase in text for phrase in self._stop)
        return {"role": "user", "content": text}, Ending.USER_STOP if over else None

    async def _words(self) -> str:
        silent = 0
        for _ in range(MOST_ROUNDS):
            reply = await self._ask()
            calls = reply.message.get("tool_calls") or []
            text = without_thinking(text_of(reply.message.get("content"))).strip()
            if calls:
                self._history.append({**reply.message, "role": "assistant"})
                await self._act(calls)
            elif text:
                self._history.append({"role": "assistant", "content": text})
                return text
            else:
                silent += 1
            if silent == ATTEMPTS:
                raise ServerFailure("the simulated user says nothing")
        raise ServerFailure(f"the simulated user calls tools {MOST_ROUNDS} times in a row and says nothing")

    async def _ask(self) -> ChatReply:
        tools = self._toolkit.schemas or None
        seed = drawn_seed(self._seed, "user", self._calls)
        request = ChatRequest(self._history, tools=tools, seed=seed, rollout_id=user_id(self._runtime.task_id))
        try:
            reply = await self._server.chat(request)
        except ContextLengthExceeded as error:
            raise ServerFailure(f"the conversation does not fit the context of the simulated user: {error}") from error
        self._calls += 1
        self.usage.add(reply.usage)
        if reply.finish_reason == "length":
            raise ServerFailure("the simulated user's words were cut; is its server's limit of tokens too small?")
        return reply

    async def _act(self, calls: Sequence[dict[str, Any]]) -> None:
        for outcome in await execute_calls(calls, self._toolkit, self._runtime, turn=self.turns + 1):
            self._history.append({"role": "tool", "tool_call_id": outcome.id, "content": outcome.content})
