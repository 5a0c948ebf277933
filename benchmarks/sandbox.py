"""What a sandboxed rollout costs, each figure against its floor in the same run.

    python benchmarks/sandbox.py [--concurrency C] [--calls N]

Floors: bare bubblewrap for the start, persistent bash shells in bare bubblewrap for commands and files, and, where
hermes-agent is installed, its tools on its own local backend, which has no fence at all. A disposable process of user
code (`isolate: sandbox`) stands beside a bare fork of the same loaded process, and beside a sandbox's warm start, by
the processor time of all processes. `--disposable` measures that alone. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import resource
import shlex
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from report import machine, say, table
from sandbox_floors import bare, shell
from sandbox_hermes import hermes_local

from hermes_rl.plugins import Code
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.sandbox.helper_sandbox import HelperSandbox
from hermes_rl.sandbox.helper_system import descendants
from hermes_rl.sandbox.user_code import CONFINED
from hermes_rl.tools.base import Toolkit, ToolRuntime
from hermes_rl.tools.catalogue import resolve_toolsets
from hermes_rl.tools.execute import execute_calls

COMMAND = "seq 200 | tail -1"
"""Programs that do little: the figure is about what stands around them."""
TEXT = base64.b64encode(os.urandom(3072)).decode()
"""4 kB."""
STARTS = 20
ROUNDS = 3
DISPOSABLE, FORKS = 100, 400
SCORER = """
import os, resource

def score(text):
    return float(len(text))

def forks(count):
    for _ in range(count):
        if (pid := os.fork()) == 0: os._exit(0)
        os.waitpid(pid, 0)
    each = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in each)

score.imports = forks.imports = ("sympy",)
"""
FLOOR = "persistent shells in bare bwrap"
HERMES = "hermes-agent, local"
Step = Callable[[int], Awaitable[object]]
"""One call of the rollout with this number."""


def main() -> None:
    options = arguments()
    rows = asyncio.run(measure(options))
    say(f"{options.concurrency} rollouts at a time, {options.calls} calls each, median of {ROUNDS} rounds.")
    say(f"{machine()}.\n")
    say(table(["what", "hermes-rl", "floor", "ratio", "wanted"], rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=32, help="rollouts at a time (default: 32)")
    parser.add_argument("--calls", type=int, default=20, help="calls of each kind per rollout (default: 20)")
    parser.add_argument("--disposable", action="store_true", help="measure disposable processes alone")
    return parser.parse_args()


async def measure(options: argparse.Namespace) -> list[list[str]]:
    if options.disposable:
        return await disposable()
    rows = [await starts(), *await disposable()]
    rows += await calls(options.concurrency, options.calls)
    rows.append(await memory(options.concurrency))
    return rows


async def starts() -> list[str]:
    """Cold starts, one after the other, in turns with the floor's."""
    sandbox_times, floor = [], []
    await one_start()
    for _ in range(STARTS):
        floor.append(await seconds(one_bare()))
        sandbox_times.append(await seconds(one_start()))
    mine, floor_median = 1000 * statistics.median(sandbox_times), 1000 * statistics.median(floor)
    return [
        "cold start and release, ms",
        f"{mine:.1f}",
        f"{floor_median:.1f} (bare bwrap)",
        f"{mine / floor_median:.1f} ×",
        "≤ 5 ×",
    ]


