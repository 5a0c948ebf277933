"""A trainer that does over HTTP what Atropos' example trainer does, and the trajectory API that it talks to."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.ports import free_port


@asynccontextmanager
async def trajectory_api(port: int | None = None) -> AsyncIterator[str]:
    """A real run-api on loopback, ended by its process id."""
    port = port or free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        await _until_up(url)
        yield url
    finally:
        process.kill()
        await process.wait()


async def _until_up(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(300):
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
    raise AssertionError(f"run-api did not come up at {url}")


async def train(
    url: str,
    *,
    steps: int,
    batch_size: int,
    pause: float = 0.05,
    starting_step: int = 0,
    longest: int = 4096,
    batches: list[list[dict[str, Any]]] | None = None,
    go_on: asyncio.Event | None = None,
) -> list[list[dict[str, Any]]]:
    """Register, then pull batches until `batches` (default: none yet) has `steps` of them.

    Sequences have `longest` tokens at most. After the first one it waits for `go_on`, where that is given.
    """
    registration = {
        "wandb_group": "group",
        "wandb_project": "project",
        "batch_size": batch_size,
        "max_token_len": longest,
        "checkpoint_dir": "",
        "save_checkpoint_interval": -1,
        "starting_step": starting_step,
        "num_steps": steps,
    }
    batches = [] if batches is None else batches
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/register", json=registration) as answer:
            answer.raise_for_status()
        while len(batches) < steps:
            async with session.get(f"{url}/batch") as answer:
                answer.raise_for_status()
                batch = (await answer.json())["batch"]
            if batch is not None:
                batches.append(batch)
                if go_on is not None:
                    await go_on.wait()
            await asyncio.sleep(pause)
    return batches
