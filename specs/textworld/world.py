"""TextWorld's games: which there are, and one of them as the world that answers the agent."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hermes_rl import UserError

GAMES = [
    {"rooms": rooms, "objects": 2 * rooms, "quest": quest, "seed": seed}
    for seed in range(8)
    for rooms, quest in ((2, 2), (3, 3), (5, 4), (6, 6))
]


def made(game: dict[str, int]) -> Any:
    """The game and the options that it was made with."""
    try:
        from textworld import GameOptions
        from textworld.generator import make_game
    except ImportError as error:
        raise UserError("TextWorld is not installed: pip install 'hermes-rl[textworld]'") from error
    options = GameOptions()
    options.seeds, options.nb_rooms, options.nb_objects = game["seed"], game["rooms"], game["objects"]
    options.quest_length, options.quest_breadth = game["quest"], 1
    return make_game(options), options


def games(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """The games, each with the commands that win it."""
    for game in GAMES:
        walkthrough = made(game)[0].walkthrough
        identity = "-".join(map(str, game.values()))
        yield {"id": identity, **game, "walkthrough": [{"say": command} for command in walkthrough]}


def compiled(item: dict[str, Any]) -> Path:
    """The file of a game, which is compiled once on a machine."""
    from textworld.generator import compile_game

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hermes-rl" / "textworld-1.7"
    file = folder / f"{item['id']}.z8"
    folder.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the rollouts of a group begin at once, each in a process of its own
        if not file.exists():
            with tempfile.TemporaryDirectory(dir=folder) as own:
                game, options = made(item)
                options.path = str(Path(own) / "game.z8")
                compile_game(game, options)
                Path(own, "game.json").replace(file.with_suffix(".json"))
                Path(own, "game.z8").replace(file)
    return file


class Game:
    """One game, played by commands."""

    imports = ("textworld",)
    """What is loaded once, and not in each rollout's process."""

    def __init__(self, item: dict[str, Any]) -> None:
        import textworld

        wanted = textworld.EnvInfos(objective=True, max_score=True, won=True, lost=True, feedback=True, score=True)
        self.game = textworld.start(str(compiled(item)), wanted)
        self.now, self.done = self.game.reset(), False

    def act(self, words: str | None) -> str | dict[str, Any]:
        """What the game answers to a command; its first text where there is none yet."""
        if words is None:
            return str(self.now.feedback).strip()
        self.now, _, self.done = self.game.step(" ".join(words.split()))
        return {"say": str(self.now.feedback).strip(), "over": bool(self.done)}

    def points(self) -> float:
        """The share of the game's points that were made."""
        return float(self.now.score) / float(self.now.max_score)

    def close(self) -> None:
        """End the game."""
        self.game.close()


def share_of_points(result: Any, state: Game) -> float:
    """The share of the game's points that the agent has made."""
    return state.points()
