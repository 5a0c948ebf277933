"""A policy that tries to keep its bad rollouts from being graded scores as one that does not try."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hermes_rl.data.load import load_rows
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.runner import RolloutRunner
from hermes_rl.rollouts.sandboxes import keep_artifacts
from hermes_rl.servers.base import ChatReply, ChatRequest
from hermes_rl.spec.load import load_spec

SPEC = """
dataset: {items: [{q: go}]}
prompt: {user: "{{ q }}"}
toolsets: [terminal]
KIND
servers: {policy: {type: scripted}}
process: {group_size: 2, groups: 1}
"""
JUDGED = """
import json

from hermes_rl.scoring.reward_function import find_reward
from hermes_rl.servers.base import ContextLengthExceeded


class Judge:
    name, scripted = "judge", False

    def __init__(self):
        self.verdicts = {}

    async def answer(self, messages, schema, temperature):
        question = messages[1]["content"]
        if len(question) > 20_000:
            raise ContextLengthExceeded("20,000 characters")
        score = json.dumps({"reason": "", "score": int("right" in question)})
        return "As you wish." if "no JSON" in question else score, {}


async def judged(result):
    (score,) = await find_reward("llm_judge", None).function([result], {"judge": Judge()}, rubric="Is it so?")
    return score
"""
READS = """
def reads(ctx):
    return ctx.artifact("fix") == b"right\\n" and ctx.terminal("true")["exit_code"] == 0
"""


@dataclass(frozen=True)
class Kind:
    """A task, what a good and a bad rollout do in it, and what a bad one does that would rather not be graded."""

    groups: int
    spec: str
    good: str
    bad: str
    vetoes: tuple[str, ...]
    by_command: bool = False


KINDS: Mapping[str, Kind] = {
    "number": Kind(
        60, "rewards: {numeric_close: {args: {target: 42}}}", "42", "41", ("e7", "9" * 5_000, "1e999", "−.e−3")
    ),
    "JSON": Kind(
        60,
        'rewards: {json_matches: {args: {schema: {multipleOf: 0.5, items: {$ref: "#"}}, equals: 4}}}',
        "4.0",
        "5",
        ("NaN", "-Infinity", "1e999", "1" * 400, "[" * 450 + "]" * 450, "[" * 100_000),
    ),
    "judge": Kind(
        60,
        'rewards: {judged: {fn: "judged.py:judged"}}',
        "right",
        "wrong",
        ("no JSON, please", "long " * 50_000, "no JSON " * 9_000, "\ud800\0"),
    ),
    "artifact": Kind(
        20,
        'artifacts: {fix: {path: fix}, tree: {path: tree}}\nrewards: {reads: {fn: "reads.py:reads", sandbox: fresh}}',
        "echo right > fix",
        "echo wrong > fix",
        (
            "mkdir fix",
            "ln -s fix fix",
            "chmod 0 .; true",
            "echo wrong > fix; mkdir tree; touch tree/$(printf 'n%.0s' $(seq 255))",
            "echo wrong > fix; mkdir tree; truncate -s 65M tree/x",
        ),
        by_command=True,
    ),
}


class Player:
    """A policy whose rollouts are good half of the time; where one is bad, it may do what it can not to be graded."""

    scripted = False

    def __init__(self, kind: Kind, *, vetoes: bool) -> None:
        self.kind, self.vetoes = kind, vetoes

    async def chat(self, request: ChatRequest) -> ChatReply:
        assert request.rollout_id is not None
        draw = Random(request.rollout_id)
        kind = self.kind
        does = kind.good if draw.random() < 0.5 else draw.choice(kind.vetoes) if self.vetoes else kind.bad
        said: dict[str, Any] = {"role": "assistant", "content": does}
        if kind.by_command and len(request.messages) == 1:
            call = {"name": "terminal", "arguments": {"command": does}}
            said = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": call}]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        return ChatReply(said, "stop" if said["content"] else "tool_calls", usage, model="m", server_type="test")

    async def close(self) -> None: ...


async def scores(folder: Path, kind: Kind, *, vetoes: bool) -> list[float]:
    """Play the groups of a kind; returns the scores of all members. None is dropped, and none played again."""
    folder.mkdir()
    (folder / "judged.py").write_text(JUDGED)
    (folder / "reads.py").write_text(READS)
    (folder / "spec.yaml").write_text(SPEC.replace("KIND", kind.spec))
    spec = load_spec(folder / "spec.yaml")
    (row,) = load_rows(spec, "train", notify=print)
    async with CompiledSpec(spec) as compiled:
        compiled.keep = partial(keep_artifacts, folder / "artifacts")
        runner = RolloutRunner(compiled, policy=Player(kind, vetoes=vetoes), concurrency=8)
        groups = await asyncio.gather(
            *(runner.start(replace(row, key=f"{number}"), f"{number}", 2) for number in range(kind.groups))
        )
    assert [(group.dropped, group.detail) for group in groups if group.dropped is not None] == []
    assert runner.replayed == 0
    return [score for group in groups for score in group.scores]


@pytest.mark.slow
async def test_a_policy_that_vetoes_its_bad_rollouts_scores_as_one_that_does_not(tmp_path: Path) -> None:
    shares: list[float] = []
    for vetoes in (True, False):
        found = [
            score
            for name, kind in KINDS.items()
            for score in await scores(tmp_path / f"{name}-{vetoes}", kind, vetoes=vetoes)
        ]
        assert len(found) == 2 * 200
        shares.append(sum(found) / len(found))
    error = math.sqrt(sum(share * (1 - share) / 400 for share in shares))
    assert abs(shares[0] - shares[1]) <= 2 * error, shares
    assert 0.4 < shares[1] < 0.6
