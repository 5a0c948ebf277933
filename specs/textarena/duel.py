"""Load TextArena's games for two players, find winning moves of the first player, and run one as an environment."""

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

from arena import begun, told

CELLS = [f"[{number}]" for number in range(9)]
MOVES: dict[str, list[str]] = {
    "TicTacToe-v0": CELLS,
    "Nim-v0": [f"[{pile} {taken}]" for pile in range(4) for taken in range(1, 6)],
    "ConnectFour-v0": [f"[col {column}]" for column in range(7)],
    "KuhnPoker-v0": ["[check]", "[bet]", "[call]", "[fold]"],
    "Othello-v0": [f"[{row}, {column}]" for row in range(8) for column in range(8)],
    "Chopsticks-v0": [f"[attack {mine} {theirs}]" for mine in "LR" for theirs in "LR"],
    "PigDice-v0": ["[roll]", "[roll]", "[hold]"],
    "IteratedPrisonersDilemma-v0": ["[cooperate]", "[defect]", "Let us cooperate."],
    "IteratedRockPaperScissors-v0": ["[rock]", "[paper]", "[scissors]"],
    "LiarsDice-v0": [f"[bid: {number}, {face}]" for number in range(1, 5) for face in range(1, 7)] + ["[call]"],
    "Breakthrough-v0": [f"[{a}{row}{b}{row + 1}]" for a, b in ("aa", "bb", "cc", "dd", "ee") for row in range(1, 8)],
    "SimpleNegotiation-v0": ["Hello.", "[Offer: 1 Wheat -> 1 Wood]", "[Accept #1]", "[Deny #1]"],
}
"""The games, and the possible moves in each, many of which are illegal at a given moment."""
MOST = 200
"""Maximum number of moves of a random game."""
TRIES = 200
"""Games by chance that are looked through for one that the first player wins."""


def played(game: str, seed: int, chance: random.Random) -> tuple[list[dict[str, str]], float]:
    """Play a game by chance; returns the moves, and the first player's reward."""
    world, moves = begun(game, seed, players=2), []
    while True:
        player, _ = world.get_observation()
        moves.append({"seat": f"player{player}", "say": chance.choice(MOVES[game])})
        done, _ = world.step(moves[-1]["say"])
        if done or len(moves) == MOST:
            rewards, _ = world.close()
            return moves, float((rewards or {}).get(0, 0.0))


def games(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield each game with one seed after the other, and moves that win for the first player, if any were found."""
    for index in count():
        for game in MOVES:
            before, game_seed = random.getstate(), 1000 * seed + index
            chance = random.Random(f"{game}{game_seed}")
            plays = (played(game, game_seed, chance) for _ in range(TRIES))
            moves = next((moves for moves, reward in plays if reward > 0), [])
            random.setstate(before)  # it is the runner's
            yield {"id": f"{game}-{game_seed}", "game": game, "seed": game_seed, "moves": moves}


class Duel:
    """One game. It selects the player that moves next, and the messages to that player."""

    imports = ("textarena",)
    """What is loaded once, and not in each rollout's process."""

    def __init__(self, item: dict[str, Any]) -> None:
        self.game = begun(item["game"], item["seed"], players=2)
        self.rewards: dict[int, float] = {}
        self.out: set[int] = set()
        self.mover = 0

    def turn(self, replies: dict[str, str | None] | None) -> dict[str, str] | None:
        """Make the move that was said; a player who is out says nothing from then on."""
        if replies is not None:
            (reply,) = replies.values()
            if reply is None:
                self.out.add(self.mover)
            done, _ = self.game.step(reply or "")
            while not done and self.game.state.current_player_id in self.out:
                done, _ = self.game.step("")
            if done:
                self.rewards, _ = self.game.close()
                return None
        self.mover, messages = self.game.get_observation()
        return {f"player{self.mover}": told(self.game, self.mover, messages) or "Your move."}


def reward(result: Any, state: Duel) -> float:
    """Return the game's own reward for this player; 0 for a game that is not over."""
    return float(state.rewards.get(int(result.seat.removeprefix("player")), 0.0))
