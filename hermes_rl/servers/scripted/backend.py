"""A scripted server as a server of a role: started with the first call, closed with the role.

Owns the pair of the server and the client that speaks to it over HTTP like to any other: in token ids where the
tokenizer allows that, as it does by default, else in messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from hermes_rl.errors import UserError
from hermes_rl.servers.asking import Asker
from hermes_rl.servers.base import Backend, ChatReply, ChatRequest, ServerConfig
from hermes_rl.servers.openai import OpenAIServer
from hermes_rl.servers.scripted.script import Script
from hermes_rl.servers.scripted.server import ROLLOUT_HEADER, ScriptedServer
from hermes_rl.servers.token_level import CannotRender, TokenServer
from hermes_rl.servers.vllm import Completions
from hermes_rl.tokens.rendering import RendererSettings, load_renderer
from hermes_rl.tokens.tokenizer import load_tokenizer

_MODEL = "scripted"


class ScriptedBackend:
    """See `base.Backend`; scripts may be registered before the server runs."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = replace(config, model=config.model or _MODEL)
        self._scripts: dict[str, Script] = {}
        self._server: ScriptedServer | None = None
        self._client: Backend | None = None
        self._chat: OpenAIServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()

    @property
    def config(self) -> ServerConfig:
        return self._config

    def register(self, rollout_id: str, script: Script) -> None:
        """Play this script for the rollout."""
        self._scripts[rollout_id] = script
        if self._server is not None:
            self._server.register(rollout_id, script)

    def forget(self, rollout_id: str) -> None:
        """The rollout is over."""
        self._scripts.pop(rollout_id, None)
        if self._server is not None:
            self._server.forget(rollout_id)

    async def attempt(self, request: ChatRequest) -> ChatReply:
        client = await self._started()
        try:
            return await client.attempt(request)
        except CannotRender:
            assert self._chat is not None
            return await self._chat.attempt(request)  # images, for example

    async def weights(self) -> int | None:
        """The version that the server pretends to have; None where nobody asked for one."""
        client = await self._started()
        return await client.weights() if isinstance(client, TokenServer) else None

    async def close(self) -> None:
        client, self._client = self._client, None
        chat, self._chat = self._chat, None
        server, self._server = self._server, None
        if client is not None:
            await client.close()
        if chat is not None:
            await chat.close()
        if server is not None:
            await server.close()

    async def _started(self) -> Backend:
        """The client of a server that listens in the running loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # What an earlier loop held ended with it.
            self._loop, self._client, self._chat, self._server = loop, None, None, None
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._client is None:
                self._client = await self._start()
            return self._client

    async def _start(self) -> Backend:
        tokenizer = await asyncio.to_thread(load_tokenizer, self._config.tokenizer)
        self._server = ScriptedServer(self._config.model, tokenizer)
        for rollout_id, script in self._scripts.items():
            self._server.register(rollout_id, script)
        base_url = await self._server.start()
        config = replace(self._config, base_url=base_url, api_key=None, headers={})
        self._chat = OpenAIServer(config, headers_for=_rollout_header)
        try:
            await asyncio.to_thread(load_renderer, config.tokenizer, RendererSettings.of(config.renderer))
        except UserError:
            return self._chat  # its template does not allow exact tokens
        return TokenServer(config, Asker(config, [Completions()], headers_for=_rollout_header))


def _rollout_header(request: ChatRequest) -> Mapping[str, str]:
    return {ROLLOUT_HEADER: request.rollout_id} if request.rollout_id is not None else {}
