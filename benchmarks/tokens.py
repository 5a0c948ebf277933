"""What exact tokens cost: rendering and merging as a rollout grows, and the event loop while long groups are sent.

    python benchmarks/tokens.py [--turns N] [--tokens N] [--groups N] [--repetitions N]

One rollout of many turns against a server that answers at once, its own processor time taken apart; then groups of
eight long rollouts that are written and sent to a server on loopback, with the lag of the event loop beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

from aiohttp import web
from report import machine, say, spread, table

from hermes_rl.runs.groups import body_of, encoded
from hermes_rl.runs.journal import Journal
from hermes_rl.servers.base import Sampling, ServerConfig
from hermes_rl.servers.vllm import Completions
from hermes_rl.tokens.load import load_tokenizer, make_renderer
from hermes_rl.tokens.rendering import Renderer, next_prompt
from hermes_rl.tokens.transcript import SampledSpan, Step, TokenSequence, Transcript, ids, numbers, packed

MODEL_TURN = 0.020
"""Seconds that a model takes for a turn."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "Does one thing, and says what came of it.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "What."}}},
        },
    }
    for number in range(8)
]


def main() -> None:
    options = arguments()
    renderer = make_renderer(load_tokenizer())
    say(f"{machine()}.\n")
    say(f"A rollout of {options.turns} turns and {options.tokens:,} tokens, {options.repetitions} repetitions:\n")
    say(rollout_table(renderer, options))
    say(f"\n{options.groups} groups of 8 rollouts of {options.tokens:,} tokens, written and sent:\n")
    say(asyncio.run(sending_table(options)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=64, help="model calls of the rollout (default: 64)")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of the rollout (default: 32768)")
    parser.add_argument("--groups", type=int, default=4, help="groups that are sent (default: 4)")
    parser.add_argument("--repetitions", type=int, default=5, help="of the rollout (default: 5)")
    return parser.parse_args()


def rollout_table(renderer: Renderer, options: argparse.Namespace) -> str:
    """Milliseconds of processor time per turn, in the first and the last quarter of the rollout and over all."""
    runs = [play(renderer, options.turns, options.tokens) for _ in range(options.repetitions)]
    quarter = max(1, options.turns // 4)
    rows = []
    for part in ("render", "merge", "request", "record"):
        columns = [
            [sum(run[part][span]) * 1e3 / len(run[part][span]) for run in runs]
            for span in (slice(1, 1 + quarter), slice(-quarter, None), slice(1, None))
        ]
        rows.append([part, *(spread(column, 3) for column in columns)])
    exact = [sum(run["render"][1:] + run["merge"][1:]) / (len(run["render"]) - 1) / MODEL_TURN * 100 for run in runs]
    share = f"\n\nRendering and merging: {spread(exact, 2)} % of a model turn of {MODEL_TURN * 1e3:g} ms."
    heads = ["ms per turn", "first quarter", "last quarter", "all"]
    return table(heads, rows) + share


def play(renderer: Renderer, turns: int, tokens: int) -> dict[str, list[float]]:
    """Seconds of each part, turn by turn."""
    chance = random.Random(1)
    per_turn = tokens // turns // 2
    stop = list(renderer.stop_ids[:1])
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Begin."}]
    transcript, spent = Transcript(), {part: [0.0] * 0 for part in ("render", "merge", "request", "record")}
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "rollouts.jsonl")
        for turn in range(turns):
            clock = Clock(spent)
            prompt = next_prompt(renderer, transcript, messages, TOOLS)
            clock.lap("render")
            sampling = Sampling(prompt.ids, 1024, renderer.stop_ids, text=lambda prompt=prompt: prompt.text)
            sampling.written(Completions().body(sampling, ServerConfig("vllm")))
            clock.lap("request")
            body = [chance.randrange(256, 3000) for _ in range(per_turn)]
            sampled_ids = [
                *body,
                *renderer.tokenizer.encode('<tool_call>\n{"name": "tool_1", "arguments": {}}\n</tool_call>'),
            ]
            step = Step(prompt.ids, ids(sampled_ids + stop), numbers([-0.5] * (len(sampled_ids) + 1)), "stop")
            clock.skip()
            call = {"id": f"c{turn:08d}", "type": "function", "function": {"name": "tool_1", "arguments": "{}"}}
            messages.append({"role": "assistant", "content": f"turn {turn}", "tool_calls": [call]})
            transcript.add(step, messages, prompt)
            clock.lap("merge")
            text = renderer.tokenizer.decode([chance.randrange(256, 3000) for _ in range(per_turn)])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            clock.skip()
            spent["record"].append(0.0)
        clock = Clock(spent)
        record = [packed(sequence) for sequence in transcript.sequences()]
        journal.append({"messages": messages, "sequences": record})
        clock.lap("record")
        spent["record"] = [spent["record"][-1] / turns] * turns  # once per rollout, shared by its turns
        journal.close()
    return spent


class Clock:
    """Processor time between laps."""

    def __init__(self, spent: dict[str, list[float]]) -> None:
        self._spent, self._from = spent, time.process_time()

    def lap(self, part: str) -> None:
        self._spent[part].append(time.process_time() - self._from)
        self.skip()

    def skip(self) -> None:
        self._from = time.process_time()


async def sending_table(options: argparse.Namespace) -> str:
    """The lag of the event loop while groups are written and sent, all of them at once."""
    group = long_group(options.tokens)
    runner = await _sink()
    port = runner.addresses[0][1]
    quiet = await _lags(asyncio.sleep(2))
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "groups.jsonl")
        busy = await _lags(asyncio.gather(*(_send(group, journal, port) for _ in range(options.groups))))
        journal.close()
    seconds = time.monotonic() - started
    await runner.cleanup()
    rows = [[name, *(f"{_at(lags, share) * 1e3:.1f}" for share in (0.5, 0.99, 1.0))] for name, lags in
            (("nothing else", quiet), ("sending", busy))]  # fmt: skip
    spare = f"\n\n{seconds / options.groups:.2f} s per group, encoding and compression included."
    return table(["lag of the event loop, ms", "median", "p99", "largest"], rows) + spare


