"""An agent program as the driver of a rollout: it runs in the sandbox and asks the model at an address there.

Or it is a function of the spec's own, called in a process outside of the sandbox. This module starts the program,
watches its time, and says how the rollout ended. Exit codes say little, as programs end with 0 behind an error and with
1 behind success: what the endpoint has seen decides. Everything that a program does is the policy's doing; that it
cannot be started is a mistake of the spec, unless an agent has written something that may be the cause.

A program that has a seat among several agents is run once for each turn of the seat. Its sandbox stays, and all of its
runs together are one conversation, within one set of budgets.
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
from hermes_rl.endings import Ending
from hermes_rl.errors import AgentFault, SandboxFailure, ToolError, UserError
from hermes_rl.foreign.failures import EndedError, ForeignError
from hermes_rl.foreign.messages import require_text
from hermes_rl.foreign.pool import POOL
from hermes_rl.plugins import Code, load_object
from hermes_rl.sandbox.base import KILLED_EXIT_CODE, CommandResult, SandboxFile
from hermes_rl.sandbox.helper_sandbox import HelperSandbox
from hermes_rl.servers.base import TellsContext
from hermes_rl.servers.completion import as_chat_server
from hermes_rl.spec.templates import TemplateError
from hermes_rl.threads import end_tasks
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.tokens.transcript import Transcript
from hermes_rl.tools.base import Toolkit, ToolRuntime
from hermes_rl.tools.context import ToolContext
from hermes_rl.values import safe_name, whole_text

if TYPE_CHECKING:
    from hermes_rl.agent.endpoint import Endpoint

PORT = 8181
"""Port of the endpoint in the sandbox; of several agents, each has the next one."""
LONGEST = 3600.0
"""Seconds that a program may work where the spec bounds nothing."""
GLANCE = 0.5
"""Seconds between two looks at the time."""
GRACE = 10.0
"""Seconds that a program has to end, once it has been told that the rollout is over."""
OUTPUT = 1 << 20
"""Bytes of its output that are kept."""
CANNOT_START = (126, 127)
"""Exit codes of a command that is not there, or is no program."""
RAISED = 1
"""Exit code of a function that has raised."""
GIVEN = ("row", "messages", "prompt", "system", "endpoint", "token", "ctx")
"""What a function may name as parameters."""


def endpoint_of(rollout_id: str, port: int = PORT) -> str:
    """Return the address that a program finds the model at, without ``/v1``."""
    return f"http://127.0.0.1:{port}/r/{safe_name(rollout_id)}"


CONTEXT = 131_072
"""Tokens of the longest conversation where neither the spec nor the server tells them."""


async def context_of(server: Any, options: LoopOptions) -> int:
    """Return the tokens of the longest conversation that a program may hold: the server's, or the spec's if smaller."""
    of_server = await server.context_length() if isinstance(server, TellsContext) else None
    return min((size for size in (of_server, options.max_trajectory_tokens) if size is not None), default=CONTEXT)


@dataclass(frozen=True)
class AgentFunction:
    """A function that is called as a program, and which of `GIVEN` it takes."""

    code: Code
    takes: tuple[str, ...]

    @classmethod
    def of(cls, reference: str, offered: tuple[str, ...] = GIVEN, where: str = "agent.program.python") -> AgentFunction:
        """Load a function by its absolute reference; `offered` are the parameters that it may name. Raises `UserError`
        where it cannot be loaded, or wants what is not there; the message begins with `where` it is named."""
        function = load_object(reference)
        if not callable(function):
            raise UserError(f"{where}: {reference} is no function")
        parameters = inspect.signature(function).parameters.values()
        named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        unknown = [each.name for each in named if each.name not in offered and each.default is each.empty]
        if unknown:
            raise UserError(
                f"{where}: {reference} wants `{unknown[0]}`; it may name {', '.join(offered)} as parameters"
            )
        everything = any(each.kind is each.VAR_KEYWORD for each in parameters)
        return cls(Code.of(reference), offered if everything else tuple(n.name for n in named if n.name in offered))


@dataclass(frozen=True)
class AgentProgram:
    """How a program is started for one rollout, and which kinds of its calls are trained on."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: tuple[SandboxFile, ...] = ()
    """Laid down before it starts."""
    train: tuple[Kind, ...] = ("main", "subagents")
    tools: bool = False
    """Whether it is offered the spec's tools."""
    function: AgentFunction | None = None
    """What is called instead of the command, with those of `given` that it takes."""
    given: Mapping[str, Any] = field(default_factory=dict)
    place: str = "agent.program"
    """Where it stands in the spec, for errors."""


