"""Load TextArena's games for one player, solve four of them, and run one as the user that replies to an agent."""

import random
from collections import deque
from collections.abc import Iterator
from itertools import count, permutations
from typing import Any

from hermes_rl import UserError
from hermes_rl.errors import install_command

GAMES = (
    *("GuessTheNumber-v0", "FrozenLake-v0", "TowerOfHanoi-v0", "Mastermind-v0"),  # these have a solution
    *("2048-v0-very-easy", "Bandit-v0", "Blackjack-v0", "FifteenPuzzle-v0"),
    *("LightsOut-v0", "LogicPuzzle-v0", "Minesweeper-v0", "PegJump-v0", "RushHour-v0", "Secretary-v0", "Set-v0"),
    "Sudoku-v0-easy",
)
"""Countdown, Cryptarithm, Slitherlink and ThreeCardMonte are excluded: they raise on a malformed move."""


def begun(game: str, seed: int, players: int = 1) -> Any:
    """Return a game that waits for its first move."""
    try:
        import textarena
    except ImportError as error:
        raise UserError(f"TextArena is not installed: {install_command('textarena')}") from error
    environment = textarena.make(f"{game}-raw")
    for wrapper in _default_wrappers(game):
        if issubclass(wrapper, textarena.ActionWrapper):  # it puts a move in brackets, or cuts it
            environment = wrapper(environment)
    environment.reset(num_players=players, seed=seed)
    return environment


def _default_wrappers(game: str) -> list[type]:
    from textarena.envs.registration import ENV_REGISTRY

    return ENV_REGISTRY[game].default_wrappers or []


def told(game: Any, player: int, messages: list[tuple[int, str, Any]]) -> str:
    """Return the new messages to a player, as the original's wrapper shows them, without the player's own moves."""
    from textarena.wrappers import LLMObservationWrapper

    # Others hide what players say, and the game describes their moves.
    shows_moves = LLMObservationWrapper in _default_wrappers(game.env_id.removesuffix("-raw"))
    texts = []
    for sender, text, kind in messages:
        if str(getattr(kind, "name", kind)) != "PLAYER_ACTION":
            texts.append(text)
        elif sender != player and shows_moves:
            texts.append(f"[{game.state.role_mapping.get(sender, f'Player {sender}')}] {text}")
    return "\n".join(texts).strip()


def games(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield each game with one seed after the other, and the moves that win it if there is a solver."""
    for index in count():
        for game in GAMES:
            before, game_seed = random.getstate(), 1000 * seed + index
            moves = SOLVERS[game](begun(game, game_seed)) if game in SOLVERS else []
            random.setstate(before)  # it belongs to the runner
            yield {
                "id": f"{game}-{game_seed}",
                "game": game,
                "seed": game_seed,
                "moves": [{"say": move} for move in moves],
            }


class Arena:
    """One game, which replies to the agent as its user."""

    imports = ("textarena",)
    """What is loaded once, and not in each rollout's process."""

    def __init__(self, item: dict[str, Any]) -> None:
        self.game = begun(item["game"], item["seed"])
        self.over, self.reward = False, 0.0

    def move(self, move_text: str | None) -> str | dict[str, Any]:
        """Return the game's reply to a move, or its first message."""
        if move_text is not None:
            self.over, _ = self.game.step(move_text)
        text = told(self.game, *self.game.get_observation())
        if not self.over:
            return text or "Your move."
        rewards, _ = self.game.close()
        self.reward = float(rewards[0])
        return {"say": text or "The game is over.", "done": True, "reward": self.reward}


def reward(result: Any, state: Arena) -> float:
    """Return the game's own reward; 0 for a game that is not over."""
    return state.reward


# ------------------------------------------------------------------------------------------------------- Solutions


def guess_the_number(game: Any) -> list[str]:
    """Return the number itself."""
    return [f"[{game.state.game_state['game_number']}]"]


def frozen_lake(game: Any) -> list[str]:
    """Return the shortest path to the goal."""
    grid, start = game.state.game_state["grid"], tuple(game.player_pos)
    ways = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
    paths, waiting = {start: []}, deque([start])
    while waiting:
        position = waiting.popleft()
        if grid[position[0]][position[1]] == "G":
            return [f"[{direction}]" for direction in paths[position]]
        for direction, (down, right) in ways.items():
            to = (position[0] + down, position[1] + right)
            if all(0 <= coordinate < len(grid) for coordinate in to) and to not in paths and grid[to[0]][to[1]] != "H":
                paths[to] = [*paths[position], direction]
                waiting.append(to)
    return []


def tower_of_hanoi(game: Any) -> list[str]:
    """Return the moves of the well-known recursion."""

    def moved(disks: int, source: str, target: str, spare: str) -> list[str]:
        if disks == 0:
            return []
        before, after = moved(disks - 1, source, spare, target), moved(disks - 1, spare, target, source)
        return [*before, f"[{source} {target}]", *after]

    return moved(len(game.state.game_state["towers"]["A"]), "A", "C", "B")


def mastermind(game: Any) -> list[str]:
    """Return a wrong code, then the right one."""
    code = list(game.state.game_state["secret_code"])
    wrong = next(list(other) for other in permutations(code) if list(other) != code)
    return [f"[{' '.join(map(str, guess))}]" for guess in (wrong, code)]


SOLVERS = {
    "GuessTheNumber-v0": guess_the_number,
    "FrozenLake-v0": frozen_lake,
    "TowerOfHanoi-v0": tower_of_hanoi,
    "Mastermind-v0": mastermind,
}
