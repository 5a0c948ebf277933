"""LiteLLM's proxy, a gateway that rewrites requests and replies, in front of a real vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.servers.base import ChatRequest, ContextLengthExceeded, ServerConfig
from hermes_rl.servers.factory import create_client
from tests.real.conftest import LiteLlm, Vllm, hermes, policy

COMPONENT = "LiteLLM's proxy before vLLM"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def proxy(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiteLlm]:
    server = LiteLlm(vllm, tmp_path_factory.mktemp("litellm") / "log")
    server.start()
    yield server
    server.kill()


def test_groups_with_tools_run_through_the_proxy(proxy: LiteLlm, model: Path, sums: Path) -> None:
    few = ["--set", "process.groups=6", "--set", "process.concurrency=8", "--out", "run"]
    hermes("run", sums, "process", *policy(proxy, model, type="openai"), *few, folder=sums.parent)
    lines = (sums.parent / "run" / "rollouts.jsonl").read_text("utf-8").splitlines()
    rollouts: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert [one["error"] for one in rollouts if one["error"] is not None] == []
    calls = [call for one in rollouts for turn in one["messages"] for call in turn.get("tool_calls") or ()]
    assert {"add", "multiply"} <= {call["function"]["name"] for call in calls}
    assert max(one["turns"] for one in rollouts) >= 3
    groups = [json.loads(line) for line in (sums.parent / "run" / "groups.jsonl").read_text("utf-8").splitlines()]
    assert all(tokens for group in groups for tokens in group["tokens"])


@pytest.mark.parametrize("behind", [True, False])
async def test_full_context_is_recognised_with_and_without_the_proxy(proxy: LiteLlm, vllm: Vllm, behind: bool) -> None:
    """A prompt that is too long, and all lengths around the one that fills the context exactly."""
    url = (proxy if behind else vllm).url
    async with create_client("policy", [ServerConfig("openai", f"{url}/v1", "tiny")]) as client:
        with pytest.raises(ContextLengthExceeded):
            await client.chat(ChatRequest([{"role": "user", "content": "1" * 2000}]))
        ended = []
        used = (await client.chat(ChatRequest([{"role": "user", "content": "1"}], max_tokens=1))).usage
        exact = 1024 - used["prompt_tokens"] + 1
        for digits in range(exact - 2, exact + 2):
            try:
                reply = await client.chat(ChatRequest([{"role": "user", "content": "1" * digits}]))
                ended.append(reply.usage["prompt_tokens"])
            except ContextLengthExceeded:
                ended.append(None)
    assert ended == [1022, 1023, None, None]
