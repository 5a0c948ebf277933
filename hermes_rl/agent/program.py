"""Run an agent program as the driver of a rollout; it runs in the sandbox and calls the model at an address there.

Alternatively, the program is a function of the spec, called in a process outside the sandbox. This module starts the
program, enforces its time limit, and determines the stop reason. Exit codes are unreliable, as programs exit with 0
after an error and with 1 after success: the requests that the endpoint received decide. The policy is held responsible
for every action of a program. A program that cannot be started is a mistake in the spec, unless an agent wrote
something that may be the cause.

In episodes of several agents, the program of a seat runs once for each turn of the seat. Its sandbox stays, and all of
its runs form one conversation with one set of budgets.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic as clock
from typing import TYPE_CHECKING, Any

from hermes_rl.agent.conversations import Kind
from hermes_rl.agent.evidence import take_evidence
from hermes_rl.agent.recorder import LoopOptions, PolicyRecorder
from hermes_rl.agent.result import AgentResult, Message, ProgramRun, tokens_of
from hermes_rl.agent.tool_server import ToolServer
from hermes_rl.agent.user import AnswersAgent
from hermes_rl.errors import AgentFault, SandboxFailure, ToolError, UserError
from hermes_rl.plugins import Code, load_object
from hermes_rl.sandbox.base import KILLED_EXIT_CODE, CommandResult, SandboxFile
from hermes_rl.sandbox.helper_sandbox import HelperSandbox
from hermes_rl.servers.base import ContextLengthProvider
from hermes_rl.servers.completion import as_chat_server
from hermes_rl.spec.templates import TemplateError
from hermes_rl.stop_reasons import StopReason
from hermes_rl.threads import end_tasks
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.tokens.transcript import Transcript
from hermes_rl.tools.base import Toolkit, ToolRuntime
from hermes_rl.tools.context import ToolContext
from hermes_rl.user_code.failures import EndedError, ForeignError
from hermes_rl.user_code.messages import require_text
from hermes_rl.user_code.pool import POOL
from hermes_rl.values import replace_surrogates, safe_name

if TYPE_CHECKING:
    from hermes_rl.agent.endpoint import Endpoint

PORT = 8181
"""Port of the endpoint in the sandbox; with several agents, each uses the next port."""
DEFAULT_PROGRAM_SECONDS = 3600.0
"""Maximum working time of a program in seconds if the spec sets no limit."""
GLANCE = 0.5
"""Seconds between two checks of the time limit and of the endpoint."""
GRACE = 10.0
"""Seconds that a program may take to exit after the rollout has stopped."""
OUTPUT = 1 << 20
"""Maximum number of bytes of its output that are recorded."""
CANNOT_START = (126, 127)
"""Exit codes of a command that does not exist or is not executable."""
RAISED = 1
"""Exit code of a function that raised an exception."""
GIVEN = ("row", "messages", "prompt", "system", "endpoint", "token", "ctx")
"""Parameters that a function may request."""


def endpoint_of(rollout_id: str, port: int = PORT) -> str:
    """Return the address at which a program reaches the model, without ``/v1``."""
    return f"http://127.0.0.1:{port}/r/{safe_name(rollout_id)}"


CONTEXT = 131_072
"""Maximum tokens of a conversation if neither the spec nor the server sets a limit."""


async def context_of(server: Any, options: LoopOptions) -> int:
    """Return the maximum tokens of a program's conversation: the server's limit, or the spec's if smaller."""
    of_server = await server.context_length() if isinstance(server, ContextLengthProvider) else None
    return min((size for size in (of_server, options.max_trajectory_tokens) if size is not None), default=CONTEXT)


@dataclass(frozen=True)
class AgentFunction:
    """A function that is called as a program, and the parameters of `GIVEN` that it takes."""

    code: Code
    takes: tuple[str, ...]

    @classmethod
    def from_ref(
        cls, reference: str, offered: tuple[str, ...] = GIVEN, spec_key: str = "agent.program.python"
    ) -> AgentFunction:
        """Load a function by its absolute reference.

        Args:
            offered: parameters that it may name.
            spec_key: key of the spec, with which error messages start.

        Raises:
            UserError: the function cannot be loaded, or has a required parameter that is not offered.
        """
        function = load_object(reference)
        if not callable(function):
            raise UserError(f"{spec_key}: {reference} is not a function")
        parameters = inspect.signature(function).parameters.values()
        named_parameters = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        unknown = [each.name for each in named_parameters if each.name not in offered and each.default is each.empty]
        if unknown:
            raise UserError(
                f"{spec_key}: {reference} wants `{unknown[0]}`; it may name {', '.join(offered)} as parameters"
            )
        everything = any(each.kind is each.VAR_KEYWORD for each in parameters)
        return cls(
            Code.from_ref(reference),
            offered if everything else tuple(n.name for n in named_parameters if n.name in offered),
        )


