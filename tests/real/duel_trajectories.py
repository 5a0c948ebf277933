"""Play two-player games of TextArena by scripts in the shipped spec, and in the original.

    python duel_trajectories.py FOLDER

Prints a JSON object: `games`, how many there are; `trajectories`; `won`, how many the first player wins; and `differ`,
those whose rewards of the two players are not the same, with both.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from hermes_rl import open_env
from hermes_rl.scoring.reward_value import rounded
from hermes_rl.spec.load import parse_spec

PORT = Path(__file__).resolve().parents[2] / "specs" / "textarena"
ROUNDS = 3
"""Seeds of each game."""
Moves = list[dict[str, str]]


def scripts(gold: Moves, chance: random.Random, candidates: list[str]) -> Iterator[tuple[str, Moves]]:
    """Yield kinds of scripts made of a game's moves; a player without a move left sends nothing."""
    seats = ("player0", "player1")
    by_chance = [{"seat": seats[number % 2], "say": chance.choice(candidates)} for number in range(60)]
    yield "gold", gold
    yield "nothing", []
    yield "by chance", by_chance
    yield "the other wins the first words", [{"seat": "player0", "say": "I give up."}, *gold]
    yield "one missing", gold[:-1]
    yield "the second says nothing", [move for move in gold if move["seat"] == "player0"]
    yield "each twice", [move for move in gold for _ in range(2)]
    yield "seats exchanged", [{**move, "seat": seats[move["seat"] == "player0"]} for move in gold]
    yield "words around", [{**move, "say": f"I say {move['say']} now."} for move in gold]
    yield "no brackets", [{**move, "say": move["say"].strip("[]")} for move in gold]
    yield "many words before", [{**move, "say": f"{'well ' * 300}{move['say']}"} for move in gold]
    yield "many words after", [{**move, "say": f"{move['say']}{' well' * 300}"} for move in gold]


def original(game: str, seed: int, script: Moves) -> list[float]:
    """Return the rewards of both players in the original package."""
    import textarena

    world = textarena.make(game)
    world.reset(num_players=2, seed=seed)
    left = {seat: [move["say"] for move in script if move["seat"] == seat] for seat in ("player0", "player1")}
    for _ in range(2000):
        player, _ = world.get_observation()
        own = left[f"player{player}"]
        over, _ = world.step(own.pop(0) if own else "")
        if over:
            break
    rewards, _ = world.close()
    return [float(rewards[0]), float(rewards[1])]


async def main(folder: Path) -> dict[str, Any]:
    """Play all scripts, one row each."""
    sys.path.insert(0, str(PORT))
    import duel

    rows = []
    for row in islice(duel.games(seed=5, split="train"), ROUNDS * len(duel.MOVES)):
        chance = random.Random(row["id"])
        for kind, moves in scripts(row["moves"], chance, duel.MOVES[row["game"]]):
            rows.append({**row, "id": f"{row['id']} {kind}", "moves": moves})
    spec = yaml.safe_load((PORT / "textarena-duel.yaml").read_text())
    spec["dataset"] = {"items": rows, "key": "id"}
    spec["servers"] = {"policy": {"type": "scripted"}}
    spec["state"]["python"], spec["rewards"]["reward"]["fn"] = f"{PORT}/duel.py:Duel", f"{PORT}/duel.py:reward"
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    differ, won = [], 0
    async with open_env(parse_spec((folder / "spec.yaml").read_text(), folder=folder)) as env:
        played = [group async for group in env.groups(1, rows=list(env.rows()), concurrency=8)]
    for group in played:
        columns = group.row.columns
        ours = [None if seat.score is None else float(seat.score) for seat in group.rollouts[0].seats]
        given = original(columns["game"], columns["seed"], columns["moves"])
        theirs = [rounded(max(-1.0, min(1.0, reward))) for reward in given]
        won += theirs[0] > 0
        if ours != theirs:
            differ.append([columns["id"], ours, theirs, group.detail])
    return {"games": len(duel.MOVES), "trajectories": len(rows), "won": won, "differ": differ}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))  # noqa: T201
