"""A token-level policy server: three dialects, a log of all that it sampled, errors where a test asks for them."""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import Tokenizer
from tests.http_servers import listening


@dataclass(frozen=True)
class Logged:
    """One answer; `seed` is that of the request."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    seed: int | None
    version: int


class TokenPolicy:
    """Writes what `write(prompt text, random)` says, up to and with the stop, at log-probabilities of its own.

    `dialects` are the paths that it knows; `faults` change one answer each before it is sent.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        write: Callable[[str, random.Random], str],
        dialects: tuple[str, ...] = ("completions", "generate"),
    ) -> None:
        self.tokenizer, self.write, self.dialects = tokenizer, write, dialects
        self.log: list[Logged] = []
        self.asked: list[dict[str, Any]] = []
        self.faults: list[Callable[[dict[str, Any]], None]] = []
        self.version = 0
        self.mode: str | None = None
        self.tells = {"/is_paused", "/bridge/is_paused", "/bridge/info", "/get_weight_version"}
        """Paths beside those of the dialects that it has; the version of its weights may also be in /model_info."""
        self.told: list[str] = []
        """Those that it was asked for, also where it does not have them."""
        self.cut_at: int | None = None
        """Tokens after which the next answer is aborted."""
        self.context: int | None = None
        """Longest conversation of its model; None: its list of models is not known."""
        self.going = asyncio.Event()
        self.going.set()
        self.random = random.Random(7)

    def pause(self) -> None:
        self.mode = "keep"
        self.going.clear()

    def resume(self) -> None:
        self.mode = None
        self.going.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """The base URL while it runs."""
        app = web.Application(client_max_size=2**28)
        if "completions" in self.dialects:
            app.router.add_post("/v1/completions", self._completions)
        if "generate" in self.dialects:
            app.router.add_post("/generate", self._generate)
        if "inference" in self.dialects:
            app.router.add_post("/inference/v1/generate", self._inference)
        told: dict[str, Callable[[], dict[str, Any]]] = {
            "/is_paused": lambda: {"is_paused": self.mode is not None},
            "/bridge/is_paused": lambda: {"paused": self.mode is not None},
            "/bridge/info": lambda: {"update_count": self.version},
            "/get_weight_version": lambda: {"weight_version": str(self.version)},
            "/model_info": lambda: {"model_path": "m", "weight_version": str(self.version)},
        }
        app.router.add_get("/v1/models", self._models)
        for path, tell in told.items():
            app.router.add_get(path, functools.partial(self._told, tell))
        async with listening(app) as address:
            yield f"{address}/v1"

    def _places(self, prompt: list[int], top: int) -> list[list[tuple[int, float]]]:
        """The token itself, which is the likeliest where its id is even, and `top` others."""
        return [
            [(token, -0.25 if token % 2 == 0 else -3.0), *((token + n + 1, -1.0 - n / 10) for n in range(top))]
            for token in prompt
        ]

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "prompt_logprobs" in body:
            self.asked.append(body)
            places = self._places(body["prompt"], body["prompt_logprobs"])
            told = [{str(t): {"logprob": v, "rank": 1, "decoded_token": "x"} for t, v in one} for one in places]
            return self._answer({"choices": [{"token_ids": [1], "prompt_logprobs": [None, *told[1:]]}]})
        sampled, finish = await self._sample(body, body["prompt"], body["max_tokens"], body.get("seed"))
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": finish,
            "token_ids": sampled.ids,
            "logprobs": {"token_logprobs": sampled.logprobs},
        }
        return self._answer({"model": "served", "choices": [choice]})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "top_logprobs_num" in body:
            self.asked.append(body)
            places = [
                [[v, t, None] for t, v in one] for one in self._places(body["input_ids"], body["top_logprobs_num"])
            ]
            own, top = [one[0] for one in places], [one[1:] for one in places]
            meta = {"input_token_logprobs": [[None, own[0][1], None], *own[1:]], "input_top_logprobs": [None, *top[1:]]}
            return self._answer({"text": "", "meta_info": meta})
        if "prompt_logprobs" in body:
            self.asked.append(body)
            places = self._places(body["prompt"]["prompt_token_ids"], body["prompt_logprobs"])
            return self._answer({"prompt_logprobs": [[None, *[[{str(t): v for t, v in one}] for one in places[1:]]]]})
        if "input_ids" in body:
            parameters = body["sampling_params"]
            sampled, finish = await self._sample(
                body, body["input_ids"], parameters["max_new_tokens"], parameters.get("sampling_seed")
            )
            pairs = zip(sampled.logprobs, sampled.ids, strict=True)
            meta = {
                "finish_reason": {"type": finish},
                "output_token_logprobs": [[value, token, None] for value, token in pairs],
                "weight_version": str(sampled.version),
            }
            return self._answer({"text": "", "meta_info": meta})
        sampled, finish = await self._sample(
            body, body["prompt"]["prompt_token_ids"], body["max_tokens"], body.get("seed")
        )
        pairs = zip(sampled.ids, sampled.logprobs, strict=True)
        lines = [[{str(token): value}] for token, value in pairs]
        return self._answer({"text": [""], "finish_reasons": [finish], "logprobs": [lines]})

    async def _inference(self, request: web.Request) -> web.Response:
        """vLLM's endpoint for trainers that render themselves."""
        body = await request.json()
        parameters = body["sampling_params"]
        sampled, finish = await self._sample(body, body["token_ids"], parameters.get("max_tokens", 10_000), None)
        told = [
            {"token": f"token_id:{token}", "logprob": value, "top_logprobs": []}
            for token, value in zip(sampled.ids, sampled.logprobs, strict=True)
        ]
        choice = {"index": 0, "token_ids": sampled.ids, "finish_reason": finish, "logprobs": {"content": told}}
        return self._answer({"request_id": str(len(self.log)), "choices": [choice]})

    async def _sample(
        self, body: dict[str, Any], prompt: list[int], limit: int, seed: int | None
    ) -> tuple[Logged, str]:
        self.asked.append(body)
        if self.mode == "refuse":
            raise web.HTTPServiceUnavailable
        await self.going.wait()
        text = self.tokenizer.decode(prompt)
        ids = self.tokenizer.encode(self.write(text, self.random))
        finish = "stop"
        if limit < len(ids):
            ids, finish = ids[:limit], "length"
        if self.cut_at is not None and self.cut_at < len(ids):
            ids, finish, self.cut_at = ids[: self.cut_at], "abort", None
        logprobs = [-self.random.random() for _ in ids]
        self.log.append(Logged(prompt, ids, logprobs, seed, self.version))
        return self.log[-1], finish

    async def _models(self, request: web.Request) -> web.Response:
        if self.context is None:
            raise web.HTTPNotFound
        return web.json_response({"data": [{"id": "m", "max_model_len": self.context}]})

    async def _told(self, tell: Callable[[], dict[str, Any]], request: web.Request) -> web.Response:
        self.told.append(request.path)
        if request.path not in self.tells:
            raise web.HTTPNotFound
        return web.json_response(tell())

    def _answer(self, body: dict[str, Any]) -> web.Response:
        if self.faults:
            self.faults.pop(0)(body)
        return web.json_response(body)


