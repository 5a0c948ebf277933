"""Environments that feed one trainer take turns by their shares."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hermes_rl.trainers.serving import SharedTrainer


@dataclass
class Feeding:
    """An environment that has started and not ended so many sequences."""

    weight: float
    size: int = 4
    started_sequences: int = 0
    pending: int = 0
    looked: float = 0.0
    can_start: bool = True
    room: bool = True
    full: bool = False
    woken: int = 0

    def wake(self) -> None:
        self.woken += 1

    def begin(self) -> None:
        self.started_sequences += self.size


def together(*feeding: Feeding) -> SharedTrainer:
    made = SharedTrainer(len(feeding))
    made.feeding += feeding
    return made


@pytest.mark.parametrize(("weights", "sizes"), [((3, 1), (4, 4)), ((3, 1), (4, 8)), ((1, 2.5, 0.5), (4, 4, 16))])
def test_started_rollouts_follow_the_weights_at_every_moment(
    weights: tuple[float, ...], sizes: tuple[int, ...]
) -> None:
    all_of_them = [Feeding(weight, size) for weight, size in zip(weights, sizes, strict=True)]
    turns = together(*all_of_them)
    for number in range(400):
        # They ask in any order; some environment always has its turn.
        order = all_of_them[number % len(sizes) :] + all_of_them[: number % len(sizes)]
        next(one for one in order if turns.turn(one)).begin()
        used = [one.started_sequences / one.weight for one in all_of_them]
        assert max(used) - min(used) <= max(one.size / one.weight for one in all_of_them)


def test_blocked_environment_does_not_block_others_and_catches_up() -> None:
    fast, slow = Feeding(1), Feeding(1, can_start=False)
    turns = together(fast, slow)
    for _ in range(10):
        assert turns.turn(fast)
        fast.begin()
    slow.can_start = True
    assert turns.turn(slow) and not turns.turn(fast)


def test_weights_hold_where_each_may_have_two_groups_in_flight() -> None:
    heavy, light = Feeding(3), Feeding(1)
    turns = together(heavy, light)
    in_flight: list[Feeding] = []
    for _ in range(200):
        for one in (light, heavy):
            one.full = in_flight.count(one) >= 2
            one.can_start = not one.full
        beginning = [one for one in (light, heavy) if one.can_start and turns.turn(one)]
        for one in beginning[:1]:
            one.begin()
            in_flight.append(one)
        if not beginning:
            in_flight.pop(0)  # all take as long: the oldest ends
        assert heavy.started_sequences + heavy.size >= 3 * (light.started_sequences - light.size)
    assert light.started_sequences >= 4 * 20 and abs(heavy.started_sequences - 3 * light.started_sequences) <= 3 * 4


def test_lagging_environment_that_has_not_polled_is_waited_for() -> None:
    ahead, behind = Feeding(1, started_sequences=4, looked=2.0), Feeding(1, room=False, looked=1.0)
    turns = together(ahead, behind)
    assert not turns.turn(ahead), "it would find the same room"
    behind.looked = 3.0
    assert turns.turn(ahead), "it has looked, and found none"


def test_one_without_a_share_has_no_turns() -> None:
    outside, inside = Feeding(-1, started_sequences=400), Feeding(1)
    turns = together(outside, inside)
    assert turns.turn(outside) and turns.turn(inside)
    inside.begin()
    outside.started_sequences = 0
    assert turns.turn(inside)


def test_one_that_has_ended_takes_no_room_and_no_turn() -> None:
    first, second = Feeding(1, started_sequences=8), Feeding(1, pending=4)
    turns = together(first, second)
    assert not turns.turn(first)
    turns.leave(second)
    turns.leave(second)
    assert turns.turn(first) and turns.pending == 0 and first.woken == 1


def test_in_flight_count_includes_all_environments() -> None:
    first, second = Feeding(1, pending=8), Feeding(1, pending=4)
    turns = together(first, second)
    assert turns.in_flight(sent_at_poll=0) == 12


def test_sent_group_counts_until_a_poll_that_starts_after_its_arrival() -> None:
    first, second = Feeding(1, pending=8), Feeding(1, pending=4)
    turns = together(first, second)
    before = turns.sent
    first.pending, turns.sent = 4, turns.sent + 4
    assert turns.in_flight(sent_at_poll=before) == 12, "the look may have missed it"
    assert turns.in_flight(sent_at_poll=turns.sent) == 8
