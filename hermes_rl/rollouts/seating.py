"""Seats of a spec's episodes: who acts for each, in which order they speak, and what one hears of another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random
from typing import Any

from hermes_rl.agent.program import AgentFunction
from hermes_rl.agent.seats import (
    SCHEDULE_TAKES,
    Schedule,
    ScheduleError,
    alternating_schedule,
    by_function,
    by_state,
    calling,
    simultaneous_schedule,
)
from hermes_rl.data.rows import Row
from hermes_rl.errors import UserError
from hermes_rl.rollouts.rollout import RolloutKey, Seat, update_win_rate
from hermes_rl.spec.findings import locating
from hermes_rl.spec.model import Spec
from hermes_rl.spec.templates import TemplateError, columns_used, render_text

LEAST_CHANCE = 0.02
"""Minimum weight of an opponent that always wins or loses, relative to 0.25 for one that wins half of the time."""


class Seating:
    """Seats of a spec's episodes; `seats` is empty for a single agent.

    Raises `UserError` if the function of `schedule` cannot be loaded.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        trained = set(spec.trained_seats)
        self.seats = tuple(
            Seat(name, seat_config.server, name in trained, seat_config.baseline)
            for name, seat_config in spec.agents.items()
        )
        self._schedule_function = _schedule_function(spec)
        self.won: dict[str, tuple[float, int]] = {}
        """Sum of the first seat's scores against each opponent, and the number of episodes, in this process."""

    def seated(self, key: RolloutKey) -> list[Seat]:
        """Return the seats of an episode with the role that acts for each."""
        return [replace(seat, role=self._role_of(seat, key)) for seat in self.seats]

    def count_win(self, seats: list[Seat], score: float) -> None:
        """Count the first seat's score against the opponents among the other seats of an episode."""
        for rival in {seat.role for seat in seats if self._spec.agents[seat.name].opponents}:
            self.won[rival] = update_win_rate(self.won.get(rival), score)

    def _role_of(self, seat: Seat, key: RolloutKey) -> str:
        """Return the role that acts for a seat in an episode."""
        seat_config = self._spec.agents[seat.name]
        if not seat_config.opponents:
            return seat_config.server
        if seat_config.opponent_sampling == "latest":
            return seat_config.opponents[-1]
        chance = Random(replace(key, seat=seat.name).seed(self._spec.seed))
        if seat_config.opponent_sampling == "uniform":
            return chance.choice(seat_config.opponents)
        rates = [
            (won + 1) / (games + 2) for won, games in (self.won.get(role, (0.0, 0)) for role in seat_config.opponents)
        ]
        return chance.choices(seat_config.opponents, [max(rate * (1 - rate), LEAST_CHANCE) for rate in rates])[0]

    def heard_text(self, row: Row, listener: str, speaker: str, text: str) -> str:
        """Return the message in which one seat hears another's text."""
        template, location = self._spec.agents[listener].message_template, f"agents.{listener}.message_template"
        # it may receive several messages at once: no line of one may look like a message of another
        if len(self._spec.agents) > 2:
            template = template if "seat" in columns_used(template) else f"{{{{ seat }}}}: {template}"
            text = "\n    ".join(text.splitlines())
        try:
            values = {**row.columns, "seat": speaker, "text": text}
            return render_text(template, values, location=location, key=row.key)
        except TemplateError as error:  # caused by another seat's message, so it stops the episode and not the run
            with locating(self._spec, row.key):  # unless it fails for any message
                render_text(template, {**row.columns, "seat": speaker, "text": "words"}, location=location, key=row.key)
            raise ScheduleError(str(error)) from error

    def schedule(self, row: Row, state: Any, state_caller: Callable[[str], Callable[..., Awaitable[Any]]]) -> Schedule:
        """Return the order of speakers of an episode.

        Args:
            state: state of the rollout, or None.
            state_caller: returns a function that calls a method of the state.
        """
        play = self._spec.schedule
        assert play is not None
        if play.state is not None:
            return by_state(state_caller(play.state))
        if self._schedule_function is not None:
            return by_function(self._schedule_function, row.columns, state)
        if play.order == "call":
            return calling()
        return simultaneous_schedule(play.rounds) if play.order == "simultaneous" else alternating_schedule(play.rounds)


def seat_id(rollout: str, seat: str) -> str:
    """Return the id of a seat's requests and sandbox."""
    return f"{rollout}@{seat}"


def _schedule_function(spec: Spec) -> AgentFunction | None:
    """Load the function that decides the order of speakers, if the spec has one."""
    if spec.schedule is None or spec.schedule.fn is None:
        return None
    function = AgentFunction.from_ref(spec.schedule.fn, SCHEDULE_TAKES, "schedule.fn")
    if "state" in function.takes and spec.state_apart:
        raise UserError(
            "schedule.fn: it names `state`, which is in a process; use `schedule: {state: METHOD}`, or say "
            "`isolate: none` of the state"
        )
    return function
