"""Load TextWorld's games, and run one of them as the user that replies to the agent."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hermes_rl import UserError
from hermes_rl.errors import install_command

GAMES = [
    {"rooms": rooms, "objects": 2 * rooms, "quest": quest, "seed": seed}
    for seed in range(8)
    for rooms, quest in ((2, 2), (3, 3), (5, 4), (6, 6))
]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hermes-rl" / "textworld-1.7"


def compiled(game: dict[str, Any], directory: Path) -> Path:
    """Return the file of a game; it and its description are made if the directory does not have them."""
    try:
        from textworld import GameOptions
        from textworld.generator import compile_game, make_game
    except ImportError as error:
        raise UserError(f"TextWorld is not installed: {install_command('textworld')}") from error
    file = directory / f"{game['rooms']}-{game['objects']}-{game['quest']}-{game['seed']}.z8"
    if not file.exists():
        options = GameOptions()
        options.seeds, options.nb_rooms, options.nb_objects = game["seed"], game["rooms"], game["objects"]
        options.quest_length, options.quest_breadth = game["quest"], 1
        with tempfile.TemporaryDirectory(dir=directory) as temporary_directory:
            options.path = str(Path(temporary_directory) / "game.z8")
            compile_game(make_game(options), options)
            Path(temporary_directory, "game.json").replace(file.with_suffix(".json"))
            Path(temporary_directory, "game.z8").replace(file)
    return file


def games(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield the games, each with the commands that win it; each is compiled once on a machine."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for game in GAMES:
        with (CACHE / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be compiling
            file = compiled(game, CACHE)
        commands = [{"say": command} for command in walkthrough(file.with_suffix(".json"))]
        yield {"id": file.stem, **game, "walkthrough": commands}


def walkthrough(description: Path) -> list[str]:
    """Return the commands that win a game."""
    from textworld.generator import Game as Description

    return list(Description.load(str(description)).walkthrough)


class Game:
    """One game, played by commands."""

    imports = ("textworld",)
    """What is loaded once, and not in each rollout's process."""
    reads = (CACHE,)
    """What its process sees of this machine; a game that is not there, as on another machine, is compiled in it."""

    @classmethod
    def prepare(cls) -> None:
        """Let TextWorld parse its rules once, and not in each rollout's process."""
        for file in sorted(CACHE.glob("*.json"))[:1]:
            walkthrough(file)

    def __init__(self, item: dict[str, Any]) -> None:
        import textworld

        requested_infos = textworld.EnvInfos(
            objective=True, max_score=True, won=True, lost=True, feedback=True, score=True
        )
        directory = CACHE if (CACHE / f"{item['id']}.z8").exists() else Path.cwd()
        self.game = textworld.start(str(compiled(item, directory)), requested_infos)
        self.now, self.done = self.game.reset(), False

    def act(self, command: str | None) -> str | dict[str, Any]:
        """Return the game's reply to a command, or its first text."""
        if command is None:
            return str(self.now.feedback).strip()
        self.now, _, self.done = self.game.step(" ".join(command.split()))
        return {"say": str(self.now.feedback).strip(), "done": bool(self.done)}

    def points(self) -> float:
        """Return the share of the game's points that were scored."""
        return float(self.now.score) / float(self.now.max_score)

    def close(self) -> None:
        """End the game."""
        self.game.close()


def share_of_points(result: Any, state: Game) -> float:
    """Return the share of the game's points that the agent has scored."""
    return state.points()
