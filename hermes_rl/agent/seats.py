"""Run episodes of several agents: each seat has its own conversation, and a schedule decides the order of speakers.

A seat (one agent of an episode) runs like a single agent. In the loop, the schedule's messages arrive as the messages
of its user, and its reply without tool calls is the message that it sends. An agent program runs once for each turn,
and its last reply is the seat's message. Seats record their samples below the schedule, so no schedule can change them.
The schedules are `alternate`, `simultaneous`, `call` (the other seats are tools of the first), a method of the state,
or a function of the spec in a separate process. The component that ends the episode stops all active seats; a seat that
stopped by its own action has left the episode.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import Any

from hermes_rl.agent.loop import HermesAgentLoop
from hermes_rl.agent.program import AgentFunction, ProgramDriver, ProgramOf
from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.agent.result import AgentResult, Message
from hermes_rl.agent.user import AnswersAgent, UserAnswer
from hermes_rl.errors import AgentFault, Failure, SandboxFailure, UserError
from hermes_rl.plugins import Code, place_of
from hermes_rl.stop_reasons import StopReason
from hermes_rl.threads import end_tasks, run_in_thread
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.tools.base import DescribedTool, ToolFailedError, Toolkit, ToolRuntime, arguments, capped, typed
from hermes_rl.tools.rollout_process import answer_in_json
from hermes_rl.user_code.failures import EndedError, ForeignError
from hermes_rl.user_code.messages import require_text
from hermes_rl.user_code.pool import POOL
from hermes_rl.user_code.proxies import SeatStandIn, lives_in_runner
from hermes_rl.values import read_bounded

SCHEDULE_SECONDS_LIMIT = 36_000.0
"""Maximum duration of a schedule in seconds, including the seats' turns; `MultiAgentEpisode.patience` limits the
schedule's own time.
"""
GLANCE = 0.5
"""Seconds between two checks of a schedule while no seat is speaking."""


class ScheduleError(Exception):
    """The schedule raised, took too long, or made an invalid request to a seat; the text names the cause."""


@lives_in_runner("hermes_rl.user_code.proxies:SeatStandIn")
class SeatRunner:
    """Run one seat and act as the user in its loop.

    Args:
        name: name of the seat.
        server: model server of the seat.
        messages: the prompt.
        options: limits and sampling options.
        toolkit: tools of the seat.
        runtime: sandbox of the seat, which several seats may share.
        request_id: id of its requests, so that a server of several seats can distinguish them.
        tokenizer: estimates the tokens that a chat server has not counted yet.
        user: talks to the seat instead of the other seats, from its first turn until this user ends the conversation;
            the other seats may be its tools.
        program: program that runs instead of the loop.
        port: port in the sandbox at which such a program reaches the model.
    """

    speaks_first = True

    def __init__(
        self,
        name: str,
        server: Any,
        messages: Sequence[Message],
        options: LoopOptions,
        toolkit: Toolkit,
        runtime: ToolRuntime,
        *,
        request_id: str,
        tokenizer: Tokenizer | None = None,
        user: AnswersAgent | None = None,
        program: ProgramOf | None = None,
        port: int = 0,
    ) -> None:
        self.name, self.runtime, self.toolkit, self.options = name, runtime, toolkit, options
        self.spoke_last = time.monotonic()
        self._server, self._messages, self._request_id, self._tokenizer = server, messages, request_id, tokenizer
        self._user, self._program, self._port = user, program, port
        self.episode_seats: Mapping[str, SeatRunner] = {}
        """All seats of the episode, by name."""
        self._played: AgentResult | None = None
        self._turn = asyncio.Lock()
        self._inbox: asyncio.Queue[UserAnswer] = asyncio.Queue()
        self._answer: asyncio.Future[str | None] | None = None
        self._playing: asyncio.Task[AgentResult] | None = None
        self._refused: UserError | None = None

    # ------------------------------------------------------------------ as its loop sees it (`AnswersAgent`)

    def start(self, result: AgentResult, seed: int | None = None) -> None:
        """Give the conversation to the user; messages of the other seats arrive later."""
        self._played = result
        if self._user is not None:
            self._user.start(result, seed)

    @property
    def waits_for_seats(self) -> bool:
        """True if it waits for other seats and not for its user."""
        return self._user is None

    async def speak(self, message: str | None = None) -> UserAnswer:
        """Deliver the seat's message, and wait for the next message to it."""
        if message is not None and self._user is not None:
            return await self._user.speak(message)
        if message is None and self._user is not None and self._user.speaks_first:
            return await self._user.speak()
        if message is not None and self._answer is not None:
            await self._end_processes()
            self._answer.set_result(message)
        return await self._inbox.get()

    async def _end_processes(self) -> None:
        """Stop the processes that the seat left in a shared sandbox, unless another seat is active there."""
        others = [seat for seat in self.episode_seats.values() if seat is not self and seat.runtime is self.runtime]
        if others and not any(seat.speaking for seat in others):
            await self.runtime.settle(agent_done=False)

    # ------------------------------------------------------------------ as a schedule sees it

    @property
    def stop_reason(self) -> StopReason | None:
        """Stop reason of the seat, or None while it is active."""
        if self._playing is None or not self._playing.done():
            return None
        return self._playing.result().stop_reason

    @property
    def has_spoken(self) -> bool:
        """True if its policy has replied at least once."""
        return self._played is not None and self._played.turns_used > 0

    @property
    def failure(self) -> Failure | UserError | None:
        """Infrastructure failure or spec error that stopped its conversation, or None."""
        if self._refused is not None:
            return self._refused
        playing = self._playing
        error = playing.exception() if playing is not None and playing.done() and not playing.cancelled() else None
        return error if isinstance(error, Failure | UserError) else None

    @property
    def result(self) -> AgentResult | None:
        """Result of the seat; before its first turn the prompt alone. None if it was cancelled during a turn."""
        if self._playing is None:
            return AgentResult(
                messages=[dict(message) for message in self._messages],
                prompt_length=len(self._messages),
                tool_schemas=self.toolkit.schemas,
                stop_reason=StopReason.ENVIRONMENT_DONE,
                finished_naturally=True,
                max_trajectory_tokens=self.options.max_trajectory_tokens,
            )
        if self._playing.cancelled() or self._playing.exception() is not None:
            return self.failure.result if isinstance(self.failure, Failure) else None
        return self._playing.result()

    async def say(self, text: str | None = None) -> str | None:
        """Send a message to the seat and return its reply; calls are processed one after the other.

        Args:
            text: the message; None lets it respond to its prompt alone.

        Returns:
            its text; None if this turn was its last, because it reached a limit, was cut, or ended the episode.

        Raises:
            ScheduleError: it has already left the episode.
            Failure: infrastructure failed.
            UserError: its program cannot be started, or the request would contain no user message.
        """
        await self._turn.acquire()
        try:
            if self.stop_reason is not None:
                raise ScheduleError(f"asks {self.name!r}, which is out ({self.stop_reason})")
            if not isinstance(text, str | None):
                raise ScheduleError(
                    f"sends {self.name!r} an object of type {type(text).__name__}; expected text or None"
                )
            if text is None and self._playing is None and not self._has_question:
                self._refused = UserError(
                    f"agents.{self.name}: the schedule lets this seat speak first, and it would be asked without a "
                    "user message: give its prompt a `user`, or let the schedule say something to it"
                )
                raise self._refused
        except BaseException:  # no reply follows, so no callback would release the turn
            self._turn.release()
            raise
        self._answer = asyncio.get_running_loop().create_future()
        self._answer.add_done_callback(self._consume_reply)
        message = None if text is None else {"role": "user", "content": text}
        by_agents = message is not None and any(seat.has_spoken for seat in self.episode_seats.values())
        self._inbox.put_nowait(UserAnswer(message, by_agents=by_agents))
        if self._playing is None:
            self._playing = asyncio.create_task(self._play())
            self._playing.add_done_callback(self._notify_end)
        # If the caller is cancelled, for example by a tool timeout, the next call must not receive this reply.
        return await asyncio.shield(self._answer)

    @property
    def _has_question(self) -> bool:
        """True if it can be called before its first message; chat templates reject prompts without a user message."""
        answers = self._user is not None or self._program is not None
        return answers or any(message["role"] != "system" for message in self._messages)

    @property
    def speaking(self) -> bool:
        """True if it has received a message to which it has not replied yet."""
        return self._turn.locked()

    def _consume_reply(self, answer: asyncio.Future[str | None]) -> None:
        self.spoke_last = time.monotonic()
        self._turn.release()
        if not answer.cancelled():
            answer.exception()  # the caller may have stopped waiting

    def _notify_end(self, playing: asyncio.Task[AgentResult]) -> None:
        """Notify the caller that waits for a reply that none will arrive."""
        if self._answer is None or self._answer.done():
            return
        if playing.cancelled():
            self._answer.cancel()
        elif (error := playing.exception()) is not None:
            self._answer.set_exception(error)
        else:
            self._answer.set_result(None)

    async def handle_say(self, text: str | None = None) -> dict[str, Any]:
        """Return the `text` or the `problem` for `SeatStandIn.say`."""
        try:
            return {"text": await self.say(text)}
        except (ScheduleError, Failure, UserError) as error:
            return {"problem": str(error)}

    def stand_in_fields(self) -> dict[str, Any]:
        """Return the fields that a proxy knows without a request."""
        return {"name": self.name}

    async def _play(self) -> AgentResult:
        if self._program is not None:
            driver: ProgramDriver | HermesAgentLoop = ProgramDriver(
                self._server,
                self._program,
                self.runtime,
                self.options,
                self._tokenizer,
                user=self,
                toolkit=self.toolkit,
                request_id=self._request_id,
                port=self._port,
            )
        else:
            driver = HermesAgentLoop(
                self._server,
                self.toolkit.schemas,
                task_id=self.runtime.task_id,
                options=self.options,
                user=self,
                tokenizer=self._tokenizer,
                request_id=self._request_id,
            )
        result = await driver.run(self._messages)
        await self._end_processes()
        return result

    async def leave(self, *, problem: str | None = None, now: bool = False) -> None:
        """End its conversation. `problem`: the schedule failed with this error; `now`: cancel the current turn."""
        playing = self._playing
        if playing is not None and not playing.done():
            if now:
                playing.cancel()
            else:
                stop_reason = StopReason.ENVIRONMENT_DONE if problem is None else StopReason.ENVIRONMENT_ERROR
                self._inbox.put_nowait(UserAnswer(None, stop_reason, error=problem))
        if playing is not None:
            await asyncio.gather(playing, return_exceptions=True)


