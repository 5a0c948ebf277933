"""Several agents in one episode: each seat has a conversation of its own, and a schedule says who speaks when.

A seat is played as a single agent is. By the loop: what the schedule tells it, it hears as the words of its user, and
its answer without tool calls is what it says. Or by a program, which is run for each of its turns: its last answer is
what the seat says. So no schedule can touch what was sampled: seats record below it. The schedules are `alternate`,
`simultaneous`, `call` (the other seats are tools of the first), a method of the state, or a function of the spec's own
in a process of its own. Whoever decides that it is over ends all seats that are still in; a seat that its own doing has
ended is out.
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
from hermes_rl.endings import Ending
from hermes_rl.errors import AgentFault, Failure, SandboxFailure, UserError
from hermes_rl.foreign.failures import EndedError, ForeignError
from hermes_rl.foreign.messages import require_text
from hermes_rl.foreign.pool import POOL
from hermes_rl.foreign.stand_ins import SeatStandIn, lives_in_runner
from hermes_rl.plugins import Code, place_of
from hermes_rl.threads import end_tasks, in_thread
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.tools.base import DescribedTool, ToolFailedError, Toolkit, ToolRuntime, arguments, capped, typed
from hermes_rl.tools.rollout_process import answer_in_json
from hermes_rl.values import read_bounded

LONGEST = 36_000.0
"""Seconds that a schedule may last, the seats' turns included; `Table.patience` bounds what it takes itself."""
GLANCE = 0.5
"""Seconds between two looks at a schedule that nobody speaks for."""


class ScheduleError(Exception):
    """The schedule has raised, takes too long, or asks for what no seat can do; the text says which."""


