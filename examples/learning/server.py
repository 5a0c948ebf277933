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
        pending_request = _Asked(body["prompt"], body["max_tokens"], asyncio.get_running_loop().create_future())
        await self._waiting.put(pending_request)
        sampled = await pending_request.answer
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
                    for pending_request in batch:
                        pending_request.answer.set_exception(error)
                    continue
            for pending_request, sampled in zip(batch, answers, strict=True):
                self.log[sampled.prompt, sampled.logprobs] = sampled
                if not pending_request.answer.done():
                    pending_request.answer.set_result(sampled)

    @torch.no_grad()
    def _sample(self, batch: list[_Asked]) -> list[Sampled]:
        lines = [list(pending_request.prompt) for pending_request in batch]
        token_logprobs: list[list[float]] = [[] for _ in batch]
        going = set(range(len(batch)))
        while going:
            active = sorted(going)
            ids = padded([lines[i] for i in active])
            logits = self.model(ids)[torch.arange(len(active)), [len(lines[i]) - 1 for i in active]]
            values = torch.log_softmax(logits, -1)
            tokens = torch.multinomial(values.exp(), 1, generator=self._generator).squeeze(-1)
            for row, (i, token) in enumerate(zip(active, tokens.tolist(), strict=True)):
                lines[i].append(token)
                token_logprobs[i].append(float(values[row, token]))
                if token == self.stop or len(token_logprobs[i]) >= batch[i].limit:
                    going.discard(i)
        return [
            Sampled(
                tuple(pending_request.prompt), tuple(line[len(pending_request.prompt) :]), tuple(values), self.version
            )
            for pending_request, line, values in zip(batch, lines, token_logprobs, strict=True)
        ]
