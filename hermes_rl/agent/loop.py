"""Run the agent loop: call the model, run its tool calls, and append their results, until a stop reason applies.

This module owns the turns and the message history of a conversation; it is one of the drivers of a rollout. `recorder`
calls the policy, applies budgets and records replies, `hermes_rl.tools` runs tools, and `hermes_rl.scoring` scores. No
model output makes the loop raise. If infrastructure fails, the loop raises a `Failure` whose `result` holds the
conversation so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from hermes_rl.agent.history import kept_message, sendable
from hermes_rl.agent.recorder import BudgetExhausted, LoopOptions, PolicyRecorder, ResultBudget
from hermes_rl.agent.result import (
    AgentResult,
    Message,
    ToolCall,
    text_of,
)
from hermes_rl.agent.user import AnswersAgent
from hermes_rl.errors import HermesRLError, ServerFailure, ToolError
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.servers.base import (
    ChatReply,
)
from hermes_rl.servers.completion import as_chat_server
from hermes_rl.stop_reasons import StopReason
from hermes_rl.threads import run_exclusively
from hermes_rl.tokens.parsers.table import unread_call
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.tokens.transcript import Transcript
from hermes_rl.tools.base import ToolFailedError, ToolRuntime, runtime_for
from hermes_rl.tools.catalogue import toolkit_of
from hermes_rl.tools.execute import SHORT, execute_calls

# ------------------------------------------------------------------------------------------------------ The loop

UNPARSED_CALL_ERROR = (
    "the server left this call in its text, so that it was not executed: the model spoiled it, or the server's tool "
    "parser reads another format (vLLM: --tool-call-parser)"
)
"""Error of a call that a chat server did not parse. Its turn counts as a final reply, as reported by the server."""


class HermesAgentLoop:
    """A multi-turn tool-calling conversation with one model in the sandbox of one rollout.

    Args:
        server: the policy: an object with `chat(ChatRequest)` or OpenAI-style `chat_completion(**kwargs)`.
        tool_schemas: OpenAI tool schemas shown to the model; the `schemas` of a `Toolkit` include their tools.
        valid_tool_names: names that may be called; None: all of `tool_schemas`.
        task_id: id of the rollout's sandbox (see `ToolContext`). The sandbox is created if it does not exist, and stays
            until `ToolContext(task_id).cleanup()`. Without an id, it is released at the end of `run`.
        options: the remaining limits; explicit arguments before it take precedence.
        sandbox: configuration of a sandbox created here; None: the configuration of the `server`'s environment, else
            the default.
        user: responds to turns without tool calls; None: such a turn is the last one.
        budget_config: limits for tool results, as built by the configuration of an environment.
        tokenizer: estimates the tokens that a chat server has not counted yet; None: only the server's count is used.
        request_id: id of its requests; default: `task_id`.
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
        of_server = getattr(server, "sandbox", None)  # of the environment that owns the server object
        self.sandbox = sandbox or (of_server if isinstance(of_server, SandboxConfig) else None)
        self._failed: Callable[[HermesRLError], None] | None = getattr(server, "loop_failed", None)
        self.toolkit = toolkit_of(tool_schemas, valid_tool_names)
        self.task_id, self.request_id = task_id, request_id
        self.user = user
        self.tokenizer = tokenizer
        self._offered = self.toolkit
        """Tools that the agent may call currently."""
        self._answered_at = 0
        """Number of turns before the user's last message."""

    async def run(self, messages: Sequence[Message]) -> AgentResult:
        """Run the conversation that starts with `messages`; the given list is not changed.

        Raises:
            Failure: a model server, the sandbox or a tool's server failed; `.result` is the part run so far.
        """
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
                return await recorder.play(partial(self._run_turns, recorder, runtime), runtime)
            async with ToolRuntime(self.sandbox, toolkit=self.toolkit) as runtime:
                return await recorder.play(partial(self._run_turns, recorder, runtime), runtime)
        except HermesRLError as error:
            # Notify the environment, because the caller's code may mistake this error for a policy error.
            if self._failed is not None:
                self._failed(error)
            raise

    async def _run_turns(self, recorder: PolicyRecorder, runtime: ToolRuntime) -> StopReason:
        result = recorder.result
        if self.user is not None:
            self.user.start(result, self.options.seed)
            if self.user.speaks_first and (stop := await self._ask_user(recorder)) is not None:
                raise ServerFailure(f"the user ended the conversation before it started ({stop})")
        try:
            while (stop_reason := await self._run_turn(recorder, runtime)) is None:
                pass
        except BudgetExhausted as stop:
            return stop.stop_reason
        return stop_reason

    async def _run_turn(self, recorder: PolicyRecorder, runtime: ToolRuntime) -> StopReason | None:
        """Make one model call and run its tool calls; return the stop reason if this turn was the last."""
        result = recorder.result
        prompt, schemas = result.messages[: result.prompt_length], self._offered.schemas
        request_id = self.request_id or runtime.task_id
        answer = await recorder.ask(await self._history(result), schemas, prompt=prompt, rollout_id=request_id)
        calls = self._take_reply(answer.reply, result)
        if (stop_reason := recorder.ended_by(answer, calls)) is not None:
            if stop_reason is StopReason.FINISHED and self.user is not None:
                return await self._ask_user(recorder, result.final_response)
            return stop_reason
        await self._run_calls(calls, result, runtime)
        return await self._stop_reason_of_calls(result, runtime)

    async def _ask_user(self, recorder: PolicyRecorder, message: str | None = None) -> StopReason | None:
        """Append the user's next message, which is not a policy turn; return the stop reason if it is the last."""
        assert self.user is not None
        result, answer = recorder.result, await recorder.hear(self.user, message)
        recorder.by_agents |= answer.by_agents
        self._answered_at = result.turns_used
        if answer.message is not None:
            result.messages.append(answer.message)
        if answer.error is not None:
            result.tool_errors.append(ToolError(result.turns_used, "user", message or "", answer.error, ""))
        if answer.tools is not None:
            self._offered = self.toolkit.only(answer.tools)
        if answer.reward is not None:
            result.environment_rewards.append((result.turns_used, answer.reward))
        return answer.stop_reason

    async def _stop_reason_of_calls(self, result: AgentResult, runtime: ToolRuntime) -> StopReason | None:
        """Return the stop reason caused by this turn's tool calls, or None if the agent continues."""
        options, errors = self.options, len(result.tool_errors)
        if runtime.killed_by_agent:
            return StopReason.SANDBOX_KILLED
        if options.ending_tools:
            calls = takewhile(lambda call: call.turn == result.turns_used, reversed(result.tool_calls))
            if any(call.name in options.ending_tools and call.error is None for call in calls):
                return StopReason.ENVIRONMENT_DONE
        try:
            if runtime.is_over is not None and await runtime.is_over():
                return StopReason.ENVIRONMENT_DONE
        except ToolFailedError as error:
            result.tool_errors.append(ToolError(result.turns_used, "state", "", error.detail, ""))
            return StopReason.ENVIRONMENT_ERROR
        if options.max_tool_errors is not None and errors >= options.max_tool_errors:
            return StopReason.TOOL_ERRORS
        bound = options.max_turns_per_answer
        return StopReason.MAX_TURNS if bound is not None and result.turns_used - self._answered_at >= bound else None

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
        return await run_exclusively(sendable, result.messages)

    def _take_reply(self, reply: ChatReply, result: AgentResult) -> list[dict[str, Any]]:
        """Append the reply to the history and return its tool calls."""
        message = kept_message(reply.message, result.turns_used)
        result.messages.append(message)
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        if not calls and reply.sampled is None and self._offered.schemas:
            unread = unread_call(text_of(message.get("content")))
            if unread is not None:
                result.tool_calls.append(ToolCall(result.turns_used, "", "", unread, "", UNPARSED_CALL_ERROR))
                result.tool_errors.append(ToolError(result.turns_used, "", unread, UNPARSED_CALL_ERROR, ""))
        return calls

    async def _run_calls(self, calls: list[dict[str, Any]], result: AgentResult, runtime: ToolRuntime) -> None:
        """Run the calls of one turn and append their results in order."""
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
        # The start of the sandbox on first use does not count as working time.
        result.timings.tools += time.perf_counter() - started - (runtime.start_seconds - starting)
        for outcome in outcomes:
            result.messages.append({"role": "tool", "tool_call_id": outcome.id, "content": outcome.content})
            result.tool_calls.append(ToolCall.from_outcome(outcome, result.turns_used, outcome.id))
            if outcome.error is not None:
                result.tool_errors.append(outcome.error)

    def _tool_timeout(self, result: AgentResult) -> float | None:
        """Return the time limit of a call in seconds: the tool's limit or the agent's remaining time if smaller."""
        bounds = [self.options.tool_timeout]
        if (bound := self.options.working_time) is not None:
            bounds.append(max(0.001, bound - result.timings.working))
        return min((seconds for seconds in bounds if seconds is not None), default=None)
