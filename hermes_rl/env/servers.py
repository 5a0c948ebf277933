"""Atropos' server objects over our transport: one retry policy, no billed health polls, several servers balanced.

`HermesServer` sits on atroposlib's `server_cls` hook; `HermesServerManager` keeps the interface of its ServerManager
(`servers`, `chat_completion`, `update_weight`) and answers every call through one `ModelClient`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig, ReasoningConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from openai.types.chat.chat_completion import ChatCompletion
from openai.types.completion import Completion

from hermes_rl.agent.result import ManagedState
from hermes_rl.errors import HermesRLError, NotYetAvailable, RunError, UserError
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.servers.base import ChatReply, ChatRequest, ReasoningOptions, Secret, ServerConfig, drawn_seed
from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.factory import create_client
from hermes_rl.tokens.transcript import Transcript

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
    fields = {name: kwargs[name] for name in _REQUEST_FIELDS if kwargs.get(name) is not None}
    skip = kwargs.get("skip_reasoning", False)
    thinking = None
    if reasoning is not None and reasoning.is_reasoning_kwargs_active() and not skip:
        thinking = ReasoningOptions(effort=reasoning.effort, max_tokens=reasoning.max_tokens)
    known = {*_REQUEST_FIELDS, "messages", "n", "model", "split", "skip_reasoning"}
    further = {key: value for key, value in kwargs.items() if key not in known}
    if further:
        fields["extra_body"] = {**further, **(fields.get("extra_body") or {})}
    return ChatRequest(messages=kwargs["messages"], reasoning=thinking, **fields)


def completion_of(replies: list[ChatReply]) -> ChatCompletion:
    """Return replies as one OpenAI ChatCompletion with a choice each."""
    usage = {
        key: sum(int(reply.usage.get(key) or 0) for reply in replies)
        for key in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    choices = [
        {"message": {"content": None, **reply.message}, "finish_reason": reply.finish_reason or "stop"}
        for reply in replies
    ]
    return ChatCompletion.model_validate({**_answer("chat.completion", replies[0].model, choices), "usage": usage})


def text_completion_of(replies: list[ChatReply]) -> Completion:
    """Return replies as one OpenAI Completion with a choice each."""
    choices = [
        {
            "text": reply.message.get("content") or "",
            "finish_reason": "length" if reply.finish_reason == "length" else "stop",
        }
        for reply in replies
    ]
    return Completion.model_validate(_answer("text_completion", replies[0].model, choices))


def _answer(kind: str, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what both kinds of answer have."""
    return {
        "id": f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{id(choices):x}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
    }


def _count(kwargs: dict[str, Any]) -> int:
    return int(kwargs.get("n") or 1)


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
        raise NotYetAvailable("call env.server.completion(...)")

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> tuple[list[Any], ...]:
        raise NotYetAvailable("call env.server.tokens_and_logprobs_completion(...)")


