"""Rows whose groups no longer differ become rare, and come back."""

from __future__ import annotations

from hermes_rl.runs.remaining import Curriculum


def passes(curriculum: Curriculum, row: str, count: int = 20) -> list[int]:
    return [epoch for epoch in range(count) if curriculum.wants(row, epoch)]


def test_uniform_rows_get_rarer_until_a_mixed_group_restores_them() -> None:
    curriculum = Curriculum(True)
    assert passes(curriculum, "r") == list(range(20))
    curriculum.count("r", True)
    assert passes(curriculum, "r") == list(range(0, 20, 2))
    curriculum.count("r", True)
    assert passes(curriculum, "r") == list(range(0, 20, 4))
    for _ in range(9):
        curriculum.count("r", True)
    assert passes(curriculum, "r") == [0, 16]
    curriculum.count("r", False)
    assert passes(curriculum, "r") == list(range(20))


def test_an_incomplete_group_says_nothing() -> None:
    curriculum = Curriculum(True)
    curriculum.count("r", None)
    assert curriculum.state() is None


def test_its_state_is_taken_up_again() -> None:
    curriculum = Curriculum(True)
    curriculum.count("r", True)
    assert passes(Curriculum(True, curriculum.state()), "r") == passes(curriculum, "r")


def test_off_it_wants_all() -> None:
    curriculum = Curriculum(False)
    curriculum.count("r", True)
    assert passes(curriculum, "r") == list(range(20))
    assert curriculum.state() is None