class MultiAgentEpisode:
    """The seats of one episode.

    Args:
        seats: the seats in the order of the spec.
        hears: returns the message for a seat after another seat has spoken: (listener, speaker, text) → message.
        patience: seconds that a schedule may take between two turns.
    """

    def __init__(self, seats: Sequence[SeatRunner], hears: Callable[[str, str, str], str], patience: float) -> None:
        self.seats = {seat.name: seat for seat in seats}
        self.hears, self.patience = hears, patience
        for seat in seats:
            seat.episode_seats = self.seats

    async def play(self, schedule: Schedule) -> Any:
        """Run the seats by the schedule until it ends; return its return value.

        Raises:
            Failure: infrastructure failed, or the schedule failed before any seat had spoken, which no policy caused.
                The seats' `result` holds the part run so far.
        """
        work = asyncio.ensure_future(schedule(self))
        outcome = problem = None
        is_finished = False
        try:
            await self._until_over(work)
            outcome, is_finished = work.result(), True
        except (ScheduleError, ToolFailedError, EndedError) as error:
            problem, is_finished = getattr(error, "detail", str(error)), True
        finally:
            for seat in self.seats.values():
                await seat.leave(problem=problem, now=not is_finished or self._failure is not None)
            # After the seats, because requests from another process wait for them.
            await end_tasks([work])
            if self._failure is not None:
                raise self._failure
        if problem is not None and not any(seat.result and seat.result.turns_used for seat in self.seats.values()):
            raise SandboxFailure(f"the schedule {problem}")
        return outcome

    async def _until_over(self, work: asyncio.Future[Any]) -> None:
        """Wait until the schedule has ended; raise `ScheduleError` if no seat has spoken for too long."""
        started_at = time.monotonic()
        while not work.done():
            await asyncio.wait({work}, timeout=GLANCE)
            seats = self.seats.values()
            silent_since = max(started_at, *(seat.spoke_last for seat in seats))
            speaks = any(seat.speaking for seat in seats)
            if not work.done() and not speaks and time.monotonic() - silent_since > self.patience:
                raise ScheduleError(f"has let no seat speak for {self.patience:g} s")

    @property
    def _failure(self) -> Failure | UserError | None:
        """Infrastructure failure or spec error of one of the seats, or None."""
        return next((seat.failure for seat in self.seats.values() if seat.failure is not None), None)


