"""The policy server: token ids in, sampled ids and their log-probabilities out, in batches as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from aiohttp import web

from examples.learning.model import Small, padded


@dataclass(frozen=True)
class Sampled:
    """One answer, and the version of the weights that sampled it."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


@dataclass
class _Asked:
    prompt: list[int]
    limit: int
    answer: asyncio.Future[Sampled]


class PolicyServer:
    """Samples at temperature 1; one batch at a time, all of it with one version of the weights."""

    def __init__(self, model: Small, stop: int, seed: int = 0) -> None:
        self.model, self.stop, self.version = model, stop, 0
        self.paused = False
        self.log: dict[tuple[tuple[int, ...], tuple[float, ...]], Sampled] = {}
        """Everything that was sampled, by its prompt and its log-probabilities."""
        self._generator = torch.Generator().manual_seed(seed)
        self._waiting: asyncio.Queue[_Asked] = asyncio.Queue()
        self._going = asyncio.Event()
        self._going.set()
        self.lock = asyncio.Lock()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """The base URL while it runs."""
        app = web.Application()
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/is_paused", self._is_paused)
        app.router.add_get("/weights", self._weights)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        worker = asyncio.create_task(self._work())
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            worker.cancel()
            await runner.cleanup()

    async def pause(self, seconds: float) -> None:
        """Stop sampling for a while, as for new weights."""
        self.paused = True
        self._going.clear()
        await asyncio.sleep(seconds)
        self.paused = False
        self._going.set()

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        asked = _Asked(body["prompt"], body["max_tokens"], asyncio.get_running_loop().create_future())
        await self._waiting.put(asked)
        sampled = await asked.answer
        choice: dict[str, Any] = {
            "token_ids": list(sampled.ids),
            "finish_reason": "stop" if sampled.ids[-1] == self.stop else "length",
            "logprobs": {"token_logprobs": list(sampled.logprobs)},
        }
        return web.json_response({"model": "small", "choices": [choice]})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _weights(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _work(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            await asyncio.sleep(0.01)  # those that come together are sampled together
            while not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            await self._going.wait()
            async with self.lock:
                try:
                    answers = await asyncio.to_thread(self._sample, batch)
                except (IndexError, RuntimeError) as error:
                    for asked in batch:
                        asked.answer.set_exception(error)
                    continue
            for asked, sampled in zip(batch, answers, strict=True):
                self.log[sampled.prompt, sampled.logprobs] = sampled
                if not asked.answer.done():
                    asked.answer.set_result(sampled)

    @torch.no_grad()
    def _sample(self, batch: list[_Asked]) -> list[Sampled]:
        lines = [list(asked.prompt) for asked in batch]
        found: list[list[float]] = [[] for _ in batch]
        going = set(range(len(batch)))
        while going:
            active = sorted(going)
            ids = padded([lines[i] for i in active])
            logits = self.model(ids)[torch.arange(len(active)), [len(lines[i]) - 1 for i in active]]
            values = torch.log_softmax(logits, -1)
            tokens = torch.multinomial(values.exp(), 1, generator=self._generator).squeeze(-1)
            for place, (i, token) in enumerate(zip(active, tokens.tolist(), strict=True)):
                lines[i].append(token)
                found[i].append(float(values[place, token]))
                if token == self.stop or len(found[i]) >= batch[i].limit:
                    going.discard(i)
        return [
            Sampled(tuple(asked.prompt), tuple(line[len(asked.prompt) :]), tuple(values), self.version)
            for asked, line, values in zip(batch, lines, found, strict=True)
        ]
