"""Nim for two seats: its piles, its rules, and who has won."""

from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

SEATS = ("first", "second")


def piles(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Piles that the first player can win, with the moves of a game in which it does."""
    chance = Random(seed)
    for number in count():
        pile = chance.choice([size for size in range(5, 21) if size % 4])
        moves, left, turn = [], pile, 0
        while left:
            taken = left % 4 or chance.randint(1, min(3, left))
            moves.append({"seat": SEATS[turn % 2], "say": str(taken)})
            left, turn = left - taken, turn + 1
        yield {"id": f"{split}-{number}-{pile}", "pile": pile, "moves": moves}


class Nim:
    """One game. A move against the rules, and none, lose it."""

    def __init__(self, item: dict[str, Any]) -> None:
        self.left, self.winner = item["pile"], ""
        self.next = "first"

    def turn(self, said: dict[str, str | None] | None) -> dict[str, str] | None:
        """Make the move that was said, and say who hears what next; None where the game is over."""
        if said is None:
            return {"first": f"There are {self.left}."}
        mover, other = self.next, SEATS[self.next == "first"]
        move = (said[mover] or "").strip()
        if move not in ("1", "2", "3") or int(move) > self.left:
            self.winner = other
            return None
        self.left, self.next = self.left - int(move), other
        if not self.left:
            self.winner = mover
            return None
        return {other: f"{move} were taken, there are {self.left}."}


def won(result: Any, state: Nim) -> float:
    """1 for the seat that has won."""
    return float(state.winner == result.seat)