@dataclass(frozen=True)
class AgentProgram:
    """Command or function of a program for one rollout, and the kinds of its calls that are trained on."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: tuple[SandboxFile, ...] = ()
    """Written before it starts."""
    train: tuple[Kind, ...] = ("main", "subagents")
    tools: bool = False
    """True if the spec's tools are offered to it."""
    function: AgentFunction | None = None
    """Function called instead of the command, with the values of `given` that it takes."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    spec_key: str = "agent.program"
    """Key of the spec, for error messages."""


ProgramOf = Callable[[Sequence[Message]], Awaitable[AgentProgram]]
"""Returns the program for a conversation whose last message it must respond to."""


class ProgramDriver:
    """Run one rollout, or one seat of an episode, with a program.

    Args:
        server: the policy: an object with `chat(ChatRequest)`.
        program: returns the program to start.
        runtime: the rollout's sandbox.
        user: sends messages to the seat and receives its replies; None: the program runs once, for the prompt.
        toolkit: tools that it may be offered; default: the toolkit of the sandbox.
        request_id: id of its requests; default: the task id of the sandbox.
        port: port in the sandbox at which it reaches the model; programs that share a sandbox use different ports.
    """

    def __init__(
        self,
        server: Any,
        program: ProgramOf,
        runtime: ToolRuntime,
        options: LoopOptions,
        tokenizer: Tokenizer | None = None,
        *,
        user: AnswersAgent | None = None,
        toolkit: Toolkit | None = None,
        request_id: str | None = None,
        port: int = PORT,
    ) -> None:
        self.server = as_chat_server(server)
        self.runtime, self.options, self.tokenizer = runtime, options, tokenizer
        self._program, self._user, self._port = program, user, port
        self._request_id = request_id or runtime.task_id
        self._tools = ToolServer(runtime, options, toolkit)
        self._listener: socket.socket | None = None
        """Listener in the sandbox, open from the first run to the end."""

    async def run(self, messages: Sequence[Message]) -> AgentResult:
        """Run the rollout.

        Args:
            messages: the spec's prompt, which the program's command contains in its own form.

        Raises:
            Failure: a model server or the sandbox failed; `.result` is the part run so far.
            UserError: the program cannot be started.
        """
        result = AgentResult(
            messages=[dict(message) for message in messages],
            prompt_length=len(messages),
            transcript=Transcript(),
            max_trajectory_tokens=self.options.max_trajectory_tokens,
            program=ProgramRun(),
        )
        recorder = PolicyRecorder(result, self.server, self.options, self.tokenizer)
        play = (
            partial(self._run_once, recorder, result.messages)
            if self._user is None
            else partial(self._run_turns, recorder)
        )
        try:
            return await recorder.play(play, self.runtime)
        finally:
            if self._listener is not None:
                self._listener.close()

    async def _run_turns(self, recorder: PolicyRecorder) -> StopReason:
        """Run the program for each turn of its seat; return the stop reason of the last run or of the episode."""
        assert self._user is not None
        result, last_answer = recorder.result, None
        conversation = list(result.messages)
        self._user.start(result, self.options.seed)
        while True:
            answer = await recorder.hear(self._user, last_answer)
            recorder.by_agents |= answer.by_agents
            if answer.error is not None:
                result.tool_errors.append(ToolError(result.turns_used, "user", last_answer or "", answer.error, ""))
            if answer.stop_reason is not None:
                return answer.stop_reason
            conversation = with_heard_message(conversation, answer.message)
            try:
                stop_reason = await self._run_once(recorder, conversation, by_others=answer.message is not None)
            except TemplateError as error:
                if answer.message is None and not result.turns_used:
                    raise
                # Caused by the message of another seat, so it stops this seat only.
                result.tool_errors.append(ToolError(result.turns_used, "user", "", str(error), ""))
                return StopReason.ENVIRONMENT_ERROR
            if stop_reason is not StopReason.FINISHED:
                return stop_reason
            last_answer = result.final_response
            conversation.append({"role": "assistant", "content": last_answer})

    async def _run_once(
        self, recorder: PolicyRecorder, conversation: Sequence[Message], *, by_others: bool = False
    ) -> StopReason:
        """Run the program once. `by_others` is True if other agents wrote the message that it responds to."""
        touched = self.runtime.started or recorder.result.turns_used > 0
        recorder.by_agents |= touched  # an agent may have changed the program in the sandbox
        program = await self._program(conversation)
        try:
            return await self._run(recorder, program)
        except _NotBegunError as error:
            run = recorder.result.program
            # A message may make a function fail, or may exceed the length of a command line; a missing program (127) is
            # missing whatever the message is.
            of_words = by_others and run is not None and run.exit_code in (RAISED, CANNOT_START[0])
            if not touched and not of_words:
                raise UserError(str(error)) from error
            recorder.result.tool_errors.append(ToolError(recorder.result.turns_used, "", "", str(error), ""))
            return StopReason.PROGRAM_ABORTED

    async def _run(self, recorder: PolicyRecorder, program: AgentProgram) -> StopReason:
        from hermes_rl.agent.endpoint import Endpoint  # loads an HTTP server, which other rollouts do not need

        secret = secrets.token_urlsafe(24) if program.function is not None else ""
        if secret:  # on a port of the host, protected by the secret path
            listener = socket.create_server(("127.0.0.1", 0))
            run = self._call_function(program, f"http://127.0.0.1:{listener.getsockname()[1]}/r/{secret}", secret)
        else:
            listener, run = await self._open_port(program)
        endpoint = Endpoint(recorder, self._request_id, secret, self._tools if program.tools else None)
        try:
            async with endpoint:
                endpoint.serve(listener)
                ended, in_time = await self._watch_program(run, endpoint, recorder)
        finally:  # no policy reply arrives after this point
            record_run(endpoint, recorder.result, program.train)
        return self._ending(program, endpoint, recorder, ended, in_time=in_time)

    async def _open_port(self, program: AgentProgram) -> tuple[socket.socket, Coroutine[Any, Any, CommandResult]]:
        """Open the port in the sandbox; return it with the program's run."""
        sandbox = await self.runtime.sandbox_for_agent()
        self.runtime.acts += 1
        if not isinstance(sandbox, HelperSandbox):
            raise UserError(
                f"{program.spec_key}: a sandbox of `backend: {self.runtime.config.backend}` has no separate "
                "network in which the program could reach the model; use bubblewrap or docker"
            )
        if self._listener is None:
            for file in program.files:
                try:
                    await sandbox.write_file(file.to, file.data, file.mode)
                except OSError as error:
                    problem = f"{program.spec_key}.files: {file.to} cannot be written: {error.strerror}"
                    raise _NotBegunError(problem) from error
            try:
                self._listener = await sandbox.listen(self._port)
            except OSError as error:  # the sandbox's setup, or an agent, uses the port
                problem = f"{program.spec_key}: port {self._port} of the sandbox cannot be opened: {error}"
                raise _NotBegunError(problem) from error
        run = sandbox.run(program.command, env=program.env, timeout=10 * DEFAULT_PROGRAM_SECONDS, output_limit=OUTPUT)
        return self._listener.dup(), run

    async def _call_function(self, program: AgentProgram, endpoint: str, token: str) -> CommandResult:
        """Call the function in a separate process; return its outcome as the result of a command."""
        function, runtime = program.function, self.runtime
        assert function is not None
        offered = {**program.arguments, "endpoint": endpoint, "token": token, "ctx": ToolContext(runtime.task_id)}
        process = await POOL.hold(function.code)
        try:
            arguments = {name: offered[name] for name in function.takes}
            returned = await process.call(
                function.code, arguments, "builtins:repr", 10 * DEFAULT_PROGRAM_SECONDS, require_text
            )
            return CommandResult(0, b"" if returned == "None" else returned[-OUTPUT:].encode())
        except (ForeignError, AgentFault, UserError) as error:  # it may have executed text of the policy
            return CommandResult(RAISED, str(error).encode())
        except EndedError as error:
            return CommandResult(KILLED_EXIT_CODE, f"its process {error}".encode())
        finally:
            await process.close()
            if not runtime.staging.empty and not runtime.killed_by_agent:
                await runtime.staging.keep(await runtime.sandbox())  # the files that it wrote are the agent's

    async def _watch_program(
        self, run: Coroutine[Any, Any, CommandResult], endpoint: Endpoint, recorder: PolicyRecorder
    ) -> tuple[CommandResult | None, bool]:
        """Run the program; return its result, or None if it was killed, and True if it kept its time limit."""
        bound, started_at = self.options.working_time or DEFAULT_PROGRAM_SECONDS, clock()
        timings = recorder.result.timings
        before = timings.tools
        running = asyncio.create_task(run)
        stopped_at: float | None = None
        in_time = True
        try:
            while not running.done() and in_time and endpoint.failure is None:
                await asyncio.wait({running}, timeout=GLANCE)
                timings.tools = before + max(0.0, clock() - started_at - endpoint.waiting)
                in_time = timings.working < bound
                if endpoint.stop_reason is not None:
                    stopped_at = stopped_at or clock()
                    if clock() - stopped_at > GRACE:
                        break
            return (await running if running.done() else None), in_time
        finally:
            if not running.done():
                await end_tasks([running])

    def _timeout_reason(self, program: AgentProgram, endpoint: Endpoint, recorder: PolicyRecorder) -> StopReason:
        """Return the stop reason of a program that exceeded its time; raise if it never called the policy."""
        if endpoint.requests or recorder.by_agents:
            return StopReason.TIMEOUT
        seconds = f"{self.options.working_time or DEFAULT_PROGRAM_SECONDS:g} s"
        raise SandboxFailure(f"{program.spec_key}: the program had not asked the model after {seconds}")

    def _ending(
        self,
        program: AgentProgram,
        endpoint: Endpoint,
        recorder: PolicyRecorder,
        ended: CommandResult | None,
        *,
        in_time: bool,
    ) -> StopReason:
        run = recorder.result.program
        assert run is not None
        run.exit_code = None if ended is None else ended.exit_code
        run.output = "" if ended is None else ended.output[-run.KEPT :]
        if endpoint.failure is not None:
            raise endpoint.failure
        if self.runtime.killed_by_agent:
            return StopReason.SANDBOX_KILLED
        if endpoint.stop_reason is not None:
            return endpoint.stop_reason
        if not in_time:
            return self._timeout_reason(program, endpoint, recorder)
        if endpoint.too_long:
            return StopReason.TOKEN_BUDGET  # it could not shorten the conversation
        if endpoint.main is None:
            if program.function is not None and run.exit_code == RAISED and not endpoint.requests:
                raise _NotBegunError(
                    f"{program.spec_key}.python raised before it asked the model: {run.output.strip()}"
                )
            if ended is not None and ended.exit_code in CANNOT_START and program.function is None:
                start_error = f"`{program.command[0]}` cannot be started (status {ended.exit_code})"
                problem = f"{program.spec_key}: {start_error}: {run.output.strip()}"
                raise _NotBegunError(problem)
            return StopReason.PROGRAM_ABORTED
        stop_reason = recorder.ended_by(endpoint.main.answer, endpoint.main.calls)
        if stop_reason is None and run.exit_code == 0 and endpoint.answered:
            return StopReason.FINISHED  # the program finishes with a tool call, or with the effect of the call
        return stop_reason or StopReason.PROGRAM_ABORTED


