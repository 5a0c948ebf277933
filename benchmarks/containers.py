"""What a rollout in a container costs, each figure against the same thing by the `docker` program in the same run.

    python benchmarks/containers.py [--image IMAGE] [--concurrency C] [--calls N]

It needs a Docker engine, which DOCKER_HOST names, with the image. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from report import machine, say, table

from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import DEFAULT_IMAGE as IMAGE
from hermes_rl.sandbox.base import Sandbox, SandboxConfig
from hermes_rl.sandbox.docker import Docker
from hermes_rl.sandbox.docker_engine import Engine
from hermes_rl.sandbox.helper_sandbox import HelperSandbox

STARTS = 10
ALONE = 20
Step = Callable[[], Awaitable[object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default=IMAGE)
    parser.add_argument("--concurrency", type=int, default=16, help="sandboxes at a time (default: 16)")
    parser.add_argument("--calls", type=int, default=10, help="commands per sandbox (default: 10)")
    options = parser.parse_args()
    version, rows = asyncio.run(measure(options))
    say(f"Docker {version}, {options.concurrency} sandboxes at a time, {options.calls} commands each.")
    say(f"{machine()}.\n")
    say(table(["what", "hermes-rl", "by the program", "ratio"], rows))


async def measure(options: argparse.Namespace) -> tuple[str, list[list[str]]]:
    config = SandboxConfig(backend="docker", image=options.image)
    run = ("run", "--rm", "--network", "none", "--entrypoint", "/bin/sh", options.image, "-c", "true")

    async def one_start() -> None:
        async with create_sandbox(config):
            pass

    await one_start()
    rows = [await beside("start and release, alone, ms", one_start, lambda: docker(*run), STARTS)]
    together = options.concurrency
    rows.append(
        await rates("starts and releases/s, together", [one_start] * together, [lambda: docker(*run)] * together, 1)
    )
    async with AsyncExitStack() as stack:
        entered = [stack.enter_async_context(create_sandbox(config)) for _ in range(together)]
        sandboxes = await asyncio.gather(*entered)
        names = [container(sandbox) for sandbox in sandboxes]
        sandbox_steps: list[Step] = [lambda one=one: one.run("true") for one in sandboxes]  # type: ignore[misc]
        theirs: list[Step] = [lambda name=name: docker("exec", name, "/bin/sh", "-c", "true") for name in names]  # type: ignore[misc]
        rows.append(await beside("command, alone, ms", sandbox_steps[0], theirs[0], ALONE))
        rows.append(await rates("commands/s, together", sandbox_steps, theirs, options.calls))
    return await Engine().version(), rows


def container(sandbox: Sandbox) -> str:
    assert isinstance(sandbox, HelperSandbox) and isinstance(sandbox.isolation, Docker)
    return sandbox.isolation.container.name


async def docker(*arguments: str) -> None:
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec("docker", *arguments, stdin=quiet, stdout=quiet)
    assert await process.wait() == 0, arguments


async def beside(label: str, sandbox_step: Step, theirs: Step, times: int) -> list[str]:
    """Medians of seconds, in turns."""
    timings: tuple[list[float], list[float]] = [], []
    for _ in range(times):
        for step, into in zip((sandbox_step, theirs), timings, strict=True):
            started_at = time.perf_counter()
            await step()
            into.append(1000 * (time.perf_counter() - started_at))
    mine, other = map(statistics.median, timings)
    return [label, f"{mine:.1f}", f"{other:.1f}", f"{mine / other:.2f} ×"]


async def rates(label: str, sandbox_steps: Sequence[Step], theirs: Sequence[Step], times: int) -> list[str]:
    mine, other = [await rate(steps, times) for steps in (sandbox_steps, theirs)]
    return [label, f"{mine:.1f}", f"{other:.1f}", f"{mine / other:.1f} ×"]


async def rate(steps: Sequence[Step], times: int) -> float:
    async def lane(step: Step) -> None:
        for _ in range(times):
            await step()

    started_at = time.perf_counter()
    await asyncio.gather(*map(lane, steps))
    return len(steps) * times / (time.perf_counter() - started_at)


if __name__ == "__main__":
    main()