async def disposable() -> list[list[str]]:
    """Processor time of a process that scores one text, of a bare fork, and of a warm start, in turns."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "scorer.py")
        file.write_text(SCORER)  # noqa: ASYNC240 - nothing else runs

        async def call(name: str, **args: object) -> float:
            return float(await CONFINED.call(Code.from_ref(f"{file}:{name}"), args, "hermes_rl.plugins:identity", 600))

        async def score() -> None:
            await call("score", text=TEXT)

        await score(), await one_start(), await call("forks", count=1)
        disposable_times, bare, warm = [], [], []
        for _ in range(ROUNDS * 3):
            disposable_times.append(await processor_ms(score, DISPOSABLE))
            few, many = await call("forks", count=FORKS // 8), await call("forks", count=FORKS)
            bare.append(1000 * (many - few) / (FORKS - FORKS // 8))
            warm.append(await processor_ms(one_start, STARTS))
    rows = []
    for baseline, label, target in ((bare, "a bare fork of it", "≤ 2.5 ×"), (warm, "a sandbox's start", "≤ 0.5 ×")):
        ratio = statistics.median(mine / floor for mine, floor in zip(disposable_times, baseline, strict=True))
        cells = [
            f"{statistics.median(disposable_times):.2f}",
            f"{statistics.median(baseline):.2f} ({label})",
            f"{ratio:.2f} ×",
        ]
        rows.append(["disposable process over a text, CPU ms", *cells, target])
    return rows


async def processor_ms(step: Callable[[], Awaitable[None]], count: int) -> float:
    """Return the processor time per call of this process and of all below it, ended ones too."""
    before = processor()
    for _ in range(count):
        await step()
    return 1000 * (processor() - before) / count


def processor() -> float:
    """Return the seconds of processor time of this process and of all below it, and of those that they waited for."""
    usages = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ticks = 0
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # it has ended meanwhile
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return sum(each.ru_utime + each.ru_stime for each in usages) + ticks / os.sysconf("SC_CLK_TCK")


async def one_start() -> None:
    async with create_sandbox(SandboxConfig()):
        pass


async def one_bare() -> None:
    process = await bare("/bin/true")
    await process.communicate()


async def seconds(work: Awaitable[object]) -> float:
    started_at = time.perf_counter()
    await work
    return time.perf_counter() - started_at


async def calls(concurrency: int, count: int) -> list[list[str]]:
    """Rates of tool calls beside each other, ours and the floors' in turns."""
    async with AsyncExitStack() as stack:
        toolkit = Toolkit(resolve_toolsets(["terminal", "file"], ()))
        runtimes = [await stack.enter_async_context(ToolRuntime(toolkit=toolkit)) for _ in range(concurrency)]
        shells = [await stack.enter_async_context(shell()) for _ in range(concurrency)]
        others = await stack.enter_async_context(hermes_local(concurrency, COMMAND))

        def tool(name: str, **args: str) -> Step:
            call = {"id": "c", "function": {"name": name, "arguments": args}}
            return lambda n: execute_calls([call], toolkit, runtimes[n], turn=0)

        def bash(command: str) -> Step:
            return lambda n: shells[n].run(command)

        write = bash(f"printf %s {shlex.quote(TEXT)} | cat > f")
        kinds: list[tuple[str, Step, list[tuple[str, Step | None, str]]]] = [
            (
                "terminal calls/s",
                tool("terminal", command=COMMAND),
                [
                    (FLOOR, bash(COMMAND), "≥ 0.6 ×"),
                    (f"{HERMES}, its terminal tool", others.terminal, "≥ 3 ×"),
                    (f"{HERMES}, without the tool around it", others.execute, ""),
                ],
            ),
            (
                "write 4 kB, calls/s",
                tool("write_file", path="f", content=TEXT),
                [(FLOOR, write, "≥ 1.3 ×"), (HERMES, others.write, "≥ 20 ×")],
            ),
            (
                "read 4 kB, calls/s",
                tool("read_file", path="f"),
                [(FLOOR, bash("cat f"), "≥ 1.3 ×"), (HERMES, others.read, "≥ 20 ×")],
            ),
        ]
        rows = []
        for name, sandbox_step, baselines in kinds:
            await rate(sandbox_step, concurrency, 1)
            mine, *baseline_rates = await in_turns(
                [sandbox_step, *(step for _, step, _ in baselines if step)], concurrency, count
            )
            for label, step, target in baselines:
                cells = compared(mine, baseline_rates.pop(0), label) if step else [f"{mine:.0f}", others.why, ""]
                rows.append([name, *cells, target])
        return rows


def compared(sandbox_rate: float, floor: float, label: str) -> list[str]:
    return [f"{sandbox_rate:.0f}", f"{floor:.0f} ({label})", f"{sandbox_rate / floor:.2f} ×"]


async def in_turns(steps: Sequence[Step], concurrency: int, count: int) -> list[float]:
    rounds = [[await rate(step, concurrency, count) for step in steps] for _ in range(ROUNDS)]
    return [statistics.median(values) for values in zip(*rounds, strict=True)]


async def rate(step: Step, concurrency: int, count: int) -> float:
    """Calls per second of `concurrency` rollouts, each one call after the other."""

    async def lane(index: int) -> None:
        for _ in range(count):
            await step(index)

    return concurrency * count / await seconds(asyncio.gather(*(lane(n) for n in range(concurrency))))


async def memory(count: int) -> list[str]:
    """Proportional set size of sandboxes between two commands, all of their processes."""
    async with AsyncExitStack() as stack:
        for_all = [await stack.enter_async_context(create_sandbox(SandboxConfig())) for _ in range(count)]
        for box in for_all:
            await box.run_reporting("true", "")
        sizes = [sum(map(_pss, [box.pid, *descendants(box.pid)])) for box in for_all if isinstance(box, HelperSandbox)]
    return ["PSS of an idle sandbox, MB", f"{statistics.mean(sizes) / 1e6:.1f}", "", "", "≤ 10"]


def _pss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