Schedule = Callable[[MultiAgentEpisode], Awaitable[Any]]
"""Decides the order of speakers; returns the outcome of the episode, or None."""


def alternating_schedule(rounds: int | None) -> Schedule:
    """Return the schedule in which seats speak one after the other for `rounds` rounds; None: until one has left.

    Each seat receives the messages that the others sent since its last turn.
    """

    async def alternate(table: MultiAgentEpisode) -> None:
        unheard: dict[str, list[str]] = {name: [] for name in table.seats}
        for _ in range(rounds) if rounds is not None else count():
            for name, seat in table.seats.items():
                message, unheard[name] = "\n\n".join(unheard[name]) or None, []
                answer = await seat.say(message)
                if answer is None:
                    return
                for other, pending_messages in unheard.items():
                    pending_messages += [table.hears(other, name, answer)] if other != name else []

    return alternate


def simultaneous_schedule(rounds: int | None) -> Schedule:
    """Return the schedule in which all seats speak concurrently and then receive the messages of the others."""

    async def simultaneous(table: MultiAgentEpisode) -> None:
        messages: dict[str, str | None] = dict.fromkeys(table.seats)
        for _ in range(rounds) if rounds is not None else count():
            answers = await speak_concurrently(table, messages)
            if None in answers.values():
                return
            for name in table.seats:
                other_messages = [
                    table.hears(name, other, str(text)) for other, text in answers.items() if other != name
                ]
                messages[name] = "\n\n".join(other_messages)

    return simultaneous


