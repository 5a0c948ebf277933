"""`transformers serve` as a chat server: tools, groups with tokens of the messages, and an evaluation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.conftest import TransformersServe, hermes, policy

COMPONENT = "transformers serve"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersServe]:
    """Yield a server that samples; without `do_sample` in the model's directory it is greedy regardless of the
    request.
    """
    folder = tmp_path_factory.mktemp("transformers")
    shutil.copytree(model, folder / "model")
    file = folder / "model" / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), "do_sample": True, "top_k": 0}), "utf-8")
    started = TransformersServe(folder / "model", folder / "log")
    started.start()
    yield started
    started.kill()


def test_groups_with_tools_run_and_get_tokens_from_their_messages(server: TransformersServe, sums: Path) -> None:
    few = ["--set", "process.groups=1", "--set", "process.group_size=2", "--out", "run"]
    given = policy(server, server.model, type="openai", model=str(server.model))
    hermes("run", sums, "process", *given, *few, folder=sums.parent)
    lines = (sums.parent / "run" / "rollouts.jsonl").read_text("utf-8").splitlines()
    # A call that is no JSON is an error 500 of this server: it is sent again, and a rollout may fail by it.
    rollouts = [one for line in lines if (one := json.loads(line))["error"] is None]
    assert len(rollouts) >= 2
    asked = [
        call["function"]["name"]
        for one in rollouts
        for turn in one["messages"]
        for call in turn.get("tool_calls") or ()
    ]
    assert set(asked) & {"add", "multiply"}
    assert max(one["turns"] for one in rollouts) >= 2
    assert all(one["usage"]["completion_tokens"] > 0 for one in rollouts)
    groups = [json.loads(line) for line in (sums.parent / "run" / "groups.jsonl").read_text("utf-8").splitlines()]
    assert all(tokens for group in groups for tokens in group["tokens"])
