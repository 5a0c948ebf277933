"""Atropos' server objects over our transport: one retry policy, no billed health polls, several servers balanced.

`HermesServer` sits on atroposlib's `server_cls` hook; `HermesServerManager` keeps the interface of its ServerManager
(`servers`, `chat_completion`, `update_weight`) and answers every call through one `Role`.
"""

from __future__ import annotations

import time
from typing import Any

from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig, ReasoningConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from openai.types.chat.chat_completion import ChatCompletion
from openai.types.completion import Completion

from hermes_rl.errors import NotYetAvailable
from hermes_rl.sandbox.config import SandboxConfig
from hermes_rl.servers.balance import Role
from hermes_rl.servers.base import ChatReply, ChatRequest, Reasoning, Secret, ServerConfig
from hermes_rl.servers.factory import create_role

_REQUEST_FIELDS = ("tools", "temperature", "top_p", "max_tokens", "seed", "stop", "extra_body", "logprobs")


def server_config(config: APIServerConfig, tool_parser: str | None = None) -> ServerConfig:
    """Atropos' description of a server as ours; an empty key, or atroposlib's placeholder "x", is no key."""
    key = config.api_key if config.api_key not in (None, "", "x") else None
    return ServerConfig(
        type=config.server_type,
        base_url=config.base_url or None,
        model=config.model_name,
        api_key=Secret(key) if key else None,
        timeout=float(config.timeout),
        max_concurrency=config.num_max_requests_at_once,
        tokenizer=None if config.tokenizer_name == "none" else config.tokenizer_name,
        renderer=None if tool_parser is None else {"tool_parser": tool_parser},
    )


def request_of(kwargs: dict[str, Any], reasoning: ReasoningConfig | None) -> ChatRequest:
    """OpenAI-style keyword arguments as a request; what neither side knows goes into the body as it is."""
    given = {name: kwargs[name] for name in _REQUEST_FIELDS if kwargs.get(name) is not None}
    skip = kwargs.get("skip_reasoning", False)
    thinking = None
    if reasoning is not None and reasoning.is_reasoning_kwargs_active() and not skip:
        thinking = Reasoning(effort=reasoning.effort, max_tokens=reasoning.max_tokens)
    known = {*_REQUEST_FIELDS, "messages", "n", "model", "split", "skip_reasoning"}
    further = {key: value for key, value in kwargs.items() if key not in known}
    if further:
        given["extra_body"] = {**further, **(given.get("extra_body") or {})}
    return ChatRequest(messages=kwargs["messages"], reasoning=thinking, **given)


def completion_of(replies: list[ChatReply]) -> ChatCompletion:
    """Replies as one OpenAI ChatCompletion with a choice each."""
    usage = {
        key: sum(int(reply.usage.get(key) or 0) for reply in replies)
        for key in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    return ChatCompletion.model_validate(
        {
            "id": f"chatcmpl-{id(replies):x}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": replies[0].model,
            "choices": [
                {
                    "index": index,
                    "message": {"content": None, **reply.message},
                    "finish_reason": reply.finish_reason or "stop",
                }
                for index, reply in enumerate(replies)
            ],
            "usage": usage,
        }
    )


class HermesServer(APIServer):  # type: ignore[misc]
    """One server for atroposlib's `server_cls` hook; never polls, and is healthy until a call says otherwise."""

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        super().__init__(config, reasoning_config=reasoning_config)
        self.initialized = True

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """No health polls: a dead server shows in the calls, which are retried elsewhere."""

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        raise NotYetAvailable("call env.server.chat_completion(...)")

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        raise NotYetAvailable("text completions are not available; call env.server.chat_completion(...)")

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> tuple[list[Any], ...]:
        raise NotYetAvailable("call env.server.chat_completion(...): tokens are kept by the agent loop")


class HermesServerManager(ServerManager):  # type: ignore[misc]
    """Atropos' ServerManager with every chat completion answered through a `Role`.

    Args:
        configs: one per server; atroposlib's bare `ServerBaseline` stands for its local ports 9004 to 9007.
        role: a role that exists already; None makes one from `configs`.
        tool_parser: the format of tool calls on token-level servers; None: the one that the template writes.
        sandbox: what an agent loop that is given this object plays in, such as one of a hand-written `evaluate`.
    """

    def __init__(
        self,
        configs: list[APIServerConfig],
        *,
        server_class: type[APIServer] = HermesServer,
        reasoning_config: ReasoningConfig | None = None,
        role: Role | None = None,
        tool_parser: str | None = None,
        sandbox: SandboxConfig | None = None,
    ) -> None:
        super().__init__(configs, server_class=server_class, reasoning_config=reasoning_config)
        self.sandbox = sandbox
        self.role = role or create_role("policy", [server_config(config, tool_parser) for config in configs])

    async def chat(self, request: ChatRequest) -> ChatReply:
        """The fast path of the agent loop."""
        return await self.role.chat(request)

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """OpenAI-style: messages, n, temperature, max_tokens, tools, … → ChatCompletion with n choices.

        Raises:
            ServerFailure: no server gave a usable answer after all retries.
        """
        import asyncio

        request = request_of(kwargs, self.reasoning_config)
        count = int(kwargs.get("n") or 1)
        return completion_of(list(await asyncio.gather(*(self.role.chat(request) for _ in range(count)))))

    async def close(self) -> None:
        """Release the connections."""
        await self.role.close()
