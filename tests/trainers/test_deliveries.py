"""What a trainer has is known from the record of what was sent, also after crashes in between."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.runs.deliveries import DeliveryLog, content_of
from hermes_rl.runs.journal import Journal
from hermes_rl.trainers.atropos import queue_was_lost


def opened(folder: Path, trainer: str = "one") -> DeliveryLog:
    return DeliveryLog(Journal(folder / "deliveries.jsonl"), trainer)


def send(log: DeliveryLog, *groups: str) -> None:
    for group in groups:
        log.sending(group)
        log.has(group)


def reopened(log: DeliveryLog, folder: Path) -> DeliveryLog:
    log.close()
    return opened(folder, log.trainer)


def test_what_the_trainer_had_not_taken_by_its_step_is_lost_with_the_queue(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.step(0, 0, {})
    send(log, "a", "b", "c")
    log.step(1, 1, {"curriculum": 7})
    send(log, "d")
    log.step(2, 0, {})
    send(log, "e", "f")
    log = reopened(log, tmp_path)
    assert queue_was_lost(log, 1, 0), "steps of an API never fall"
    assert log.mark_at(1).state == {"curriculum": 7}
    log.record_loss(log.delivered[log.mark_at(1).groups_taken :])
    assert not log.is_resolved("c")
    send(log, "c")
    log = reopened(log, tmp_path)
    assert (log.delivered, [mark.step for mark in log.marks]) == (["a", "b", "c"], [0, 1])
    log.close()


def test_a_queue_that_is_still_there_is_not_sent_again(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.step(3, 0, {})
    send(log, "a", "b")
    assert not queue_was_lost(log, 3, 2)
    assert not queue_was_lost(log, 4, 0), "the trainer took them meanwhile"
    assert queue_was_lost(log, 3, 0)
    assert queue_was_lost(log, 3, None), "the API does not know the environment"
    log.close()


def test_group_in_flight_is_doubtful_until_the_environment_registers(tmp_path: Path) -> None:
    log = opened(tmp_path)
    send(log, "a")
    log.sending("b")
    log = reopened(log, tmp_path)
    assert (log.delivered, log.doubtful) == (["a"], ["b"])
    log.registered(4)
    log = reopened(log, tmp_path)
    assert (log.doubtful, log.session) == ([], 4)
    assert not log.is_resolved("b")
    log.close()


def test_doubtful_group_is_identified_by_content_unless_it_is_repeated(tmp_path: Path) -> None:
    log = opened(tmp_path)
    same, other = content_of([[1, 2], [3]], [0.0, 1.0]), content_of([[1], [2, 3]], [0.0, 1.0])
    assert same != other
    for group, content in (("a", same), ("b", other)):
        log.sending(group, content)
        log.has(group)
    log.sending("c", same)
    assert reopened(log, tmp_path).content_in_doubt == same
    log = opened(tmp_path)
    log.has("c")
    log.sending("d", same)
    assert reopened(log, tmp_path).content_in_doubt is None


def test_another_trainer_has_nothing_yet(tmp_path: Path) -> None:
    log = opened(tmp_path)
    send(log, "a")
    log.exclude("b", "stale")
    assert (log.is_resolved("a"), log.is_resolved("b")) == (True, True)
    log.close()
    other = opened(tmp_path, "two")
    assert (other.is_resolved("a"), other.is_resolved("b"), other.session) == (False, False, None)
    other.close()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=12), st.integers(0, 14))
def test_losing_the_end_leaves_what_was_taken(plays: list[tuple[int, int]], step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = opened(Path(folder))
        number = 0
        for at, (sent, queued) in enumerate(plays):
            send(log, *map(str, range(number, number + sent)))
            number += sent
            log.step(at, min(queued, number - (log.marks[-1].groups_taken if log.marks else 0)), {})
        taken, everything = log.mark_at(step).groups_taken, list(log.delivered)
        log.record_loss(everything[taken:])
        again = reopened(log, Path(folder))
        assert again.delivered == everything[:taken]
        again.close()