@lives_in_runner("hermes_rl.foreign.stand_ins:SeatStandIn")
class SeatPlayer:
    """Plays one seat; it is the user of its own loop.

    Args:
        name: of the seat.
        server: who plays it.
        messages: the prompt.
        options: its bounds and sampling.
        toolkit: the tools that it has.
        runtime: the machine that they act on, which several seats may share.
        request_id: names its requests, so that a server that plays several seats keeps them apart.
        tokenizer: estimates the tokens of what a chat server has not counted yet.
        user: whom it talks to, from when the schedule lets it begin until that ends the conversation, instead of to
            the others; these may be its tools.
        program: what plays it instead of the loop.
        port: of the sandbox, where such a program finds the model.
    """

    opens = True

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
        self.beside: Mapping[str, SeatPlayer] = {}
        """All seats of the episode, by name."""
        self._played: AgentResult | None = None
        self._turn = asyncio.Lock()
        self._heard: asyncio.Queue[UserAnswer] = asyncio.Queue()
        self._answer: asyncio.Future[str | None] | None = None
        self._playing: asyncio.Task[AgentResult] | None = None
        self._refused: UserError | None = None

    # ------------------------------------------------------------------ as its loop sees it (`AnswersAgent`)

    def begin(self, result: AgentResult, seed: int | None = None) -> None:
        """Let the user take over the conversation; what the other seats say comes later."""
        self._played = result
        if self._user is not None:
            self._user.begin(result, seed)

    @property
    def waits_for_seats(self) -> bool:
        """Whether it is other seats that it waits for, and not its user."""
        return self._user is None

    async def speak(self, words: str | None = None) -> UserAnswer:
        """Hand on what the seat has said, and wait for what it hears next."""
        if words is not None and self._user is not None:
            return await self._user.speak(words)
        if words is None and self._user is not None and self._user.opens:
            return await self._user.speak()
        if words is not None and self._answer is not None:
            await self._end_processes()
            self._answer.set_result(words)
        return await self._heard.get()

    async def _end_processes(self) -> None:
        """End what the seat has left running in a sandbox that it shares, unless another one is at work there."""
        others = [seat for seat in self.beside.values() if seat is not self and seat.runtime is self.runtime]
        if others and not any(seat.speaking for seat in others):
            await self.runtime.settle(over=False)

    # ------------------------------------------------------------------ as a schedule sees it

    @property
    def out(self) -> Ending | None:
        """The ending by which the seat has left the episode; None while it is in."""
        if self._playing is None or not self._playing.done():
            return None
        return self._playing.result().ending

    @property
    def has_spoken(self) -> bool:
        """Whether its policy has answered yet."""
        return self._played is not None and self._played.turns_used > 0

    @property
    def failure(self) -> Failure | UserError | None:
        """What of infrastructure, or of the spec, has ended its conversation; None where nothing has."""
        if self._refused is not None:
            return self._refused
        playing = self._playing
        error = playing.exception() if playing is not None and playing.done() and not playing.cancelled() else None
        return error if isinstance(error, Failure | UserError) else None

    @property
    def result(self) -> AgentResult | None:
        """What it has played; before its first turn the prompt alone. None where it was ended in the middle."""
        if self._playing is None:
            return AgentResult(
                messages=[dict(message) for message in self._messages],
                prompt_length=len(self._messages),
                tool_schemas=self.toolkit.schemas,
                ending=Ending.WORLD_OVER,
                finished_naturally=True,
                max_trajectory_tokens=self.options.max_trajectory_tokens,
            )
        if self._playing.cancelled() or self._playing.exception() is not None:
            return self.failure.result if isinstance(self.failure, Failure) else None
        return self._playing.result()

    async def say(self, words: str | None = None) -> str | None:
        """Let the seat hear words and return what it says to them; one call after the other.

        Args:
            words: None lets it speak to its prompt as it is.

        Returns:
            its text; None where this turn was its last, as it ran out of turns, was cut, or ended the episode.

        Raises:
            ScheduleError: it is out already.
            Failure: infrastructure failed.
            UserError: a program that plays it cannot be started, or it would be asked without a user message.
        """
        await self._turn.acquire()
        try:
            if self.out is not None:
                raise ScheduleError(f"asks {self.name!r}, which is out ({self.out})")
            if not isinstance(words, str | None):
                raise ScheduleError(f"says to {self.name!r} what is no text, but {type(words).__name__}")
            if words is None and self._playing is None and not self._has_question:
                self._refused = UserError(
                    f"agents.{self.name}: the schedule lets this seat speak first, and it would be asked without a "
                    "user message: give its prompt a `user`, or let the schedule say something to it"
                )
                raise self._refused
        except BaseException:  # nobody is to answer, so that nobody else would give the turn back
            self._turn.release()
            raise
        self._answer = asyncio.get_running_loop().create_future()
        self._answer.add_done_callback(self._spoken)
        message = None if words is None else {"role": "user", "content": words}
        by_agents = message is not None and any(seat.has_spoken for seat in self.beside.values())
        self._heard.put_nowait(UserAnswer(message, by_agents=by_agents))
        if self._playing is None:
            self._playing = asyncio.create_task(self._play())
            self._playing.add_done_callback(self._ended)
        # Who is cancelled while it speaks, as a tool call whose time is up, does not take its answer for the next one.
        return await asyncio.shield(self._answer)

    @property
    def _has_question(self) -> bool:
        """Whether it can be asked before it has heard anything; chat templates refuse prompts without a user."""
        answers = self._user is not None or self._program is not None
        return answers or any(message["role"] != "system" for message in self._messages)

    @property
    def speaking(self) -> bool:
        """Whether it has heard words that it has not answered yet."""
        return self._turn.locked()

    def _spoken(self, answer: asyncio.Future[str | None]) -> None:
        self.spoke_last = time.monotonic()
        self._turn.release()
        if not answer.cancelled():
            answer.exception()  # who had asked may not wait for it any more

    def _ended(self, playing: asyncio.Task[AgentResult]) -> None:
        """Let whoever waits for its words know that none will come."""
        if self._answer is None or self._answer.done():
            return
        if playing.cancelled():
            self._answer.cancel()
        elif (error := playing.exception()) is not None:
            self._answer.set_exception(error)
        else:
            self._answer.set_result(None)

    async def said(self, words: str | None = None) -> dict[str, Any]:
        """Answer for `SeatStandIn.say`: the `text`, or the `problem` with asking."""
        try:
            return {"text": await self.say(words)}
        except (ScheduleError, Failure, UserError) as error:
            return {"problem": str(error)}

    def stand_in_fields(self) -> dict[str, Any]:
        """Return what a stand-in knows without asking."""
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
        """End its conversation; `problem`: the schedule has failed, `now`: in the middle of a turn."""
        playing = self._playing
        if playing is not None and not playing.done():
            if now:
                playing.cancel()
            else:
                ending = Ending.WORLD_OVER if problem is None else Ending.WORLD_FAILED
                self._heard.put_nowait(UserAnswer(None, ending, error=problem))
        if playing is not None:
            await asyncio.gather(playing, return_exceptions=True)