class HermesServerManager(ServerManager):  # type: ignore[misc]
    """Atropos' ServerManager with every chat completion answered through a `ModelClient`.

    Args:
        configs: one per server; atroposlib's bare `ServerBaseline` stands for its local ports 9004 to 9007.
        role: a role that exists already; None makes one from `configs`.
        tool_parser: the format of tool calls on token-level servers; None: the one that the template writes.
        sandbox: tells what an agent loop that is given this object plays in, such as one of a hand-written `evaluate`.
    """

    def __init__(
        self,
        configs: list[APIServerConfig],
        *,
        server_class: type[APIServer],
        sandbox: Callable[[], SandboxConfig],
        reasoning_config: ReasoningConfig | None = None,
        role: ModelClient | None = None,
        tool_parser: str | None = None,
    ) -> None:
        super().__init__(configs, server_class=server_class, reasoning_config=reasoning_config)
        self._sandbox = sandbox
        self._failed_loops: list[HermesRLError] = []
        self.role = role or create_client("policy", [server_config(config, tool_parser) for config in configs])

    @property
    def sandbox(self) -> SandboxConfig:
        """What an agent loop that is given this object plays in, by the configuration as it is now."""
        return self._sandbox()

    def loop_failed(self, error: HermesRLError) -> None:
        """Note that an agent loop that was given this object ended without an answer of the policy."""
        self._failed_loops.append(error)

    def require_no_failed_loops(self) -> None:
        """Raise what an `evaluate` written by hand may have caught and counted as an answer of the policy.

        Raises:
            UserError: the environment is wrong.
            RunError: infrastructure failed.
        """
        if not self._failed_loops:
            return
        wrong = next((loop for loop in self._failed_loops if isinstance(loop, UserError)), None)
        message = (
            f"{len(self._failed_loops)} agent loops of this evaluation failed, which is nothing that the policy did; "
            f"where its own code caught that, its numbers are too low. First: {wrong or self._failed_loops[0]}"
        )
        raise UserError(message) if wrong is not None else RunError(message)

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Answer a call of an agent loop."""
        return await self.role.chat(request)

    @property
    def token_level(self) -> bool:
        """Whether every server says which tokens it sampled."""
        return all(config.kind.exact for config in self.role.configs)

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """OpenAI-style: messages, n, temperature, max_tokens, tools, … → ChatCompletion with n choices; raises
        `ServerFailure` where no server gave a usable answer after all retries."""
        request = request_of(kwargs, self.reasoning_config)
        return completion_of(await self._several(request, kwargs))

    async def completion(self, **kwargs: Any) -> Completion:
        """OpenAI-style: a text as `prompt` (or ids as `input_ids`), n, max_tokens, … → Completion with n choices.

        Raises:
            NotImplementedError: the servers are chat servers, which take no bare text.
            ServerFailure: no server gave a usable answer after all retries.
        """
        replies = await self._several(self._bare(kwargs), kwargs)
        return text_completion_of(replies)

    async def tokens_and_logprobs_completion(
        self, **kwargs: Any
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """As `completion`, in tokens: of the prompt, of each choice, their log-probabilities, and why each ended."""
        request = self._bare(kwargs)
        transcripts = [Transcript() for _ in range(_count(kwargs))]
        replies = await self._several(request, kwargs, transcripts)
        sequences = [transcript.sequences()[0] for transcript in transcripts]
        start = sequences[0].spans[0].start
        return (
            sequences[0].ids[:start].tolist(),
            [sequence.ids[start:].tolist() for sequence in sequences],
            [(sequence.logprobs or [])[start:] for sequence in sequences],
            [reply.finish_reason or "stop" for reply in replies],
        )

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return how likely the tokens of a prompt are: `input_ids`, `prompt` or `messages`, and `top_k` of each place.

        Returns:
            `prompt_tokens`, and for each of them `prompt_topk_token_ids` with `prompt_topk_logprobs`: the token itself,
            then the likeliest others. Both are empty for the first token, which nothing comes before.

        Raises:
            NotImplementedError: the servers do not know tokens, or are scripted.
            ServerFailure: no server gave a usable answer after all retries.
        """
        self._require_tokens()
        if any(config.type == "scripted" for config in self.role.configs):
            raise NotImplementedError("a scripted server has no model that could tell how likely a text is")
        prompt = next((kwargs[name] for name in ("input_ids", "prompt") if kwargs.get(name) is not None), None)
        top = max(1, int(kwargs.get("top_k", kwargs.get("top_logprobs", 1))))
        request = ChatRequest(kwargs.get("messages") or (), kwargs.get("tools"), prompt=prompt, scored=top)
        if prompt is None and not request.messages:
            raise UserError("get_logprobs needs input_ids, prompt or messages")
        reply = await self.role.chat(request)
        assert reply.scored is not None
        places = [()] + [
            ((own, value), *((token, other) for token, other in zip(best, values, strict=True) if token != own))
            for own, value, best, values in zip(
                reply.prompt[1:],
                reply.scored.own,
                reply.scored.distill_ids[1:],
                reply.scored.distill_logprobs[1:],
                strict=True,
            )
        ]
        return {
            "prompt_tokens": list(reply.prompt),
            "prompt_topk_token_ids": [[token for token, _ in place] for place in places],
            "prompt_topk_logprobs": [[value for _, value in place] for place in places],
        }

    @asynccontextmanager
    async def managed_server(
        self, tokenizer: Any = None, base_url: str | None = None, preserve_think_blocks: bool = False
    ) -> AsyncIterator[ManagedServer]:
        """Open a server that remembers what it samples, as ``get_state()["nodes"]``; for one rollout or one group.

        The arguments are accepted for compatibility: the tokenizer is that of the servers' configuration, calls stay
        with one server by themselves, and thinking is kept as the chat template has it. Raises `NotImplementedError`
        for chat servers, which do not say which tokens they sampled.
        """
        self._require_tokens()
        yield ManagedServer(self)

    def _bare(self, kwargs: dict[str, Any]) -> ChatRequest:
        self._require_tokens()
        arguments = {key: value for key, value in kwargs.items() if key not in ("prompt", "input_ids")}
        prompt = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["prompt"]
        return replace(request_of({**arguments, "messages": [], "skip_reasoning": True}, None), prompt=prompt)

    def _require_tokens(self) -> None:
        if not self.token_level:
            raise NotImplementedError(
                "a chat server does not say which tokens it sampled: use server_type vllm or sglang for token ids"
            )

    async def _several(
        self, request: ChatRequest, kwargs: dict[str, Any], transcripts: Sequence[Transcript] | None = None
    ) -> list[ChatReply]:
        """As many answers as `n` asks for, each with noise of its own; the first that fails ends the others."""
        calls = []
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(_count(kwargs)):
                    seed = drawn_seed(request.seed, "choice", number) if number else request.seed
                    transcript = transcripts[number] if transcripts is not None else request.transcript
                    calls.append(group.create_task(self.role.chat(replace(request, seed=seed, transcript=transcript))))
        except BaseExceptionGroup as errors:  # not `except*`: some versions of Python raise a group out of it again
            failures, others = errors.split(HermesRLError)
            if failures is None or others is not None:
                raise
            raise failures.exceptions[0] from None
        return [call.result() for call in calls]

    async def close(self) -> None:
        """Release the connections."""
        await self.role.close()