SHARES = (0.4, 0.3, 0.2, 0.1)


class Drawing(TokenPolicy):
    """Draws one of four letters with the chances `SHARES`; `noise` says from what a request's randomness comes.

    Its log-probabilities are those before temperature and top_p, unless they are `processed`.
    """

    def __init__(
        self,
        noise: Callable[[int | None, int], Any],
        drawn_from: tuple[float, ...] = SHARES,
        processed: bool = False,
    ) -> None:
        super().__init__(load_tokenizer(), lambda prompt, chance: "a")
        self._letters = [self.tokenizer.encode(letter)[0] for letter in "abcd"]
        self._noise, self._from, self._processed, self._requests = noise, drawn_from, processed, 0

    async def _sample(
        self, body: dict[str, Any], prompt: list[int], limit: int, seed: int | None
    ) -> tuple[Logged, str]:
        self._requests += 1
        chance = random.Random(repr(self._noise(seed, self._requests)))
        self.asked.append(body)
        drawn_from = shaped(self._from, body)
        ids = chance.choices(self._letters, drawn_from, k=limit)
        told = drawn_from if self._processed else SHARES
        return Logged(prompt, ids, [math.log(told[self._letters.index(one)]) for one in ids], seed, 1), "length"


def shaped(shares: tuple[float, ...], body: dict[str, Any]) -> tuple[float, ...]:
    """What temperature and top_p leave of chances that fall."""
    left = [share ** (1 / body["temperature"]) for share in shares]
    left = [share / sum(left) for share in left]
    kept = [share if sum(left[:place]) < body["top_p"] else 0.0 for place, share in enumerate(left)]
    return tuple(share / sum(kept) for share in kept)
