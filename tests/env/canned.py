"""An environment whose rollouts are what a test says, and a trajectory API that keeps what it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from hermes_rl import HermesAgentBaseEnv, HermesAgentEnvConfig
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests import http_servers

NOBODY = "http://127.0.0.1:9/v1"


def item(score: float = 1.0, **more: Any) -> dict[str, Any]:
    """A ScoredDataItem of three tokens."""
    return {"tokens": [1, 2, 3], "masks": [-100, 2, 3], "scores": score, **more}


def group(*scores: float, **more: Any) -> dict[str, Any]:
    """A ScoredDataGroup with these scores."""
    return {"tokens": [[1, 2, 3]] * len(scores), "masks": [[-100, 2, 3]] * len(scores), "scores": list(scores), **more}


class Canned(HermesAgentBaseEnv):
    """Items are numbers; `play(number)` gives the ScoredDataItem of a rollout, or raises."""

    name = "canned"
    play: Callable[[int], Any] = staticmethod(lambda number: item())

    async def setup(self) -> None:
        self.number = 0

    async def get_next_item(self) -> int:
        self.number += 1
        return self.number

    async def collect_trajectory(self, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
        return self.play(item), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        await self.evaluate_log({"eval/mean_reward": 1.0}, samples=[{"score": 1}], verbose=False)


def make(cls: type[Canned] = Canned, *, play: Callable[[int], Any] | None = None, **fields: Any) -> Canned:
    """The environment; it calls no server."""
    given = {"group_size": 2, "tokenizer_name": str(small_tokenizer_path()), **fields}
    env = cls(HermesAgentEnvConfig(**given), [APIServerConfig(base_url=NOBODY, model_name="m")])
    if play is not None:
        env.play = play
    return env


class Api:
    """What was posted to the trajectory API, path by path."""

    def __init__(self) -> None:
        self.url = ""
        self.posted: list[tuple[str, Any]] = []

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Every group that arrived, also those that came in lists."""
        return [one for _, body in self.posted for one in (body if isinstance(body, list) else [body])]

    async def take(self, request: web.Request) -> web.Response:
        self.posted.append((request.path, await request.json()))
        return web.json_response({"status": "received"})

    async def wandb_info(self, request: web.Request) -> web.Response:
        return web.json_response({"group": "trained-together", "project": "the-trainers"})


@asynccontextmanager
async def listening() -> AsyncIterator[Api]:
    """The API on loopback."""
    api, app = Api(), web.Application()
    app.router.add_post("/{path:scored_data|scored_data_list}", api.take)
    app.router.add_get("/wandb_info", api.wandb_info)
    async with http_servers.listening(app) as api.url:
        yield api


async def ended(process: asyncio.subprocess.Process, seconds: float) -> tuple[int, str]:
    """Return the exit status of a process and what it printed; it is killed after that time."""
    try:
        output, _ = await asyncio.wait_for(process.communicate(), seconds)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, output.decode()


@asynccontextmanager
async def killed_at_the_end(process: asyncio.subprocess.Process) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield a process, and kill it where it still runs."""
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
