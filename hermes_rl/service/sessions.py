"""POST /v1/sessions: rollouts whose turns come from the client, one request per turn."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from hermes_rl import Session, SessionTurn
from hermes_rl.errors import UserError
from hermes_rl.service.bodies import SessionRequest, StepRequest
from hermes_rl.service.refusals import Refused, wrong
from hermes_rl.service.state import Place, Service

IDLE = 900.0
"""Seconds without a step after which a session ends."""
MAX_SESSIONS = 4096
"""Maximum sessions, including sessions that have ended and were not deleted."""


class HeldSession:
    """A session of a client; `answer` is the last response to the client, and `used` its time."""

    def __init__(self, session: Session, reservation: Place) -> None:
        self.id = uuid.uuid4().hex
        self.answer: dict[str, Any] = {}
        self.used = time.monotonic()
        self.stepping = True
        """True while a turn is in progress; the first one may take longer than a session may be idle."""
        self._session, self._reservation = session, reservation

    async def start(self) -> dict[str, Any]:
        """Return the first turn."""
        try:
            return self._turn_fields(await self._session.start())
        finally:
            self.stepping = False
            self.used = time.monotonic()

    async def step(self, request: StepRequest) -> dict[str, Any]:
        """Handle the waiting turn, and return the next one, or the end of the rollout.

        Raises `Refused` if the step is wrong, or another one is in progress.
        """
        if self.stepping:
            raise Refused(409, "busy", "the previous step is still running; wait for its response")
        if (request.message is None) == (request.ids is None):
            raise wrong("step", "message", "a step has a `message` or `ids`")
        if self.answer.get("done"):
            raise wrong("ended", "session", "the rollout has ended; start another session")
        self.stepping = True
        details = {"logprobs": request.logprobs, "finish": request.finish, "version": request.version}
        try:
            if request.ids is not None:
                return self._turn_fields(await self._session.step(request.ids, **details))  # type: ignore[arg-type]
            if any(value is not None for value in details.values()):
                raise wrong("step", "logprobs", "`logprobs`, `finish` and `version` belong to `ids`")
            sent = request.message
            assert sent is not None
            message = sent if isinstance(sent, str) else sent.model_dump(exclude_none=True)
            return self._turn_fields(await self._session.step(message))
        except UserError as error:
            raise wrong("step", "ids" if request.ids is not None else "message", str(error)) from error
        finally:
            self.stepping = False
            self.used = time.monotonic()

    async def close(self) -> None:
        """End the rollout, if it has not ended, and release its resources."""
        await self._session.close()
        self._reservation.leave()

    def _turn_fields(self, turn: SessionTurn | None) -> dict[str, Any]:
        if turn is not None:
            self.answer = {
                "id": self.id,
                "messages": turn.messages,
                "tools": turn.tools,
                "max_tokens": turn.max_tokens,
                "prompt_ids": turn.prompt_ids,
                "stop_ids": list(turn.stop_ids),
                **({"seat": turn.seat} if turn.seat else {}),
            }
            return self.answer
        rollout = self._session.rollout
        assert rollout is not None, "a session without a turn has ended"
        self._reservation.leave()
        self.answer = {
            "id": self.id,
            "messages": rollout.messages,
            "done": True,
            "score": rollout.score,
            "stop_reason": str(rollout.stop_reason),
            "error": rollout.error,
        }
        if rollout.seat.name:
            self.answer["seats"] = {
                seat.seat.name: {"score": seat.score, "stop_reason": str(seat.stop_reason), "messages": seat.messages}
                for seat in rollout.seats
            }
        return self.answer


class Sessions:
    """Sessions of one service; one without a step for `idle` seconds ends."""

    def __init__(self, service: Service, idle: float = IDLE) -> None:
        self._service, self._idle = service, idle
        self._sessions: dict[str, HeldSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    async def start(self, request: SessionRequest) -> dict[str, Any]:
        """Start a session, and return its first turn; raises `Refused` if there is no room, or something is wrong."""
        service = self._service
        (row,) = service.require_rows([request.row], request.split, "row")
        if len(self._sessions) >= MAX_SESSIONS:
            raise Refused(429, "too_many", f"{MAX_SESSIONS} sessions are held: delete ended sessions")
        options = {"split": request.split, "sampling": request.sampling, "tokenizer": request.tokenizer}
        with service.make_reservation() as reservation:
            reservation.take(1)
            try:
                session = await service.env.session(row, **options)  # type: ignore[arg-type]
            except UserError as error:
                field = "tokenizer" if request.tokenizer is not None else "sampling" if request.sampling else "row"
                raise wrong("session", field, str(error)) from error
        entry = HeldSession(session, reservation)
        self._sessions[entry.id] = entry
        try:
            return await entry.start()
        except BaseException as error:
            self._sessions.pop(entry.id, None)
            await entry.close()
            if isinstance(error, UserError):
                raise wrong("session", "row", str(error)) from error
            raise

    def get_session(self, session_id: str) -> HeldSession:
        """Return a session by its id; raises `Refused` if it does not exist."""
        if session_id not in self._sessions:
            raise Refused(
                404,
                "no_session",
                f"there is no such session: it was ended, or not stepped for {self._idle:.0f} seconds",
            )
        return self._sessions[session_id]

    async def step(self, session_id: str, request: StepRequest) -> dict[str, Any]:
        """See `HeldSession.step`."""
        session = self.get_session(session_id)
        try:
            return await session.step(request)
        except asyncio.CancelledError:
            if session_id in self._sessions:
                raise
            raise Refused(404, "no_session", "the session ended during the step") from None

    async def end(self, session_id: str) -> None:
        """End a session; raises `Refused` if it does not exist."""
        session = self.get_session(session_id)
        del self._sessions[session_id]
        await session.close()

    async def end_idle(self) -> None:
        """End the sessions without steps, while this runs."""
        while True:
            await asyncio.sleep(min(self._idle / 4, 5.0))
            late = time.monotonic() - self._idle
            for session_id in [
                session.id for session in self._sessions.values() if session.used < late and not session.stepping
            ]:
                if session_id in self._sessions:
                    await self.end(session_id)

    async def close(self) -> None:
        """End all of them."""
        for session_id in list(self._sessions):
            await self.end(session_id)