class _NotBegunError(Exception):
    """A program could not be started, or exited before its first request."""


def with_heard_message(conversation: Sequence[Message], message: Message | None) -> list[Message]:
    """Return a conversation with the next message to its seat; the end of its prompt and the first message are merged.

    A program receives the last message only, so this message is empty if the seat gets none between two turns. Null
    bytes and unpaired surrogates are replaced, because a command line cannot contain them.
    """
    text = "" if message is None else replace_surrogates(message["content"]).replace("\0", "\ufffd")
    last = conversation[-1] if conversation else None
    if last is None or last["role"] != "user":
        return [*conversation, {"role": "user", "content": text}]
    if message is None:
        return list(conversation)
    content, text = last["content"], f"\n\n{text}"
    joined = [*content, {"type": "text", "text": text}] if isinstance(content, list) else f"{content}{text}"
    return [*conversation[:-1], {**last, "content": joined}]


def record_run(endpoint: Endpoint, result: AgentResult, train: Sequence[Kind]) -> None:
    """Add the requests of one run of the program to the result: evidence, model calls and counts."""
    run = result.program
    assert run is not None
    run.requests, run.refused = run.requests + endpoint.requests, run.refused + endpoint.refused
    run.refusal = endpoint.refusal or run.refusal
    before, calls, kinds = len(run.calls), endpoint.conversations.calls, endpoint.conversations.kinds()
    exact = result.transcript is not None and bool(result.transcript.turns)
    answered = zip(calls, kinds, result.replies[before:], strict=True)
    for turn, (each, kind, reply) in enumerate(answered, before):
        tokens, trained = tokens_of(reply.usage, "completion_tokens"), exact and kind in train
        continues = None if each.continues is None else before + each.continues
        record = {"kind": kind, "continues": continues, "tokens": tokens, "trained": trained}
        run.calls.append({**record, "preview": each.preview})
        if exact and not trained:
            assert result.transcript is not None
            result.transcript.excluded[turn] = kind
            run.excluded[kind] = run.excluded.get(kind, 0) + tokens
    run.sampling |= endpoint.sampling
    take_evidence(result, endpoint)
