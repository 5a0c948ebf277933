"""llama.cpp's server as a chat server: tools, groups with tokens, its context limit, and its crash."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.servers.base import ChatRequest, ContextLengthExceeded, ServerConfig
from hermes_rl.servers.factory import create_client
from tests.real.conftest import LlamaCpp, hermes, policy

COMPONENT = "llama.cpp's server"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCpp]:
    started = LlamaCpp(model, tmp_path_factory.mktemp("llama") / "log")
    started.start()
    yield started
    started.kill()


def rollouts(sums: Path) -> list[dict[str, Any]]:
    lines = (sums.parent / "run" / "rollouts.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_groups_with_tools_run_and_get_tokens_from_their_messages(server: LlamaCpp, model: Path, sums: Path) -> None:
    few = ["--set", "process.groups=12", "--set", "process.concurrency=16", "--out", "run"]
    hermes("run", sums, "process", *policy(server, model, type="openai"), *few, folder=sums.parent)
    played = rollouts(sums)
    assert [one["error"] for one in played if one["error"] is not None] == []
    calls = [call for one in played for turn in one["messages"] for call in turn.get("tool_calls") or ()]
    assert {"add", "multiply"} <= {call["function"]["name"] for call in calls}
    assert max(one["turns"] for one in played) >= 3
    assert any(turn.get("reasoning_content") for one in played for turn in one["messages"])
    groups = [json.loads(line) for line in (sums.parent / "run" / "groups.jsonl").read_text("utf-8").splitlines()]
    assert all(tokens for group in groups for tokens in group["tokens"])
    assert len({json.dumps(group["messages"]) for group in groups}) == len(groups)


async def test_full_context_is_recognised(server: LlamaCpp) -> None:
    async with create_client("policy", [ServerConfig("openai", f"{server.url}/v1", "tiny")]) as client:
        with pytest.raises(ContextLengthExceeded):
            await client.chat(ChatRequest([{"role": "user", "content": "1" * 2000}]))
        used = (await client.chat(ChatRequest([{"role": "user", "content": "1"}], max_tokens=1))).usage
        exact = 1024 - used["prompt_tokens"] + 1
        ended: list[int | None] = []
        for digits in range(exact - 2, exact + 2):
            try:
                reply = await client.chat(ChatRequest([{"role": "user", "content": "1" * digits}]))
                ended.append(reply.usage["prompt_tokens"])
            except ContextLengthExceeded:
                ended.append(None)
    assert ended == [1022, 1023, None, None]


def test_a_server_that_is_killed_and_comes_back_costs_nothing(server: LlamaCpp, model: Path, sums: Path) -> None:
    more = ["--set", "process.groups=24", "--set", "process.concurrency=8", "--out", "run"]
    given = policy(server, model, type="openai")
    running = hermes("run", sums, "process", *given, *more, folder=sums.parent, background=True)
    file = sums.parent / "run" / "groups.jsonl"
    while running.poll() is None and (not file.exists() or file.stat().st_size == 0):
        time.sleep(0.02)
    server.kill()
    assert running.poll() is None
    time.sleep(3)
    server.start()
    said, _ = running.communicate(timeout=200)
    assert running.returncode == 0, said
    assert "is back after" in said
    assert len(file.read_text("utf-8").splitlines()) == 24
    assert [one["error"] for one in rollouts(sums) if one["error"] is not None] == []


def test_doctor_finds_no_fault_with_the_server(server: LlamaCpp, model: Path, sums: Path) -> None:
    said = hermes("doctor", sums, *policy(server, model, type="openai"), folder=sums.parent)
    assert "FAIL" not in said