ProgramOf = Callable[[Sequence[Message]], Awaitable[AgentProgram]]
"""Says how a program is started for a conversation, whose last message is what it is to answer."""


class ProgramDriver:
    """Plays one rollout by a program, or one seat of an episode.

    Args:
        server: the policy: anything with `chat(ChatRequest)`.
        program: how it is started.
        runtime: the rollout's machine.
        user: what the seat hears, and who hears what it says; None: the program is run once, for the prompt.
        toolkit: the tools that it may be offered; default: those of the machine.
        request_id: names its requests; default: the machine's task.
        port: of the sandbox, where it finds the model; those who share a sandbox have different ones.
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
        """The sandbox's port, open from the first run to the end."""

    async def run(self, messages: Sequence[Message]) -> AgentResult:
        """Play the rollout; `messages` are the spec's prompt, which the program's command holds in its own way. Raises
        `Failure` where a model server or the sandbox failed; `.result` is the part played so far. Raises `UserError`
        where the program cannot be started."""
        result = AgentResult(
            messages=[dict(message) for message in messages],
            prompt_length=len(messages),
            transcript=Transcript(),
            max_trajectory_tokens=self.options.max_trajectory_tokens,
            program=ProgramRun(),
        )
        recorder = PolicyRecorder(result, self.server, self.options, self.tokenizer)
        play = partial(self._play, recorder, result.messages) if self._user is None else partial(self._turns, recorder)
        try:
            return await recorder.play(play, self.runtime)
        finally:
            if self._listener is not None:
                self._listener.close()

    async def _turns(self, recorder: PolicyRecorder) -> Ending:
        """Run the program for each turn of its seat; returns the ending of the run, or of the episode, that is its
        last."""
        assert self._user is not None
        result, last_answer = recorder.result, None
        conversation = list(result.messages)
        self._user.begin(result, self.options.seed)
        while True:
            answer = await recorder.hear(self._user, last_answer)
            recorder.by_agents |= answer.by_agents
            if answer.error is not None:
                result.tool_errors.append(ToolError(result.turns_used, "user", last_answer or "", answer.error, ""))
            if answer.ending is not None:
                return answer.ending
            conversation = hearing(conversation, answer.message)
            try:
                ending = await self._play(recorder, conversation, by_others=answer.message is not None)
            except TemplateError as error:
                if answer.message is None and not result.turns_used:
                    raise
                # Over what another seat has said, so it ends the seat's part and not the run.
                result.tool_errors.append(ToolError(result.turns_used, "user", "", str(error), ""))
                return Ending.WORLD_FAILED
            if ending is not Ending.FINISHED:
                return ending
            last_answer = result.final_response
            conversation.append({"role": "assistant", "content": last_answer})

    async def _play(
        self, recorder: PolicyRecorder, conversation: Sequence[Message], *, by_others: bool = False
    ) -> Ending:
        """Run the program once; `by_others`: other agents have written what it is to answer."""
        touched = self.runtime.started or recorder.result.turns_used > 0
        recorder.by_agents |= touched  # what runs there may be what an agent has made of the program
        program = await self._program(conversation)
        try:
            return await self._run(recorder, program)
        except _NotBegunError as error:
            run = recorder.result.program
            # Words may be what a function fails at, or longer than a command line can be; a program that is not there
            # (127) is missing whatever they are.
            of_words = by_others and run is not None and run.exit_code in (RAISED, CANNOT_START[0])
            if not touched and not of_words:
                raise UserError(str(error)) from error
            recorder.result.tool_errors.append(ToolError(recorder.result.turns_used, "", "", str(error), ""))
            return Ending.GAVE_UP

    async def _run(self, recorder: PolicyRecorder, program: AgentProgram) -> Ending:
        from hermes_rl.agent.endpoint import Endpoint  # it loads an HTTP server, which other rollouts do not need

        secret = secrets.token_urlsafe(24) if program.function is not None else ""
        if secret:  # a port of this machine, where who knows the path may ask
            listener = socket.create_server(("127.0.0.1", 0))
            run = self._called(program, f"http://127.0.0.1:{listener.getsockname()[1]}/r/{secret}", secret)
        else:
            listener, run = await self._inside(program)
        endpoint = Endpoint(recorder, self._request_id, secret, self._tools if program.tools else None)
        try:
            async with endpoint:
                endpoint.serve(listener)
                ended, in_time = await self._watched(run, endpoint, recorder)
        finally:  # from here on no answer comes any more
            write_down(endpoint, recorder.result, program.train)
        return self._ending(program, endpoint, recorder, ended, in_time=in_time)

    async def _inside(self, program: AgentProgram) -> tuple[socket.socket, Coroutine[Any, Any, CommandResult]]:
        """Open the sandbox's port; returns it with the program's run."""
        sandbox = await self.runtime.sandbox_for_agent()
        self.runtime.acts += 1
        if not isinstance(sandbox, HelperSandbox):
            raise UserError(
                f"{program.place}: a sandbox of `backend: {self.runtime.config.backend}` has no network of its own, in "
                "which the program could find the model; use bubblewrap or docker"
            )
        if self._listener is None:
            for file in program.files:
                try:
                    await sandbox.write_file(file.to, file.data, file.mode)
                except OSError as error:
                    problem = f"{program.place}.files: {file.to} cannot be written: {error.strerror}"
                    raise _NotBegunError(problem) from error
            try:
                self._listener = await sandbox.listen(self._port)
            except OSError as error:  # the sandbox's setup, or an agent, has begun something there
                problem = f"{program.place}: port {self._port} of the sandbox cannot be opened: {error}"
                raise _NotBegunError(problem) from error
        run = sandbox.run(program.command, env=program.env, timeout=10 * LONGEST, output_limit=OUTPUT)
        return self._listener.dup(), run

    async def _called(self, program: AgentProgram, endpoint: str, token: str) -> CommandResult:
        """Call the function in a process of its own; returns how it ended, as if it were a command."""
        function, runtime = program.function, self.runtime
        assert function is not None
        known = {**program.given, "endpoint": endpoint, "token": token, "ctx": ToolContext(runtime.task_id)}
        process = await POOL.hold(function.code)
        try:
            arguments = {name: known[name] for name in function.takes}
            returned = await process.call(function.code, arguments, "builtins:repr", 10 * LONGEST, require_text)
            return CommandResult(0, b"" if returned == "None" else returned[-OUTPUT:].encode())
        except (ForeignError, AgentFault, UserError) as error:  # it may have run the text of the policy
            return CommandResult(RAISED, str(error).encode())
        except EndedError as error:
            return CommandResult(KILLED_EXIT_CODE, f"its process {error}".encode())
        finally:
            await process.close()
            if not runtime.staging.empty and not runtime.killed_by_agent:
                await runtime.staging.keep(await runtime.sandbox())  # what it has written is the agent's

    async def _watched(
        self, run: Coroutine[Any, Any, CommandResult], endpoint: Endpoint, recorder: PolicyRecorder
    ) -> tuple[CommandResult | None, bool]:
        """Run the program to its end; returns how it ended, None where it was ended, and whether that was in time."""
        bound, began = self.options.working_time or LONGEST, clock()
        timings = recorder.result.timings
        before = timings.tools
        running = asyncio.create_task(run)
        over: float | None = None
        in_time = True
        try:
            while not running.done() and in_time and endpoint.failure is None:
                await _first(running, endpoint.ended.wait() if over is None else None, GLANCE)
                timings.tools = before + max(0.0, clock() - began - endpoint.waiting)
                in_time = timings.working < bound
                if endpoint.ended.is_set():
                    over = over or clock()
                    if clock() - over > GRACE:
                        break
            return (await running if running.done() else None), in_time
        finally:
            if not running.done():
                await end_tasks([running])

    def _overtime(self, program: AgentProgram, endpoint: Endpoint, recorder: PolicyRecorder) -> Ending:
        """Return the ending of a program whose time was up, which is no doing of a policy that it never asked."""
        if endpoint.requests or recorder.by_agents:
            return Ending.TIMEOUT
        seconds = f"{self.options.working_time or LONGEST:g} s"
        raise SandboxFailure(f"{program.place}: the program had not asked the model after {seconds}")

    def _ending(
        self,
        program: AgentProgram,
        endpoint: Endpoint,
        recorder: PolicyRecorder,
        ended: CommandResult | None,
        *,
        in_time: bool,
    ) -> Ending:
        run = recorder.result.program
        assert run is not None
        run.exit_code = None if ended is None else ended.exit_code
        run.output = "" if ended is None else ended.output[-run.KEPT :]
        if endpoint.failure is not None:
            raise endpoint.failure
        if self.runtime.killed_by_agent:
            return Ending.SANDBOX_KILLED
        if endpoint.ending is not None:
            return endpoint.ending
        if not in_time:
            return self._overtime(program, endpoint, recorder)
        if endpoint.too_long:
            return Ending.TOKEN_BUDGET  # it could not make the conversation shorter
        if endpoint.main is None:
            if program.function is not None and run.exit_code == RAISED and not endpoint.requests:
                raise _NotBegunError(f"{program.place}.python raised before it asked the model: {run.output.strip()}")
            if ended is not None and ended.exit_code in CANNOT_START and program.function is None:
                shown = f"`{program.command[0]}` cannot be started (status {ended.exit_code})"
                problem = f"{program.place}: {shown}: {run.output.strip()}"
                raise _NotBegunError(problem)
            return Ending.GAVE_UP
        ending = recorder.ended_by(endpoint.main.answer, endpoint.main.calls)
        if ending is None and run.exit_code == 0 and endpoint.answered:
            return Ending.FINISHED  # it takes a call, or what the call does, as the end of its work
        return ending or Ending.GAVE_UP