class ManagedServer:
    """Calls whose tokens are remembered: what Atropos' environments get of `server.managed_server()`.

    Completions of one conversation extend one sequence; each of several choices has one of its own. An agent loop
    takes it as its server.
    """

    def __init__(self, manager: HermesServerManager) -> None:
        self._manager = manager
        self._transcripts: list[Transcript] = []

    @property
    def sandbox(self) -> SandboxConfig:
        """What an agent loop plays in."""
        return self._manager.sandbox

    def loop_failed(self, error: HermesRLError) -> None:
        """See `HermesServerManager.loop_failed`."""
        self._manager.loop_failed(error)

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Answer a call of an agent loop, and remember the transcript that the loop keeps itself."""
        if request.transcript is not None and not any(
            transcript is request.transcript for transcript in self._transcripts
        ):
            self._transcripts.append(request.transcript)
        return await self._manager.role.chat(request)

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """As `HermesServerManager.chat_completion`."""
        request = request_of(kwargs, self._manager.reasoning_config)
        return completion_of(await self._manager._several(request, kwargs, self._for(kwargs)))

    async def completion(self, **kwargs: Any) -> Completion:
        """As `HermesServerManager.completion`."""
        request = self._manager._bare(kwargs)
        return text_completion_of(await self._manager._several(request, kwargs, self._for(kwargs)))

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """As `HermesServerManager.get_logprobs`."""
        return await self._manager.get_logprobs(**kwargs)

    def _for(self, kwargs: dict[str, Any]) -> list[Transcript]:
        """Return the transcripts of the choices: one choice goes on with the conversation, several begin their own."""
        count = _count(kwargs)
        if count == 1 and self._transcripts:
            return self._transcripts[-1:]
        transcripts = [Transcript() for _ in range(count)]
        self._transcripts += transcripts
        return transcripts

    def get_state(self) -> dict[str, Any]:
        """``{"nodes": […]}``: every sequence so far, with tokens, masked_tokens and logprobs."""
        return {
            "nodes": [
                node
                for transcript in self._transcripts
                if transcript.turns
                for node in ManagedState(transcript.sequences)["nodes"]
            ]
        }

    def reset(self) -> None:
        """Forget what was sampled."""
        self._transcripts = []
