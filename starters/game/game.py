"""The game, its rounds, and what a round was worth."""

from collections.abc import Iterator
from math import log2
from random import Random
from typing import Any

from hermes_rl import Score


def rounds(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield rows without end; the spec takes the first 40. Evaluation (`split` is "eval") has others than training."""
    random = Random(f"{seed}:{split}")
    while True:
        highest = random.choice([10, 50, 100])
        yield {"highest": highest, "number": random.randint(1, highest)}


class Game:
    """One round."""

    moves = ("guess",)

    def __init__(self, item: dict[str, Any]) -> None:
        self.number, self.highest = item["number"], item["highest"]
        self.guesses: list[int] = []

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        self.guesses.append(number)
        if number == self.number:
            return "that is it"
        return "it is higher" if number < self.number else "it is lower"


def found(state: Game) -> Score:
    """1 where the number was found."""
    return Score(state.number in state.guesses, reason=f"guessed {state.guesses}, it was {state.number}")


def few_guesses(state: Game) -> float:
    """1 for as many guesses as halving takes, less for more; 0 where it was not found."""
    if state.number not in state.guesses:
        return 0.0
    return min(1.0, max(1.0, log2(state.highest)) / len(state.guesses))