def long_group(tokens: int) -> dict[str, Any]:
    """Eight rollouts, half of their tokens sampled."""
    chance = random.Random(2)
    step = 512
    spans = tuple(
        SampledSpan(turn, turn * 2 * step + step, (turn + 1) * 2 * step) for turn in range(tokens // step // 2)
    )
    count = sum(span.stop - span.start for span in spans)
    line = TokenSequence(
        ids(chance.randrange(3000) for _ in range(tokens)), spans, numbers(-chance.random() for _ in range(count))
    )
    return {
        "tokens": [line.tokens for _ in range(8)],
        "masks": [line.masks for _ in range(8)],
        "scores": [0.0, 1.0] * 4,
        "inference_logprobs": [line.logprobs for _ in range(8)],
    }


async def _send(group: dict[str, Any], journal: Journal, port: int) -> None:
    import aiohttp

    journal.append_lines([await encoded(group)])
    body, headers = await body_of(group)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}/", data=body, headers=headers) as answer,
    ):
        await answer.read()


async def _sink() -> web.AppRunner:
    async def take(request: web.Request) -> web.Response:
        async for _ in request.content.iter_chunked(1 << 16):
            pass
        return web.Response()

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/", take)
    runner = web.AppRunner(app, access_log=None, auto_decompress=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


async def _lags(work: Any) -> array[float]:
    """How late the event loop was, asked every five milliseconds while something else is done."""
    lags: array[float] = array("d")
    task = asyncio.ensure_future(work)
    while not task.done():
        before = time.monotonic()
        await asyncio.sleep(0.005)
        lags.append(time.monotonic() - before - 0.005)
    await task
    return lags


def _at(lags: array[float], share: float) -> float:
    ordered = sorted(lags)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    main()
