"""What the trainer has is known from the order of what was sent, also after crashes in between."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.env.place import Place
from hermes_rl.runs.journal import Journal


def opened(folder: Path) -> Place:
    return Place(Journal(folder / "place.jsonl"))


def send(place: Place, *groups: str) -> None:
    for group in groups:
        place.sending(group)
        place.arrived(group)


def reopened(place: Place) -> Place:
    place.journal.close()
    return Place(Journal(place.journal.path))


def test_what_the_trainer_had_not_received_by_its_step_is_lost_with_the_api(tmp_path: Path) -> None:
    place = opened(tmp_path)
    place.mark(0, 0, {})
    send(place, "a", "b", "c")
    place.mark(1, 1, {"curriculum": 7})
    send(place, "d")
    place.mark(2, 0, {})
    send(place, "e", "f")
    place = reopened(place)
    assert place.queue_was_lost(1, 0), "steps of an API never fall"
    assert place.at(1).state == {"curriculum": 7}
    assert place.go_back(1) == ["c", "d", "e", "f"]
    send(place, "c")
    place = reopened(place)
    assert (place.sent, [mark.step for mark in place.marks]) == (["a", "b", "c"], [0, 1])
    place.journal.close()


def test_a_queue_that_is_still_there_is_not_sent_again(tmp_path: Path) -> None:
    place = opened(tmp_path)
    place.mark(3, 0, {})
    send(place, "a", "b")
    assert not place.queue_was_lost(3, 2)
    assert not place.queue_was_lost(4, 0), "the trainer took them meanwhile"
    assert place.queue_was_lost(3, 0)
    assert place.queue_was_lost(3, None), "the API does not know the environment"
    place.journal.close()


def test_a_group_that_was_under_way_is_in_doubt_until_the_environment_is_registered(tmp_path: Path) -> None:
    place = opened(tmp_path)
    send(place, "a")
    place.sending("b")
    place = reopened(place)
    assert (place.sent, place.doubtful) == (["a"], ["b"])
    place.registered(4)
    place = reopened(place)
    assert (place.doubtful, place.env_id) == ([], 4)
    place.journal.close()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=12), st.integers(0, 14))
def test_going_back_leaves_what_was_received_and_returns_the_rest(plays: list[tuple[int, int]], step: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        place = opened(Path(folder))
        number = 0
        for at, (sent, queued) in enumerate(plays):
            send(place, *map(str, range(number, number + sent)))
            number += sent
            place.mark(at, min(queued, number - (place.marks[-1].gone if place.marks else 0)), {})
        gone = place.at(step).gone
        everything = list(place.sent)
        assert place.go_back(step) == everything[gone:]
        assert reopened(place).sent == everything[:gone]
