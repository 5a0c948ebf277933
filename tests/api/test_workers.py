"""`open_env` with workers: what they play is what this process would play, with policies that requests bring along."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hermes_rl
from hermes_rl import Group, Policy, Rollout, open_env
from hermes_rl.errors import UserError
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.api.summing import CODE, COMPARED, TEXT, Sampler, spec_in
from tests.service.playing import policy as token_policy
from tests.service.served import SOLUTION

SCRIPTED = TEXT + "servers: {policy: {type: scripted, deviate: 0.5}}\n" + SOLUTION
SECRET = "sk-that-nobody-may-read"


def told(rollout: Rollout) -> Any:
    """All of a rollout that no clock says."""
    return (
        rollout.id,
        rollout.seed,
        rollout.score,
        rollout.ending,
        rollout.messages,
        {name: reward.value for name, reward in rollout.rewards.items()},
        [(one.prompt_ids, one.response_ids, one.mask, one.logprobs, one.weights) for one in rollout.examples()],
    )


def children() -> dict[int, str]:
    """The command lines of the children of this process."""
    mine = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    found = [int(pid) for one in mine for pid in one.read_text().split()]
    return {pid: Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace") for pid in found if alive(pid)}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def workers() -> list[int]:
    return [pid for pid, command in children().items() if "hermes_rl.runs.worker" in command]


async def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------------- what is played


async def test_workers_play_what_one_process_plays(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, SCRIPTED)
    played: list[dict[str, Any]] = []
    for number in (1, 2):
        before = set(workers())
        async with open_env(spec, record=tmp_path / str(number), workers=number) as env:
            assert len(set(workers()) - before) == (0 if number == 1 else 2)
            groups = [group async for group in env.groups(3, rows=env.rows(), batch="b")]
            alone = await env.play(env.rows()[0], group="alone", sampling={"max_turns": 1})
            deterministic = Policy.server("scripted", None, None)
            other = await env.play_group(env.rows()[1], 2, deterministic, group="other")
        assert set(workers()) == before, "no worker stays"
        assert all(group.certificate is not None and group.certificate.exact for group in [*groups, other])
        played.append({one.id: told(one) for group in [*groups, other] for one in group.rollouts} | {"-": told(alone)})
    assert played[0] == played[1]
    assert {group.scores.count(1.0) for group in groups} <= {1, 2}, "some deviate, by the seed"
    assert other.scores == [1.0, 1.0]
    assert alone.ending == "max_turns"
    assert len((tmp_path / "2" / "rollouts.jsonl").read_text().splitlines()) == 4 * 3 + 1 + 2
