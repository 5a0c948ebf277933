"""Replacements for a GPU with TRL's AsyncGRPOTrainer: vLLM's completions of a small model, and an attention kernel."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from aiohttp import web


class Engine:
    """Serve ``/v1/completions`` with token ids, as vLLM does, and accept weights: a WeightTransferProtocol of TRL."""

    def __init__(self, model: Any) -> None:
        self.model = copy.deepcopy(model).eval()
        self.lock, self.loop = threading.Lock(), asyncio.new_event_loop()
        self.calls: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[Any]]] = asyncio.Queue()
        self.going = asyncio.Event()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.url = asyncio.run_coroutine_threadsafe(self.serve(), self.loop).result()

    async def serve(self) -> str:
        self.going.set()
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/is_paused", self.paused)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        self.working = self.loop.create_task(self.work())
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "small", "max_model_len": 1024}]})

    async def paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self.going.is_set()})

    async def complete(self, request: web.Request) -> web.Response:
        body, answer = await request.json(), self.loop.create_future()
        await self.calls.put((body, answer))
        ids, values = await answer
        finish = "stop" if ids[-1] in body["stop_token_ids"] else "length"
        choice = {"token_ids": ids, "finish_reason": finish, "logprobs": {"token_logprobs": values}}
        return web.json_response({"model": "small", "choices": [choice]})

    async def work(self) -> None:
        while True:
            batch = [await self.calls.get()]
            await asyncio.sleep(0.01)
            while not self.calls.empty() and len(batch) < 64:
                batch.append(self.calls.get_nowait())
            await self.going.wait()
            found = await asyncio.to_thread(self.generate, [body for body, _ in batch])
            for (_, answer), one in zip(batch, found, strict=True):
                if not answer.done():
                    answer.set_result(one)

    def generate(self, bodies: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
        prompts, stop = [body["prompt"] for body in bodies], bodies[0]["stop_token_ids"]
        width = max(map(len, prompts))
        ids = torch.tensor([[stop[0]] * (width - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
        settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "output_scores": True}
        more = {"eos_token_id": stop, "pad_token_id": stop[0], "return_dict_in_generate": True}
        longest = max(body["max_tokens"] for body in bodies)
        with self.lock, torch.no_grad():
            out = self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest, **settings, **more)
        values = torch.stack(out.scores, 1).log_softmax(-1)
        found = []
        for row, body in enumerate(bodies):
            line = out.sequences[row, width:].tolist()[: body["max_tokens"]]
            end = next((place for place, token in enumerate(line, 1) if token in stop), len(line))
            found.append((line[:end], [min(0.0, float(values[row, n, line[n]])) for n in range(end)]))
        return found

    # ------------------------------------------------------------- WeightTransferProtocol

    def init_weight_transfer(self) -> None:
        pass

    def pause(self) -> None:
        self.loop.call_soon_threadsafe(self.going.clear)

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        named: Iterable[tuple[str, torch.Tensor]] = [(name, tensor.clone()) for name, tensor in iterator]
        with self.lock, torch.no_grad():
            own = dict(self.model.named_parameters())
            for name, tensor in named:
                own[name].copy_(tensor)

    def resume(self) -> None:
        self.loop.call_soon_threadsafe(self.going.set)

    def destroy(self) -> None:
        pass


class Kernel:
    """Replacement for flash-attention 3, which the trainer loads on a GPU."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, mq: Any, mk: Any, softmax_scale: Any = None, **_: Any
    ) -> Any:
        out, many = [], q.shape[1] // k.shape[1]
        for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
            parts = (q[a:b], k[c:d].repeat_interleave(many, 1), v[c:d].repeat_interleave(many, 1))
            query, key, value = (one.transpose(0, 1) for one in parts)
            seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(diagonal=int((d - c) - (b - a)))
            attention = torch.nn.functional.scaled_dot_product_attention
            out.append(attention(query, key, value, attn_mask=seen, scale=softmax_scale).transpose(0, 1))
        return torch.cat(out)
