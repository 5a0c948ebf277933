"""Nim between two seats of one policy, or against a rival who moves by chance, and how the policy first plays it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

SEATS = ("first", "second")
LARGEST = 8
BOOK = random.Random(3).choices("1234", k=LARGEST + 1)
"""The move that the policy first knows for each pile; it has been drawn by chance, and is often against the rules."""


def piles(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield rows of the self-play."""
    chance = random.Random(f"{split}{seed}")
    while True:
        yield {"pile": chance.randint(1, LARGEST), "chance": chance.random()}


def winnable(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield rows with piles of some size from which whoever begins can win."""
    for row in piles(seed=seed, split=split):
        if row["pile"] > 3 and row["pile"] % 3:
            yield row


class Nim:
    """One or two are taken in turn; whoever takes the last one wins, and a move against the rules loses."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        self.left, self.next = item["pile"], "first"
        self.winner: str | None = None
        self.chance = random.Random(item["chance"])

    def _move(self, seat: str, said: str | None, other: str) -> None:
        move = (said or "").strip()
        if move not in ("1", "2") or int(move) > self.left:
            self.winner = other
        else:
            self.left -= int(move)
            self.winner = None if self.left else seat

    def turn(self, said: Mapping[str, str | None] | None) -> dict[str, str] | None:
        """Take the move of the seat that was asked, and let the other one hear what is left."""
        if said is not None:
            other = SEATS[self.next == "first"]
            self._move(self.next, said[self.next], other)
            self.next = other
        return None if self.winner else {self.next: str(self.left)}

    def rival(self, said: str | None) -> dict[str, Any]:
        """Take the move of the only agent, and that of the rival behind it."""
        if said is not None:
            self._move("first", said, "second")
            if self.winner is None:
                self._move("second", str(self.chance.randint(1, min(2, self.left))), "first")
        return {"say": str(self.left), "done": self.winner is not None}


def won(result: Any, state: Nim) -> float:
    """Pay the seat that has won."""
    return float(state.winner == (result.seat or "first"))


def badly_played(chance: random.Random, _: float) -> list[dict[str, Any]]:
    """Return the messages of a game in which half of the moves are those of the book, and the others by chance."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Nim"}]
    left = chance.randint(1, LARGEST)
    while left > 0:
        move = BOOK[left] if chance.random() < 0.5 else chance.choice("12")
        messages += [{"role": "user", "content": str(left)}, {"role": "assistant", "content": move}]
        left -= int(move) + chance.randint(1, 2)
    return messages


SELF_PLAY = """
name: nim
dataset: {generator: "nim.py:piles"}
prompt: {system: Nim}
state: nim.py:Nim
agents: {first: {baseline: row}, second: {baseline: row}}
schedule: {state: turn}
agent: {max_turns: 12, max_tokens: 4}
rewards: {won: {fn: "nim.py:won"}}
"""
RIVAL = SELF_PLAY.replace("piles", "winnable").replace(
    """agents: {first: {baseline: row}, second: {baseline: row}}
schedule: {state: turn}""",
    "user: {state: rival, speaks_first: true}",
)
