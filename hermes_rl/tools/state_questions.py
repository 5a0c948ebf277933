"""Queries of the run to a rollout's state: the next message of a user, and if the environment is done.

A query is called like a tool, so that it is bounded in time and an exception of the state becomes a message; but its
result is JSON, since code must read it and its content may come from the agent.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hermes_rl.threads import CallThrottle
from hermes_rl.tools.base import DescribedTool, Tool, ToolFailedError, ToolRuntime
from hermes_rl.tools.execute import run_tool
from hermes_rl.tools.python_tools import call_function
from hermes_rl.tools.rollout_process import RolloutTool, answer_in_json, description_of, query_state
from hermes_rl.values import read_bounded


class StateQuestion(DescribedTool):
    """Calls a method of the state with arguments, or reads an attribute of it."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "", {"type": "object"})
        self._turns = CallThrottle()

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        return answer_in_json(await call_function(partial(query_state, runtime.state, self.name), args, self._turns))


def state_question(name: str, *, apart: bool) -> Tool:
    """Return the query for a method or an attribute; `apart`: the state is in a separate process of the rollout."""
    question = StateQuestion(name)
    return RolloutTool(description_of(question), None, "ask_state", member=name) if apart else question


async def ask_state(question: Tool, runtime: ToolRuntime, timeout: float | None, *arguments: Any) -> Any:
    """Return the state's result, as plain values.

    Raises `ToolFailedError` if it raised, took longer than `timeout` seconds, or returned more than the limit.
    """
    text = await run_tool(question, {"arguments": arguments}, runtime, timeout)
    try:
        return read_bounded(text)
    except ValueError as error:
        raise ToolFailedError(f"its answers {error}", f"its answers {error}") from error
