"""Implement Atropos' server objects with hermes-rl's model client: shared retries, load balancing, no health polls.

atroposlib creates `HermesServer` through its `server_cls` hook. `HermesServerManager` has the interface of its
ServerManager (`servers`, `chat_completion`, `update_weight`) and sends every call through one `ModelClient`.
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
    """Return Atropos' configuration of a server as a `ServerConfig`.

    An empty key and atroposlib's placeholder "x" count as no key. `tool_parser` names the format of tool calls.
    """
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
    """Return OpenAI-style keyword arguments as a request; unknown arguments are sent unchanged in its body."""
    fields = {name: kwargs[name] for name in _REQUEST_FIELDS if kwargs.get(name) is not None}
    skip = kwargs.get("skip_reasoning", False)
    thinking = None
    if reasoning is not None and reasoning.is_reasoning_kwargs_active() and not skip:
        thinking = ReasoningOptions(effort=reasoning.effort, max_tokens=reasoning.max_tokens)
    handled_names = {*_REQUEST_FIELDS, "messages", "n", "model", "split", "skip_reasoning"}
    extra_arguments = {key: value for key, value in kwargs.items() if key not in handled_names}
    if extra_arguments:
        fields["extra_body"] = {**extra_arguments, **(fields.get("extra_body") or {})}
    return ChatRequest(messages=kwargs["messages"], reasoning=thinking, **fields)


def completion_of(replies: list[ChatReply]) -> ChatCompletion:
    """Return replies as one OpenAI ChatCompletion with one choice per reply."""
    usage = {
        key: sum(int(reply.usage.get(key) or 0) for reply in replies)
        for key in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    choices = [
        {"message": {"content": None, **reply.message}, "finish_reason": reply.finish_reason or "stop"}
        for reply in replies
    ]
    return ChatCompletion.model_validate(
        {**_completion_fields("chat.completion", replies[0].model, choices), "usage": usage}
    )


def text_completion_of(replies: list[ChatReply]) -> Completion:
    """Return replies as one OpenAI Completion with one choice per reply."""
    choices = [
        {
            "text": reply.message.get("content") or "",
            "finish_reason": "length" if reply.finish_reason == "length" else "stop",
        }
        for reply in replies
    ]
    return Completion.model_validate(_completion_fields("text_completion", replies[0].model, choices))


def _completion_fields(kind: str, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields that both kinds of completion have in common."""
    return {
        "id": f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{id(choices):x}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
    }


def _completion_count(kwargs: dict[str, Any]) -> int:
    return int(kwargs.get("n") or 1)


