"""Play it: warm the policy up, serve the environment, train on what comes, and draw what was learned.

    python -m examples.learning.run [--steps N] [--pause SECONDS] [--svg FILE]

Needs `pip install '.[train]'`. Takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import torch

from examples.learning.curve import draw
from examples.learning.model import Small
from examples.learning.server import PolicyServer
from examples.learning.task import CONTROL, PIECES, write_task, write_tokenizer
from examples.learning.trainer import Curve, Trainer, warm_up
from hermes_rl.tokens.hub import HubTokenizer
from hermes_rl.tools.base import Toolkit
from hermes_rl.tools.python_tools import python_tool

WARM_UP = 200
"""Steps of supervised training before."""
NOISE = 0.8
"""Share of scripted transcripts that are wrong, so that there is something left to learn."""
BATCH = 64
PAUSE_AT = 5
"""Step at which the server stops for a while."""


async def learn(folder: Path, *, steps: int, pause: float, measured: int = 0) -> Curve:
    """Play that many steps, the first `measured` without training; the run directory is `folder/run`."""
    torch.manual_seed(0)
    write_tokenizer(folder / "tokenizer")
    tokenizer = await asyncio.to_thread(HubTokenizer, str(folder / "tokenizer"))
    model = Small(256 + len(CONTROL) + len(PIECES))
    server = PolicyServer(model, tokenizer.encode("<|im_end|>")[0])
    async with server.running() as policy, _trajectory_api() as api:
        spec = write_task(folder, policy, api, steps)
        tools = Toolkit([python_tool(f"{folder / 'tools.py'}:{name}") for name in ("add", "multiply")])
        await asyncio.to_thread(warm_up, model, tokenizer, list(tools.schemas), steps=WARM_UP, noise=NOISE)
        trainer = Trainer(model, server)
        pauses: list[asyncio.Task[None]] = []

        def on_step(step: int) -> None:
            if step == PAUSE_AT and pause:
                pauses.append(asyncio.create_task(server.pause(pause)))

        async with _serving(spec, folder / "run") as environment:
            await trainer.run(api, steps=steps, batch=BATCH, measured=measured, on_step=on_step)
            await asyncio.wait_for(environment.wait(), 60)
    return trainer.curve


@asynccontextmanager
async def _serving(spec: Path, out: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    command = (sys.executable, "-m", "hermes_rl.cli.main", "run", str(spec), "serve", "--quiet", "--out", str(out))
    process = await asyncio.create_subprocess_exec(*command)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def _trajectory_api() -> AsyncIterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port))
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(600):
                try:
                    async with session.get(url):
                        break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)
        yield url
    finally:
        process.kill()
        await process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of the trainer (default: 60)")
    parser.add_argument("--pause", type=float, default=10, help="of the server, in seconds (default: 10)")
    parser.add_argument("--svg", type=Path, help="where the learning curve is drawn")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        curve = asyncio.run(learn(Path(folder), steps=options.steps, pause=options.pause))
    if options.svg is not None:
        options.svg.write_text(draw(curve.reward))


if __name__ == "__main__":
    main()