class _NotBegunError(Exception):
    """A program cannot be started, or ends before it has asked for anything."""


def hearing(conversation: Sequence[Message], message: Message | None) -> list[Message]:
    """Return a conversation with what its seat hears; what its prompt ends with and the first words are one message.

    A program is told the last message alone, so that it is empty where the seat hears nothing between two turns. Null
    bytes and halves of characters are replaced, as no command line can hold them.
    """
    words = "" if message is None else whole_text(message["content"]).replace("\0", "\ufffd")
    last = conversation[-1] if conversation else None
    if last is None or last["role"] != "user":
        return [*conversation, {"role": "user", "content": words}]
    if message is None:
        return list(conversation)
    content, words = last["content"], f"\n\n{words}"
    joined = [*content, {"type": "text", "text": words}] if isinstance(content, list) else f"{content}{words}"
    return [*conversation[:-1], {**last, "content": joined}]


async def _first(running: asyncio.Task[Any], event: Awaitable[Any] | None, seconds: float) -> None:
    """Wait until the program has ended or the event is there, at most so many seconds."""
    waiting = None if event is None else asyncio.ensure_future(event)
    both = {running} if waiting is None else {running, waiting}
    try:
        await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if waiting is not None:
            waiting.cancel()


def write_down(endpoint: Endpoint, result: AgentResult, train: Sequence[Kind]) -> None:
    """Add what a run of the program has asked to the result: the evidence, the calls of the model, the counts."""
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
        run.calls.append({**record, "begins": each.begins})
        if exact and not trained:
            assert result.transcript is not None
            result.transcript.left_out[turn] = kind
            run.left_out[kind] = run.left_out.get(kind, 0) + tokens
    run.sampling |= endpoint.sampling
    take_evidence(result, endpoint)
