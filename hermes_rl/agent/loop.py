"""The agent loop: it asks the model, runs the tools that the model calls, and tells it the results, until an ending.

This module owns the turns, the budgets, the ending, and the history of messages. It leaves running tools to
`hermes_rl.tools`, talking to models to `hermes_rl.servers`, and scoring to `hermes_rl.scoring`. Nothing that the model
writes makes the loop raise. Where infrastructure fails, the loop raises a `Failure` whose `result` holds the
conversation so far.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

from hermes_rl.agent.result import (
    AgentResult,
    ManagedState,
    Message,
    ToolCall,
    reasoning_of,
    text_of,
    tokens_of,
)
from hermes_rl.agent.user import SimulatedUser
from hermes_rl.endings import Ending
from hermes_rl.errors import Failure, HermesRLError, ServerFailure, ToolError
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.servers.base import (
    ChatReply,
    ChatRequest,
    ContextLengthExceeded,
    ReasoningOptions,
    TrajectoryFull,
    drawn_seed,
)
from hermes_rl.servers.completion import CompletionAdapter, as_chat_server
from hermes_rl.threads import one_at_a_time
from hermes_rl.tokens.parsers.table import unread_call
from hermes_rl.tokens.rendering import history_named, read_aside
from hermes_rl.tokens.tokenizer import TemplateRefused, Tokenizer
from hermes_rl.tokens.transcript import Transcript
from hermes_rl.tools.base import TimeLeft, ToolRuntime, capped, runtime_for
from hermes_rl.tools.catalogue import toolkit_of
from hermes_rl.tools.execute import SHORT, ToolOutcome, execute_calls
from hermes_rl.values import read_bounded

# -------------------------------------------------- Messages as the history keeps them and as a server gets them
# Owns the difference between the two. The history keeps what the model wrote. But a server that parses the history
# refuses the whole conversation for one malformed call in it, so the messages that are sent have empty arguments in
# such a place; the answer to the call tells the model what was wrong.


def kept_message(message: Mapping[str, Any], turn: int) -> Message:
    """Make the message for the history: everything that came, reasoning included, in the shape that servers take.

    Every call gets an id of its own, a type and arguments as text.
    """
    kept = {key: value for key, value in message.items() if value is not None}
    kept["role"] = "assistant"
    kept["content"] = _content(message.get("content"))
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        kept["tool_calls"] = _calls(calls, turn)
    else:
        kept.pop("tool_calls", None)
    return kept


def sendable(messages: list[Message]) -> list[Message]:
    """Return the history with empty arguments in every call whose arguments cannot be read as a JSON object."""
    return [
        {**message, "tool_calls": [_sendable_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _content(content: object) -> object:
    if content is None or isinstance(content, str | list):
        return content
    return json.dumps(content, ensure_ascii=False)


def _calls(calls: list[Any], turn: int) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    taken: set[str] = set()
    for number, call in enumerate(calls):
        one = _call(call if isinstance(call, dict) else {}, f"call_{turn}_{number}", taken)
        taken.add(one["id"])
        kept.append(one)
    return kept


def _call(call: Mapping[str, Any], default_id: str, taken: set[str]) -> dict[str, Any]:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments", "")
    given_id = str(call.get("id") or "")
    # Our own parser adds this to a call that cannot be executed.
    problem = {"error": call["error"]} if isinstance(call.get("error"), str) else {}
    return {
        "id": default_id if not given_id or given_id in taken else given_id,
        "type": "function",
        "function": {
            "name": str(function.get("name") or ""),
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
        },
        **problem,
    }


def _sendable_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or _is_object(function.get("arguments")):
        return call
    return {**call, "function": {**function, "arguments": "{}"}}


def _is_object(arguments: object) -> bool:
    try:
        return isinstance(arguments, str) and isinstance(read_bounded(arguments), dict)
    except ValueError:
        return False


# ------------------------------------------------------------------------------------------------------ The loop

UNREAD = (
    "the server left this call in its text, so that it was not executed: the model spoiled it, or the server's tool "
    "parser reads another format (vLLM: --tool-call-parser)"
)
"""The error of a call that a chat server has not read. Its turn is an answer, as the server says."""


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
        kept = [
            self._cut(outcome) if len(outcome.content) > self._limit(outcome.name) else outcome for outcome in outcomes
        ]
        for place in sorted(range(len(kept)), key=lambda place: -len(kept[place].content)):
            if sum(len(one.content) for one in kept) <= self.turn_budget:
                break
            kept[place] = self._cut(kept[place])
        return kept

    def _limit(self, tool: str) -> float:
        return math.inf if tool == "read_file" else self.tool_overrides.get(tool, self.default_result_size)

    def _cut(self, outcome: ToolOutcome) -> ToolOutcome:
        return replace(outcome, content=capped(outcome.content, self.preview_size))


@dataclass(frozen=True)
class LoopOptions:
    """The bounds and the sampling of one rollout. Times are in seconds, sizes in tokens; None is no bound."""

    max_turns: int = 30
    timeout: float | None = None
    task_timeout: float | None = None
    """Of the agent's work and of the commands of its rewards together."""
    tool_timeout: float | None = None
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
        return min((one for one in (self.timeout, self.task_timeout) if one is not None), default=None)


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
        user: SimulatedUser | None = None,
        budget_config: ResultBudget | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        given: dict[str, Any] = {
            "max_turns": max_turns,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "extra_body": extra_body,
            "results": budget_config,
        }
        self.options = replace(options or LoopOptions(), **{k: v for k, v in given.items() if v is not None})
        self.server = as_chat_server(server)
        self.sandbox = sandbox or _sandbox_of(server)
        self._failed: Callable[[HermesRLError], None] | None = getattr(server, "loop_failed", None)
        self.toolkit = toolkit_of(tool_schemas, valid_tool_names)
        self.task_id = task_id
        self.user = user
        self.tokenizer = tokenizer

    async def run(self, messages: Sequence[Message]) -> AgentResult:
        """Play the conversation that begins with `messages`; the list given is not changed.

        Raises:
            Failure: a model server, the sandbox or a tool's server failed; `.result` is the part played so far.
        """
        result = AgentResult(
            messages=[dict(message) for message in messages],
            prompt_length=len(messages),
            tool_schemas=self.toolkit.schemas,
            transcript=Transcript(),
            max_trajectory_tokens=self.options.max_trajectory_tokens,
        )
        try:
            if self.task_id is not None:
                return await self._run(result, runtime_for(self.task_id, self.toolkit, self.sandbox))
            async with ToolRuntime(self.sandbox, toolkit=self.toolkit) as runtime:
                return await self._run(result, runtime)
        except HermesRLError as error:
            # The caller's own code may take it for an answer of the policy: its environment is to know.
            if self._failed is not None:
                self._failed(error)
            raise

    async def _run(self, result: AgentResult, runtime: ToolRuntime) -> AgentResult:
        try:
            result.ending = await self._play(result, runtime)
            runtime.overslept(result.timings.queue)
        except Failure as failure:
            if failure.ending is Ending.SANDBOX_FAILURE and runtime.overslept(result.timings.queue):
                failure.ending = Ending.SANDBOX_KILLED
            result.ending = failure.ending
            failure.result = result
            # Where the agent's own commands killed the sandbox, the policy did it: the rollout is scored.
            if not failure.ending.graded:
                raise
        result.finished_naturally = result.ending.finished_naturally
        if self.options.task_timeout is not None:
            runtime.time_left = TimeLeft(self.options.task_timeout - result.timings.working)
        if result.transcript is not None and result.transcript.turns:
            result.managed_state = ManagedState(result.transcript.sequences)
        elif isinstance(self.server, CompletionAdapter):
            result.managed_state = self.server.state()
        return result

    async def _play(self, result: AgentResult, runtime: ToolRuntime) -> Ending:
        if self.user is not None:
            self.user.begin(result.messages, self.options.seed)
            if self.user.opens and (over := await self._hear(result)) is not None:
                raise ServerFailure(f"the simulated user ended the conversation before it began ({over})")
        while (ending := self._spent(result) or await self._turn(result, runtime)) is None:
            pass
        return ending

    async def _turn(self, result: AgentResult, runtime: ToolRuntime) -> Ending | None:
        """Make one model call and the tool calls that it asks for; returns the ending, if this turn was the last."""
        try:
            request = await self._request(result, runtime)
            reply = await self.server.chat(request)
            if result.turns_used == 0:
                self._require_room(tokens_of(reply.usage, "prompt_tokens"))
        except ContextLengthExceeded as error:
            if result.turns_used == 0:
                # The policy has not written anything yet: the prompt, or the limit that we asked for, is too large.
                raise ServerFailure(
                    f"the first request does not fit ({error}): the prompt or agent.max_tokens is too large"
                ) from error
            return Ending.TOKEN_BUDGET
        except ServerFailure as failure:
            if failure.refused and result.turns_used > 0 and await self._answers_the_prompt(request, result):
                return Ending.REFUSED
            raise
        calls = self._take(reply, result)
        if (ending := _ending_of(reply, calls)) is not None:
            used, bound = _counted(reply), self.options.max_trajectory_tokens or math.inf
            cut = used == bound or request.max_tokens != self.options.max_tokens
            if used > bound or (cut and ending is Ending.LENGTH):
                return Ending.TOKEN_BUDGET
            if ending is Ending.FINISHED and self.user is not None:
                return await self._hear(result, result.final_response)
            return ending
        await self._act(calls, result, runtime)
        return Ending.SANDBOX_KILLED if runtime.killed_by_agent else None

    async def _answers_the_prompt(self, request: ChatRequest, result: AgentResult) -> bool:
        """Whether the server, which refused the conversation, answers without what the policy and its tools have said.

        Else it refuses everything, such as a key that is no longer valid, which is nothing of the policy's doing.
        """
        prompt = replace(request, messages=result.messages[: result.prompt_length], max_tokens=1, transcript=None)
        try:
            await self.server.chat(prompt)
        except (ServerFailure, ContextLengthExceeded):
            return False
        return True

    async def _hear(self, result: AgentResult, said: str | None = None) -> Ending | None:
        """Append the user's next words, which are no turn of the policy; returns the ending, if they are the last."""
        assert self.user is not None
        message, ending = await self.user.speak(said)
        result.messages.append(message)
        return ending

    def _spent(self, result: AgentResult) -> Ending | None:
        """Return the ending by the first budget that leaves no room for another turn."""
        if result.turns_used >= self.options.max_turns:
            return Ending.MAX_TURNS
        if (bound := self.options.working_time) is not None and result.timings.working >= bound:
            return Ending.TIMEOUT
        return None

    async def _prompt_tokens(self, result: AgentResult) -> int:
        """Return the tokens of the next prompt: those that the server has counted, and an estimate of what is new."""
        used = _counted(result.replies[-1]) if result.replies else 0
        if self.tokenizer is None:
            return used
        if used:
            new = list(takewhile(lambda message: message["role"] != "assistant", reversed(result.messages)))
            text = "\n".join(text_of(message.get("content")) for message in new)
        else:
            try:
                schemas = self.toolkit.schemas or None
                text = self.tokenizer.render(history_named(result.messages), schemas, add_generation_prompt=True)
            except TemplateRefused:
                text = json.dumps([result.messages, self.toolkit.schemas])
        return used + len(await read_aside(partial(self.tokenizer.encode, text), len(text)))

    def _require_room(self, size: int, about: str = "") -> None:
        """Raise `TrajectoryFull` where a prompt of so many tokens leaves no room for a turn."""
        bound = self.options.max_trajectory_tokens
        if bound is not None and size >= bound:
            raise TrajectoryFull(f"{about}{size}", bound)

    async def _request(self, result: AgentResult, runtime: ToolRuntime) -> ChatRequest:
        options = self.options
        max_tokens, bound = options.max_tokens, options.max_trajectory_tokens
        if bound is not None and not getattr(self.server, "exact", False):
            size = await self._prompt_tokens(result)
            self._require_room(size, "about ")
            # Without a `max_tokens` the rest is not sent: servers refuse a limit that does not fit their context.
            max_tokens = None if max_tokens is None else min(max_tokens, bound - size)
        return ChatRequest(
            messages=await self._history(result),
            tools=self.toolkit.schemas or None,
            temperature=options.temperature,
            top_p=options.top_p,
            max_tokens=max_tokens,
            max_trajectory_tokens=bound,
            seed=drawn_seed(options.seed, "turn", result.turns_used),
            reasoning=options.reasoning,
            extra_body=options.extra_body,
            logprobs=options.logprobs,
            rollout_id=runtime.task_id,
            transcript=result.transcript,
        )

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
        """Add the reply to the history and the counts; returns its tool calls."""
        result.turns_used += 1
        message = kept_message(reply.message, result.turns_used)
        result.messages.append(message)
        result.replies.append(reply)
        result.usage.add(reply.usage)
        result.reasoning_per_turn.append(reasoning_of(message))
        result.timings.generation += reply.timing.generating
        result.timings.queue += reply.timing.queued + reply.timing.retrying + reply.timing.paused
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        if not calls and reply.sampled is None and self.toolkit.schemas:
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
            self.toolkit,
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
        return min((one for one in bounds if one is not None), default=None)


