"""Run two environments of one process on a Ray cluster with two cores; runs in the environment with Ray.

    python ray_environments.py ADDRESS SPEC SPEC

Prints what happened as JSON: what is refused, how many workers each environment had, and the scores of their groups.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from hermes_rl import Env, connect_ray, load_spec, open_env
from hermes_rl.errors import UserError

GROUPS = 40


async def main(address: str, *paths: str) -> dict[str, Any]:
    specs = [load_spec(path) for path in paths]
    found: dict[str, Any] = {"refused": [], "workers": []}
    async with connect_ray(specs, address) as ray:
        for other in (open_env(specs[0], ray=address), open_env(load_spec(paths[0]), ray=ray)):
            try:
                await other.open()
            except UserError as error:
                found["refused"].append(str(error))
        async with open_env(specs[0], ray=ray, workers=2) as first:
            await holds(lambda: first.status().workers == 2)
            playing = asyncio.create_task(scores(first))
            await holds(lambda: sum(first.status().phases.values()) >= 4)
            async with open_env(specs[1], ray=ray) as second:
                found["workers"].append([first.status().workers, second.status().workers])
                found["second"] = await scores(second)
            await holds(lambda: first.status().workers == 2)
            found["workers"].append([first.status().workers])
            found["first"], found["died"] = await playing, first.status().died
    return found


async def scores(env: Env) -> dict[str, Any]:
    """Run groups and return the scores, or the reason why there are none, by group."""
    rows = list(env.rows())
    played = await asyncio.gather(
        *(env.run_group(rows[number % len(rows)], 2, group=f"g{number}") for number in range(GROUPS))
    )
    return {group.id: group.scores or group.detail for group in played}


async def holds(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not true():
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(*sys.argv[1:]))))
