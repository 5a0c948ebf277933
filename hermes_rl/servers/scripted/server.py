"""Run the HTTP server that returns scripted turns, on a free loopback port, and the backend of `type: scripted`, which
starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from aiohttp import web

from hermes_rl.errors import UserError
from hermes_rl.servers.base import SESSION_HEADER, ChatReply, ChatRequest, ServerConfig
from hermes_rl.servers.client import TokenServerClient
from hermes_rl.servers.openai import OpenAIServer
from hermes_rl.servers.scripted.play import Script, completion, continuation
from hermes_rl.servers.token_level import CannotRender, TokenServer
from hermes_rl.servers.vllm import Completions
from hermes_rl.tokens.load import load_renderer, load_tokenizer
from hermes_rl.tokens.rendering import RendererSettings
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.values import safe_name

# `type: scripted` as a backend: it starts a scripted server with the first call and closes it with the client. Calls
# use token ids if the tokenizer allows that, else messages.

_MODEL = "scripted"


class ScriptedBackend:
    """Backend of `type: scripted`, see `base.Backend`; scripts may be registered before the server runs."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = replace(config, model=config.model or _MODEL)
        self._scripts: dict[str, Script] = {}
        self._running: _Running | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()

    def register(self, rollout_id: str, script: Script) -> None:
        """Play this script for the rollout."""
        self._scripts[safe_name(rollout_id)] = script

    def forget(self, rollout_id: str) -> None:
        """Forget the script of a finished rollout."""
        self._scripts.pop(safe_name(rollout_id), None)

    async def attempt(self, request: ChatRequest) -> ChatReply:
        running = await self._started()
        if request.scored is not None:
            return await running.tokens.attempt(request)
        if running.exact:
            with contextlib.suppress(CannotRender):  # messages with images, for example
                return await running.tokens.attempt(request)
        return await running.chat.attempt(request)

    async def weights(self) -> int | None:
        """Return the version that a trainer has set, or None if the server uses messages, whose tokens have none."""
        running = await self._started()
        return await running.tokens.weights() if running.exact else None

    async def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await running.tokens.close()
            await running.chat.close()
            await running.server.close()

    async def _started(self) -> _Running:
        """Return a server that listens in the running loop, with its clients; start it if needed."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # The server and clients of an earlier loop ended with that loop.
            self._loop, self._running, self._starting = loop, None, asyncio.Lock()
        async with self._starting:
            if self._running is None:
                self._running = await self._start()
            return self._running

    async def _start(self) -> _Running:
        tokenizer = await asyncio.to_thread(load_tokenizer, self.config.tokenizer)
        server = ScriptedServer(self.config.model, tokenizer, self._scripts)
        config = replace(self.config, base_url=await server.start(), api_key=None, headers={}, session_header=True)
        chat, tokens = OpenAIServer(config), TokenServer(config, TokenServerClient(config, [Completions()]))
        try:
            await asyncio.to_thread(load_renderer, config.tokenizer, RendererSettings.from_mapping(config.renderer))
        except UserError:
            return _Running(server, chat, tokens, exact=False)  # its template does not allow exact tokens
        return _Running(server, chat, tokens, exact=True)


class _Running(NamedTuple):
    """A running scripted server, and its clients for messages and for token ids; `exact` if token ids are used."""

    server: ScriptedServer
    chat: OpenAIServer
    tokens: TokenServer
    exact: bool


# -------------------------------------------------------------------------------- server

_HOST = "127.0.0.1"
_LARGEST_BODY = 2**28
"""Maximum bytes of a body; aiohttp's default of 1 MiB is less than a long conversation."""


class ScriptedServer:
    """Scripted server in the event loop that starts it; a request without a registered script gets a fixed sentence."""

    def __init__(self, model: str, tokenizer: Tokenizer, scripts: Mapping[str, Script] | None = None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._scripts = {} if scripts is None else scripts
        """Scripts by rollout id, as in `SESSION_HEADER`."""
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Start listening and return the base URL for clients. Raises `UserError` if loopback is not reachable."""
        app = web.Application(client_max_size=_LARGEST_BODY)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, _HOST, 0, backlog=4096).start()
        port = self._runner.addresses[0][1]
        try:
            _, writer = await asyncio.open_connection(_HOST, port)
        except OSError as error:
            await self.close()
            raise UserError(
                f"the loopback interface ({_HOST}) cannot be used here ({error.strerror}), and the scripted server "
                "listens there: bring it up (`ip link set lo up`), or leave this network namespace"
            ) from error
        writer.close()
        return f"http://{_HOST}:{port}/v1"

    async def close(self) -> None:
        """Stop listening; may be called twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _chat(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
        except ValueError:
            return _error_response("the body is not JSON")
        problem = _request_problem(body)
        if problem is not None:
            return _error_response(problem)
        return web.json_response(completion(self._script(request), body, self._model, self._tokenizer))

    async def _completions(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
            prompt = [int(token) for token in body["prompt"]]
        except (ValueError, TypeError, KeyError):
            return _error_response("the body is not a request for token ids")
        return web.json_response(continuation(self._script(request), prompt, body, self._model, self._tokenizer))

    def _script(self, request: web.Request) -> Script:
        return self._scripts.get(request.headers.get(SESSION_HEADER, ""), Script())

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "hermes-rl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})


def _request_problem(body: Any) -> str | None:
    if not isinstance(body, dict):
        return "the body is not an object"
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return "messages must be a list of objects"
    return "the scripted server does not stream" if body.get("stream") else None


def _error_response(message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "code": None}
    return web.json_response({"error": error}, status=400)