class Table:
    """The seats of one episode.

    Args:
        seats: who plays, in the order of the spec.
        hears: what a seat hears where another one has said something: (listener, speaker, text) → words.
        patience: seconds that a schedule may take between two turns.
    """

    def __init__(self, seats: Sequence[SeatPlayer], hears: Callable[[str, str, str], str], patience: float) -> None:
        self.seats = {seat.name: seat for seat in seats}
        self.hears, self.patience = hears, patience
        for seat in seats:
            seat.beside = self.seats

    async def play(self, schedule: Schedule) -> Any:
        """Let the seats speak as the schedule says, until it is over; returns what the schedule returns. Raises
        `Failure` where infrastructure failed, or the schedule before any seat had said anything, which no policy
        caused; what was played so far is the seats' `result`."""
        work = asyncio.ensure_future(schedule(self))
        outcome = problem = None
        whole = False
        try:
            await self._until_over(work)
            outcome, whole = work.result(), True
        except (ScheduleError, ToolFailedError, EndedError) as error:
            problem, whole = getattr(error, "detail", str(error)), True
        finally:
            for seat in self.seats.values():
                await seat.leave(problem=problem, now=not whole or self._failure is not None)
            # Behind the seats: what asks them from another process waits for them.
            await end_tasks([work])
            if self._failure is not None:
                raise self._failure
        if problem is not None and not any(seat.result and seat.result.turns_used for seat in self.seats.values()):
            raise SandboxFailure(f"play: the schedule {problem}")
        return outcome

    async def _until_over(self, work: asyncio.Future[Any]) -> None:
        """Wait until the schedule has ended; raises `ScheduleError` where nobody has spoken for too long."""
        began = time.monotonic()
        while not work.done():
            await asyncio.wait({work}, timeout=GLANCE)
            seats = self.seats.values()
            silent_since = max(began, *(seat.spoke_last for seat in seats))
            speaks = any(seat.speaking for seat in seats)
            if not work.done() and not speaks and time.monotonic() - silent_since > self.patience:
                raise ScheduleError(f"has let nobody speak for {self.patience:g} s")

    @property
    def _failure(self) -> Failure | UserError | None:
        """What of infrastructure, or of the spec, has failed one of the seats."""
        return next((seat.failure for seat in self.seats.values() if seat.failure is not None), None)


Schedule = Callable[[Table], Awaitable[Any]]
"""Says who speaks when; returns what the episode came to, None where nobody says."""


def in_turns(rounds: int | None) -> Schedule:
    """Return the schedule in which the seats speak one after the other, so many rounds; None: until one is out.

    Each hears what the others have said since it spoke last.
    """

    async def alternate(table: Table) -> None:
        unheard: dict[str, list[str]] = {name: [] for name in table.seats}
        for _ in range(rounds) if rounds is not None else count():
            for name, seat in table.seats.items():
                words, unheard[name] = "\n\n".join(unheard[name]) or None, []
                answer = await seat.say(words)
                if answer is None:
                    return
                for other, heard in unheard.items():
                    heard += [table.hears(other, name, answer)] if other != name else []

    return alternate


def at_once(rounds: int | None) -> Schedule:
    """Return the schedule in which all seats speak at the same time, and then hear what the others have said."""

    async def simultaneous(table: Table) -> None:
        words: dict[str, str | None] = dict.fromkeys(table.seats)
        for _ in range(rounds) if rounds is not None else count():
            answers = await together(table, words)
            if None in answers.values():
                return
            for name in table.seats:
                heard = [table.hears(name, other, str(text)) for other, text in answers.items() if other != name]
                words[name] = "\n\n".join(heard)

    return simultaneous


def calling() -> Schedule:
    """Return the schedule in which the first seat alone is asked; the others are its tools (`SeatTool`)."""

    async def call(table: Table) -> None:
        await next(iter(table.seats.values())).say()

    return call