def calling() -> Schedule:
    """Return the schedule that calls only the first seat; the other seats are its tools (`SeatTool`)."""

    async def call(table: MultiAgentEpisode) -> None:
        await next(iter(table.seats.values())).say()

    return call


def by_state(ask: Callable[[Mapping[str, str | None] | None], Awaitable[Any]]) -> Schedule:
    """Return the schedule of a method of the state.

    The method gets the replies of the seats that it called, by seat, with None for a seat that has left; None in the
    first call. It returns the messages for the next seats, by seat (None: no message), or null or {} if the episode is
    over.
    """

    async def stepped(table: MultiAgentEpisode) -> None:
        answers: Mapping[str, str | None] | None = None
        while messages := await ask(answers):
            if not isinstance(messages, dict) or any(not isinstance(text, str | None) for text in messages.values()):
                raise ScheduleError(f"has to answer with texts by seat, or null, not {capped(repr(messages), 200)}")
            unknown = [name for name in messages if name not in table.seats]
            if unknown:
                raise ScheduleError(f"lets {unknown[0]!r} speak; the seats are {', '.join(table.seats)}")
            answers = await speak_concurrently(table, messages)

    return stepped


def by_function(function: AgentFunction, row: Mapping[str, Any], state: Any) -> Schedule:
    """Return the schedule of a function of the spec, which gets the arguments of `SCHEDULE_TAKES` that it names.

    `seats` are by name, each with `name` and `await say(words)`, which returns None if that turn was its last. The
    function runs in a separate process, or in a thread if it names `state`, which exists in this process.
    """

    async def scheduled(table: MultiAgentEpisode) -> Any:
        offered = {"seats": table.seats, "row": dict(row)}
        if "state" in function.takes:
            local_arguments = {
                "seats": {name: _SeatHere(seat) for name, seat in table.seats.items()},
                "row": row,
                "state": state,
            }
            return await run_in_thread(
                lambda: _run_schedule(function, {name: local_arguments[name] for name in function.takes})
            )
        converter = f"{answer_in_json.__module__}:answer_in_json"
        process = await POOL.hold(function.code, Code.from_ref(converter))
        try:
            arguments = {name: offered[name] for name in function.takes}
            text = await process.call(function.code, arguments, converter, SCHEDULE_SECONDS_LIMIT, require_text)
            return read_bounded(text)
        except ForeignError as error:
            raise ScheduleError(f"raised {error}") from error
        except (AgentFault, ValueError) as error:
            raise ScheduleError(str(error)) from error
        finally:
            await process.close()

    return scheduled


SCHEDULE_TAKES = ("seats", "row", "state")
"""Parameters that a schedule function may name."""


class _SeatHere(SeatStandIn):
    """A seat for a schedule that runs in a thread of the runner."""

    def __init__(self, seat: SeatRunner) -> None:
        super().__init__(0, seat.name)
        self._seat, self._loop = seat, asyncio.get_running_loop()

    async def _ask_here(self, method: str, *args: Any) -> Any:
        question = getattr(self._seat, method)(*args)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(question, self._loop))


def _run_schedule(function: AgentFunction, arguments: Mapping[str, Any]) -> Any:
    """Run a schedule in this thread; return its result as plain values."""
    scheduled = function.code.load()
    try:
        return read_bounded(answer_in_json(asyncio.run(scheduled(**arguments))))
    except (AgentFault, ValueError) as error:
        raise ScheduleError(str(error)) from error
    except BaseException as error:  # code of the spec, in a thread, where no Ctrl-C arrives
        raise ScheduleError(f"raised {place_of(error, scheduled)}") from error


async def speak_concurrently(table: MultiAgentEpisode, messages: Mapping[str, str | None]) -> dict[str, str | None]:
    """Let several seats speak concurrently and return their replies; raise the first failure."""
    texts = await asyncio.gather(*(table.seats[name].say(message) for name, message in messages.items()))
    return dict(zip(messages, texts, strict=True))


class SeatTool(DescribedTool):
    """Another seat as a tool of the first; each call continues its conversation, one after the other."""

    def __init__(self, name: str, description: str, seat: Callable[[], SeatRunner]) -> None:
        task = typed("string", "The task. Include all necessary information: the agent receives no other message.")
        super().__init__(name, description, arguments(("task",), task=task))
        self._seat = seat

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        seat = self._seat()
        try:
            answer = await seat.say(args["task"])
        except ScheduleError as error:
            raise ToolFailedError(str(error), str(error)) from error
        if answer is None:
            raise ToolFailedError(
                f"{self.name} has ended without an answer ({seat.stop_reason})", str(seat.stop_reason)
            )
        return answer