class HermesServer(APIServer):  # type: ignore[misc]
    """Server for atroposlib's `server_cls` hook, which is never polled and always counts as healthy."""

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        super().__init__(config, reasoning_config=reasoning_config)
        self.initialized = True

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Do nothing: calls to a dead server fail and are retried at other servers, so no health polls are needed."""

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        raise NotYetAvailable("call env.server.chat_completion(...)")

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        raise NotYetAvailable("call env.server.completion(...)")

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> tuple[list[Any], ...]:
        raise NotYetAvailable("call env.server.tokens_and_logprobs_completion(...)")


class HermesServerManager(ServerManager):  # type: ignore[misc]
    """Atropos' ServerManager, which sends every call through a `ModelClient`.

    Args:
        configs: the configurations of the servers.
        server_class: the class of the objects in `servers`.
        sandbox: a function that returns the sandbox of agent loops that use this object as their server, such as those
            of a hand-written `evaluate`.
        reasoning_config: the reasoning settings of chat completions.
        role: an existing client; None: create one from `configs`.
        tool_parser: the format of tool calls on token-level servers; None: the format of the chat template.
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
        """Sandbox of agent loops that use this object as their server, by the current configuration."""
        return self._sandbox()

    def loop_failed(self, error: HermesRLError) -> None:
        """Record an error that ended an agent loop and that the policy did not cause."""
        self._failed_loops.append(error)

    def require_no_failed_loops(self) -> None:
        """Raise an error if an agent loop failed, since a hand-written `evaluate` may have counted it as wrong.

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
        """Return the reply to a call of an agent loop."""
        return await self.role.chat(request)

    @property
    def token_level(self) -> bool:
        """True if every server reports the tokens that it sampled."""
        return all(config.kind.exact for config in self.role.configs)

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return a ChatCompletion with `n` choices.

        Args:
            kwargs: OpenAI's arguments: messages, n, temperature, max_tokens, tools, and so on.

        Raises:
            ServerFailure: no server gave a usable response after all retries.
        """
        request = request_of(kwargs, self.reasoning_config)
        return completion_of(await self._sample_several(request, kwargs))

    async def completion(self, **kwargs: Any) -> Completion:
        """Return a Completion with `n` choices.

        Args:
            kwargs: OpenAI's arguments: a text as `prompt` (or token ids as `input_ids`), n, max_tokens, and so on.

        Raises:
            NotImplementedError: the servers are chat servers, which do not accept plain text.
            ServerFailure: no server gave a usable response after all retries.
        """
        replies = await self._sample_several(self._bare_request(kwargs), kwargs)
        return text_completion_of(replies)

    async def tokens_and_logprobs_completion(
        self, **kwargs: Any
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """Return the choices of `completion` as tokens; it has the same arguments and errors.

        Returns:
            The token ids of the prompt, then for each choice its token ids, log-probabilities and finish reason.
        """
        request = self._bare_request(kwargs)
        transcripts = [Transcript() for _ in range(_completion_count(kwargs))]
        replies = await self._sample_several(request, kwargs, transcripts)
        sequences = [transcript.sequences()[0] for transcript in transcripts]
        start = sequences[0].spans[0].start
        return (
            sequences[0].ids[:start].tolist(),
            [sequence.ids[start:].tolist() for sequence in sequences],
            [(sequence.logprobs or [])[start:] for sequence in sequences],
            [reply.finish_reason or "stop" for reply in replies],
        )

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return the log-probabilities of a prompt's tokens, and the `top_k` most likely tokens at each position.

        Args:
            kwargs: the prompt as `input_ids`, `prompt` or `messages`, and `top_k` (or `top_logprobs`, default 1).

        Returns:
            `prompt_tokens`, and for each of them a list in `prompt_topk_token_ids` and one in `prompt_topk_logprobs`:
            first the token itself, then the most likely others. Both lists are empty for the first token, which has no
            context.

        Raises:
            NotImplementedError: the servers do not report tokens, or are scripted.
            UserError: there is no prompt.
            ServerFailure: no server gave a usable response after all retries.
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
        ids, logprobs, scored = [list[int]()], [list[float]()], reply.scored
        best = zip(scored.distill_ids[1:], scored.distill_logprobs[1:], strict=True)
        for token, value, (best_ids, best_logprobs) in zip(reply.prompt[1:], scored.token_logprobs, best, strict=True):
            others = {other: logprob for other, logprob in zip(best_ids, best_logprobs, strict=True) if other != token}
            ids.append([token, *others])
            logprobs.append([value, *others.values()])
        return {
            "prompt_tokens": list(reply.prompt),
            "prompt_topk_token_ids": ids,
            "prompt_topk_logprobs": logprobs,
        }

    @asynccontextmanager
    async def managed_server(
        self, tokenizer: Any = None, base_url: str | None = None, preserve_think_blocks: bool = False
    ) -> AsyncIterator[ManagedServer]:
        """Open a server that records the sampled tokens, in ``get_state()["nodes"]``, for one rollout or one group.

        The arguments are ignored; they exist for compatibility. The servers' configuration names the tokenizer, the
        client keeps a conversation at one server, and the chat template decides whether thinking is retained.

        Raises:
            NotImplementedError: the servers are chat servers, which do not report the sampled tokens.
        """
        self._require_tokens()
        yield ManagedServer(self)

    def _bare_request(self, kwargs: dict[str, Any]) -> ChatRequest:
        self._require_tokens()
        arguments = {key: value for key, value in kwargs.items() if key not in ("prompt", "input_ids")}
        prompt = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["prompt"]
        return replace(request_of({**arguments, "messages": [], "skip_reasoning": True}, None), prompt=prompt)

    def _require_tokens(self) -> None:
        if not self.token_level:
            raise NotImplementedError(
                "a chat server does not report which tokens it sampled: use server_type vllm or sglang for token ids"
            )

    async def _sample_several(
        self, request: ChatRequest, kwargs: dict[str, Any], transcripts: Sequence[Transcript] | None = None
    ) -> list[ChatReply]:
        """Return `n` replies, each sampled with its own seed; the first failure cancels the others and is raised."""
        calls = []
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(_completion_count(kwargs)):
                    seed = drawn_seed(request.seed, "choice", index) if index else request.seed
                    transcript = transcripts[index] if transcripts is not None else request.transcript
                    calls.append(group.create_task(self.role.chat(replace(request, seed=seed, transcript=transcript))))
        except BaseExceptionGroup as errors:  # not `except*`: some versions of Python raise a group from it
            failures, others = errors.split(HermesRLError)
            if failures is None or others is not None:
                raise
            raise failures.exceptions[0] from None
        return [call.result() for call in calls]

    async def close(self) -> None:
        """Close all connections."""
        await self.role.close()


class ManagedServer:
    """Server that records the tokens of its calls; Atropos' environments get it from `server.managed_server()`.

    Single completions extend one sequence; if a call has several choices, each starts its own sequence. An agent loop
    may use this object as its server.
    """

    def __init__(self, manager: HermesServerManager) -> None:
        self._manager = manager
        self._transcripts: list[Transcript] = []

    @property
    def sandbox(self) -> SandboxConfig:
        """Sandbox of agent loops that use this object as their server."""
        return self._manager.sandbox

    def loop_failed(self, error: HermesRLError) -> None:
        """Record an error of an agent loop; see `HermesServerManager.loop_failed`."""
        self._manager.loop_failed(error)

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Return the reply to a call of an agent loop, and add the loop's own transcript to the recorded ones."""
        if request.transcript is not None and not any(
            transcript is request.transcript for transcript in self._transcripts
        ):
            self._transcripts.append(request.transcript)
        return await self._manager.role.chat(request)

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return a ChatCompletion, as `HermesServerManager.chat_completion` does, and record its tokens."""
        request = request_of(kwargs, self._manager.reasoning_config)
        return completion_of(await self._manager._sample_several(request, kwargs, self._transcripts_for(kwargs)))

    async def completion(self, **kwargs: Any) -> Completion:
        """Return a Completion, as `HermesServerManager.completion` does, and record its tokens."""
        request = self._manager._bare_request(kwargs)
        return text_completion_of(await self._manager._sample_several(request, kwargs, self._transcripts_for(kwargs)))

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return log-probabilities of a prompt, as `HermesServerManager.get_logprobs` does; nothing is recorded."""
        return await self._manager.get_logprobs(**kwargs)

    def _transcripts_for(self, kwargs: dict[str, Any]) -> list[Transcript]:
        """Return one transcript per choice: a single choice continues the last one, several choices start new ones."""
        count = _completion_count(kwargs)
        if count == 1 and self._transcripts:
            return self._transcripts[-1:]
        transcripts = [Transcript() for _ in range(count)]
        self._transcripts += transcripts
        return transcripts

    def get_state(self) -> dict[str, Any]:
        """Return ``{"nodes": […]}``: every sequence so far, with tokens, masked_tokens and logprobs."""
        return {
            "nodes": [
                node
                for transcript in self._transcripts
                if transcript.turns
                for node in ManagedState(transcript.sequences)["nodes"]
            ]
        }

    def reset(self) -> None:
        """Delete all recorded tokens."""
        self._transcripts = []