def by_state(ask: Callable[[Mapping[str, str | None] | None], Awaitable[Any]]) -> Schedule:
    """Return the schedule of a method of the state.

    It gets what those have said that it has let speak, by seat, with None for one that is out now; and None at first.
    It returns what those hear who speak next, by seat (None: nothing); null or {} where it is over.
    """

    async def stepped(table: Table) -> None:
        answers: Mapping[str, str | None] | None = None
        while words := await ask(answers):
            if not isinstance(words, dict) or any(not isinstance(text, str | None) for text in words.values()):
                raise ScheduleError(f"has to answer with texts by seat, or null, not {capped(repr(words), 200)}")
            unknown = [name for name in words if name not in table.seats]
            if unknown:
                raise ScheduleError(f"lets {unknown[0]!r} speak; the seats are {', '.join(table.seats)}")
            answers = await together(table, words)

    return stepped


def by_function(function: AgentFunction, row: Mapping[str, Any], state: Any) -> Schedule:
    """Return the schedule of a function of the spec, which takes those of `SCHEDULE_TAKES` that it names.

    `seats` are by name, each with `name` and `await say(words)`, which returns None where that turn was its last. The
    function runs in a process of its own; where it names `state`, which lives here, in a thread.
    """

    async def scheduled(table: Table) -> Any:
        offered = {"seats": table.seats, "row": dict(row)}
        if "state" in function.takes:
            here = {"seats": {name: _SeatHere(seat) for name, seat in table.seats.items()}, "row": row, "state": state}
            return await in_thread(lambda: _run(function, {name: here[name] for name in function.takes}))
        plain = f"{answer_in_json.__module__}:answer_in_json"
        process = await POOL.hold(function.code, Code.of(plain))
        try:
            arguments = {name: offered[name] for name in function.takes}
            text = await process.call(function.code, arguments, plain, LONGEST, require_text)
            return read_bounded(text)
        except ForeignError as error:
            raise ScheduleError(f"raised {error}") from error
        except (AgentFault, ValueError) as error:
            raise ScheduleError(str(error)) from error
        finally:
            await process.close()

    return scheduled


SCHEDULE_TAKES = ("seats", "row", "state")
"""What a function that is a schedule may name as parameters."""


class _SeatHere(SeatStandIn):
    """A seat, for a schedule in a thread of the runner."""

    def __init__(self, seat: SeatPlayer) -> None:
        super().__init__(0, seat.name)
        self._seat, self._loop = seat, asyncio.get_running_loop()

    async def _ask_here(self, method: str, *args: Any) -> Any:
        question = getattr(self._seat, method)(*args)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(question, self._loop))


def _run(function: AgentFunction, arguments: Mapping[str, Any]) -> Any:
    """Run a schedule in this thread; returns what it returns as plain values."""
    scheduled = function.code.load()
    try:
        return read_bounded(answer_in_json(asyncio.run(scheduled(**arguments))))
    except (AgentFault, ValueError) as error:
        raise ScheduleError(str(error)) from error
    except BaseException as error:  # the spec's own code, in a thread, where no Ctrl-C arrives
        raise ScheduleError(f"raised {place_of(error, scheduled)}") from error


async def together(table: Table, words: Mapping[str, str | None]) -> dict[str, str | None]:
    """Let several seats speak at the same time; returns what each has said. The first failure is raised."""
    texts = await asyncio.gather(*(table.seats[name].say(heard) for name, heard in words.items()))
    return dict(zip(words, texts, strict=True))


class SeatTool(DescribedTool):
    """Another seat as a tool of the first: its conversation goes on with each call, one after the other."""

    def __init__(self, name: str, description: str, seat: Callable[[], SeatPlayer]) -> None:
        task = typed("string", "What it is to do: all that it needs to know, since it hears nothing else.")
        super().__init__(name, description, arguments(("task",), task=task))
        self._seat = seat

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        seat = self._seat()
        try:
            answer = await seat.say(args["task"])
        except ScheduleError as error:
            raise ToolFailedError(str(error), str(error)) from error
        if answer is None:
            raise ToolFailedError(f"{self.name} has ended without an answer ({seat.out})", str(seat.out))
        return answer
