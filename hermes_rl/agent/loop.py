"""The agent loop: it asks the model, runs the tools that the model calls, and tells it the results, until an ending.

This module owns the turns and the history of messages of a conversation; it is one driver of a rollout. It leaves
asking the policy, budgets and what is written down to `recorder`, running tools to `hermes_rl.tools`, and scoring to
`hermes_rl.scoring`. Nothing that the model writes makes the loop raise. Where infrastructure fails, the loop raises a
`Failure` whose `result` holds the conversation so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from hermes_rl.agent.history import kept_message, sendable
from hermes_rl.agent.recorder import LoopOptions, OverError, PolicyRecorder, ResultBudget
from hermes_rl.agent.result import (
    AgentResult,
    Message,
    ToolCall,
    text_of,
)
from hermes_rl.agent.user import AnswersAgent
from hermes_rl.endings import Ending
from hermes_rl.errors import HermesRLError, ServerFailure, ToolError
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.servers.base import (
    ChatReply,
)
from hermes_rl.servers.completion import as_chat_server
from hermes_rl.threads import one_at_a_time
from hermes_rl.tokens.parsers.table import unread_call
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.tokens.transcript import Transcript
from hermes_rl.tools.base import ToolFailedError, ToolRuntime, runtime_for
from hermes_rl.tools.catalogue import toolkit_of
from hermes_rl.tools.execute import SHORT, ToolOutcome, execute_calls

# ------------------------------------------------------------------------------------------------------ The loop

UNREAD = (
    "the server left this call in its text, so that it was not executed: the model spoiled it, or the server's tool "
    "parser reads another format (vLLM: --tool-call-parser)"
)
"""The error of a call that a chat server has not read. Its turn is an answer, as the server says."""


class HermesAgentLoop:
    """A multi-turn tool-calling conversation with one model, on one rollout's machine.

    Args:
        server: the policy: anything with `chat(ChatRequest)` or OpenAI-style `chat_completion(**kwargs)`.
        tool_schemas: OpenAI tool schemas that the model sees; a `Toolkit`'s `schemas` carry their tools along.
        valid_tool_names: names that may be called; None: all of `tool_schemas`.
        task_id: names the rollout's machine (see `ToolContext`); one is made when it does not exist yet, and stays
            until `ToolContext(task_id).cleanup()`. Without a name it is released at the end of `run`.
        options: the remaining bounds; the arguments before it that are given win over it.
        sandbox: of a machine that is made here; None: that of the `server`'s environment, else the default one.
        user: who answers turns without tool calls; None: such a turn is the last.
        budget_config: bounds on what tools answer, as the configuration of an environment builds it.
        tokenizer: estimates the tokens of what a chat server has not counted yet; None: only its own count is known.
        request_id: names its requests; default: as `task_id`.
    """

    def __init__(
        self,
        server: Any,
        tool_schemas: Sequence[dict[str, Any]],
        valid_tool_names: set[str] | None = None,
        max_turns: int | None = None,
        task_id: str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        extra_body: Mapping[str, Any] | None = None,
        *,
        options: LoopOptions | None = None,
        sandbox: SandboxConfig | None = None,
        user: AnswersAgent | None = None,
        budget_config: ResultBudget | None = None,
        tokenizer: Tokenizer | None = None,
        request_id: str | None = None,
    ) -> None:
        changes: dict[str, Any] = {
            "max_turns": max_turns,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "extra_body": extra_body,
            "results": budget_config,
        }
        changed = {name: value for name, value in changes.items() if value is not None}
        self.options = replace(options or LoopOptions(), **changed) if changed else options or LoopOptions()
        self.server = as_chat_server(server)
        of_server = getattr(server, "sandbox", None)  # of the environment that the server object belongs to
        self.sandbox = sandbox or (of_server if isinstance(of_server, SandboxConfig) else None)
        self._failed: Callable[[HermesRLError], None] | None = getattr(server, "loop_failed", None)
        self.toolkit = toolkit_of(tool_schemas, valid_tool_names)
        self.task_id, self.request_id = task_id, request_id
        self.user = user
        self.tokenizer = tokenizer
        self._offered = self.toolkit
        """What the agent may call at present."""
        self._answered_at = 0
        """Turns that had been played when the user spoke last."""

    async def run(self, messages: Sequence[Message]) -> AgentResult:
        """Play the conversation that begins with `messages`; the list given is not changed. Raises `Failure` where a
        model server, the sandbox or a tool's server failed; `.result` is the part played so far."""
        result = AgentResult(
            messages=[dict(message) for message in messages],
            prompt_length=len(messages),
            tool_schemas=self.toolkit.schemas,
            transcript=Transcript(),
            max_trajectory_tokens=self.options.max_trajectory_tokens,
        )
        del messages  # thousands of rollouts may wait for their models
        recorder = PolicyRecorder(result, self.server, self.options, self.tokenizer)
        try:
            if self.task_id is not None:
                runtime = runtime_for(self.task_id, self.toolkit, self.sandbox)
                return await recorder.play(partial(self._play, recorder, runtime), runtime)
            async with ToolRuntime(self.sandbox, toolkit=self.toolkit) as runtime:
                return await recorder.play(partial(self._play, recorder, runtime), runtime)
        except HermesRLError as error:
            # The caller's own code may take it for an answer of the policy: its environment is to know.
            if self._failed is not None:
                self._failed(error)
            raise

    async def _play(self, recorder: PolicyRecorder, runtime: ToolRuntime) -> Ending:
        result = recorder.result
        if self.user is not None:
            self.user.begin(result, self.options.seed)
            if self.user.opens and (over := await self._hear(recorder)) is not None:
                raise ServerFailure(f"the user ended the conversation before it began ({over})")
        try:
            while (ending := await self._turn(recorder, runtime)) is None:
                pass
        except OverError as over:
            return over.ending
        return ending

    async def _turn(self, recorder: PolicyRecorder, runtime: ToolRuntime) -> Ending | None:
        """Make one model call and the tool calls that it asks for; returns the ending, if this turn was the last."""
        result = recorder.result
        prompt, schemas = result.messages[: result.prompt_length], self._offered.schemas
        request_id = self.request_id or runtime.task_id
        answer = await recorder.ask(await self._history(result), schemas, prompt=prompt, rollout_id=request_id)
        calls = self._take(answer.reply, result)
        if (ending := recorder.ended_by(answer, calls)) is not None:
            if ending is Ending.FINISHED and self.user is not None:
                return await self._hear(recorder, result.final_response)
            return ending
        await self._act(calls, result, runtime)
        return await self._brought_about(result, runtime)

    async def _hear(self, recorder: PolicyRecorder, words: str | None = None) -> Ending | None:
        """Append the user's next words, which are no turn of the policy; returns the ending, if they are the last."""
        assert self.user is not None
        result, answer = recorder.result, await recorder.hear(self.user, words)
        recorder.by_agents |= answer.by_agents
        self._answered_at = result.turns_used
        if answer.message is not None:
            result.messages.append(answer.message)
        if answer.error is not None:
            result.tool_errors.append(ToolError(result.turns_used, "user", words or "", answer.error, ""))
        if answer.tools is not None:
            self._offered = self.toolkit.only(answer.tools)
        if answer.reward is not None:
            result.world_rewards.append((result.turns_used, answer.reward))
        return answer.ending

    async def _brought_about(self, result: AgentResult, runtime: ToolRuntime) -> Ending | None:
        """Return the ending that the calls of this turn have brought about; None where the agent goes on."""
        options, errors = self.options, len(result.tool_errors)
        if runtime.killed_by_agent:
            return Ending.SANDBOX_KILLED
        if options.ending_tools:
            calls = takewhile(lambda call: call.turn == result.turns_used, reversed(result.tool_calls))
            if any(call.name in options.ending_tools and call.error is None for call in calls):
                return Ending.WORLD_OVER
        try:
            if runtime.is_over is not None and await runtime.is_over():
                return Ending.WORLD_OVER
        except ToolFailedError as error:
            result.tool_errors.append(ToolError(result.turns_used, "state", "", error.detail, ""))
            return Ending.WORLD_FAILED
        if options.max_tool_errors is not None and errors >= options.max_tool_errors:
            return Ending.TOOL_ERRORS
        bound = options.max_turns_per_answer
        return Ending.MAX_TURNS if bound is not None and result.turns_used - self._answered_at >= bound else None

    async def _history(self, result: AgentResult) -> list[Message]:
        """Return the messages to send. A token-level server does not parse earlier calls and gets them unchanged."""
        exact = result.transcript is not None and bool(result.transcript.turns)
        if exact or not result.tool_errors:
            return result.messages
        calls = [
            call for message in result.messages[result.prompt_length :] for call in message.get("tool_calls") or ()
        ]
        if sum(len(call["function"]["arguments"]) for call in calls) <= SHORT:
            return sendable(result.messages)
        return await one_at_a_time(sendable, result.messages)

    def _take(self, reply: ChatReply, result: AgentResult) -> list[dict[str, Any]]:
        """Add the reply to the history; returns its tool calls."""
        message = kept_message(reply.message, result.turns_used)
        result.messages.append(message)
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        if not calls and reply.sampled is None and self._offered.schemas:
            unread = unread_call(text_of(message.get("content")))
            if unread is not None:
                result.tool_calls.append(ToolCall(result.turns_used, "", "", unread, "", UNREAD))
                result.tool_errors.append(ToolError(result.turns_used, "", unread, UNREAD, ""))
        return calls

    async def _act(self, calls: list[dict[str, Any]], result: AgentResult, runtime: ToolRuntime) -> None:
        """Run the calls of one turn and append their answers in order."""
        started, starting = time.perf_counter(), runtime.start_seconds
        runtime.phase = "tools"
        outcomes = await execute_calls(
            calls,
            self._offered,
            runtime,
            turn=result.turns_used,
            tool_timeout=self._tool_timeout(result),
            repair=self.options.repair_arguments,
        )
        runtime.phase = "model"
        if self.options.results is not None:
            outcomes = self.options.results.apply(outcomes)
        # The start of the sandbox on first use is not the agent's working time.
        result.timings.tools += time.perf_counter() - started - (runtime.start_seconds - starting)
        for outcome in outcomes:
            result.messages.append({"role": "tool", "tool_call_id": outcome.id, "content": outcome.content})
            result.tool_calls.append(_record(outcome, result.turns_used))
            if outcome.error is not None:
                result.tool_errors.append(outcome.error)

    def _tool_timeout(self, result: AgentResult) -> float | None:
        """Return how many seconds a call may take: the tool's bound or the rest of the agent's time, the smaller."""
        bounds = [self.options.tool_timeout]
        if (bound := self.options.working_time) is not None:
            bounds.append(max(0.001, bound - result.timings.working))
        return min((seconds for seconds in bounds if seconds is not None), default=None)


def _record(outcome: ToolOutcome, turn: int) -> ToolCall:
    return ToolCall(
        turn=turn,
        id=outcome.id,
        name=outcome.name,
        arguments=outcome.arguments,
        result=outcome.content,
        error=outcome.error.error if outcome.error is not None else None,
        seconds=outcome.seconds,
        repaired=outcome.repaired,
    )
