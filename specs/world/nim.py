"""Nim for two seats: its piles, its rules, and its winner."""

from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

SEATS = ("first", "second")


def piles(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield piles that the first player can win, with the moves of a game in which it does."""
    chance = Random(seed)
    for index in count():
        pile = chance.choice([size for size in range(5, 21) if size % 4])
        moves, remaining, turn = [], pile, 0
        while remaining:
            amount = remaining % 4 or chance.randint(1, min(3, remaining))
            moves.append({"seat": SEATS[turn % 2], "say": str(amount)})
            remaining, turn = remaining - amount, turn + 1
        yield {"id": f"{split}-{index}-{pile}", "pile": pile, "moves": moves}


class Nim:
    """One game. A move against the rules, and none, lose it."""

    def __init__(self, item: dict[str, Any]) -> None:
        self.left, self.winner = item["pile"], ""
        self.next = "first"

    def turn(self, replies: dict[str, str | None] | None) -> dict[str, str] | None:
        """Make the seat's move, and return the messages to the next seat, or None if the game is over."""
        if replies is None:
            return {"first": f"There are {self.left}."}
        mover, other = self.next, SEATS[self.next == "first"]
        move = (replies[mover] or "").strip()
        if move not in ("1", "2", "3") or int(move) > self.left:
            self.winner = other
            return None
        self.left, self.next = self.left - int(move), other
        if not self.left:
            self.winner = mover
            return None
        return {other: f"{move} were taken, there are {self.left}."}


def won(result: Any, state: Nim) -> float:
    """Return 1 for the seat that has won."""
    return float(state.winner == result.seat)