def _sandbox_of(server: Any) -> SandboxConfig | None:
    """Return the sandbox of the environment that a server object belongs to, where it names one."""
    sandbox = getattr(server, "sandbox", None)
    return sandbox if isinstance(sandbox, SandboxConfig) else None


def _counted(reply: ChatReply) -> int:
    """Return the tokens of a turn and its prompt as the server counted them; 0 where it did not."""
    return tokens_of(reply.usage, "prompt_tokens") + tokens_of(reply.usage, "completion_tokens")


def _ending_of(reply: ChatReply, calls: list[dict[str, Any]]) -> Ending | None:
    """Return the ending that a reply brings by itself; None where its tool calls go on."""
    if reply.finish_reason == "length":
        return Ending.LENGTH
    if reply.finish_reason == "content_filter" or reply.message.get("refusal"):
        return Ending.REFUSED
    if calls:
        return None
    return Ending.FINISHED if text_of(reply.message.get("content")).strip() else Ending.EMPTY


def _record(outcome: ToolOutcome, turn: int) -> ToolCall:
    return ToolCall(
        turn=turn,
        id=outcome.id,
        name=outcome.name,
        arguments=outcome.arguments,
        result=outcome.content,
        error=outcome.error.error if outcome.error is not None else None,
        seconds=outcome.seconds,
    )
