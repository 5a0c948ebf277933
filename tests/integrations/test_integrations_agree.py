"""One spec through every door: the same sampled tokens have the same scores, and the same tokens are trained on.

Doors to trainers that take packages of their own are played through by tests/real.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_rl import Policy, Rollout, open_env, sync
from hermes_rl.integrations.trl import HermesRollouts
from hermes_rl.runs.process import run_process
from hermes_rl.runs.setup import RunOptions
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.cli.test_run import lines
from tests.commands import LIBRARIES, hermes
from tests.integrations.doors import (
    ALONE,
    CODE,
    COMPARED,
    DESERVED,
    SCORES,
    TEXT,
    TOKENIZER,
    doors_spec,
    policy_server,
    require_deserved,
    sample,
    tokens_of,
    values,
)
from tests.integrations.test_trl import trainer
from tests.service.served import Served

ROOT = Path(__file__).parents[2]


def policy() -> Policy:
    return Policy.sampling(sample, TOKENIZER)


async def test_groups_from_python(tmp_path: Path) -> None:
    async with open_env(doors_spec(tmp_path)) as env:
        groups = [group async for group in env.groups(2, policy(), rows=env.rows())]
        alone = await env.run_group(env.row("1"), 2, policy())
    require_deserved(rollout for group in groups for rollout in group.rollouts)
    assert alone.scores == [SCORES["1"] + COMPARED] * 2


async def test_rollouts_one_by_one(tmp_path: Path) -> None:
    async with open_env(doors_spec(tmp_path, ALONE)) as env:
        require_deserved([await env.run(row, policy()) for row in env.rows()], compared=False)


def test_from_a_script_without_a_loop(tmp_path: Path) -> None:
    with sync(open_env(doors_spec(tmp_path, ALONE))) as env:
        require_deserved([env.run(row, policy()) for row in env.rows()], compared=False)


async def test_a_session_that_is_stepped_by_token_ids(tmp_path: Path) -> None:
    rollouts: list[Rollout] = []
    async with open_env(doors_spec(tmp_path, ALONE)) as env:
        for row in env.rows():
            async with await env.session(row, tokenizer=str(small_tokenizer_path())) as session:
                turn = await session.start()
                while turn is not None:
                    assert turn.prompt_ids is not None
                    answered = await sample(list(turn.prompt_ids), SimpleNamespace())  # type: ignore[arg-type]
                    turn = await session.step(answered.ids, logprobs=answered.logprobs)
                assert session.rollout is not None
                rollouts.append(session.rollout)
    require_deserved(rollouts, compared=False)


def named(url: str) -> dict[str, Any]:
    return {"type": "vllm", "base_url": url, "model": "tiny", "tokenizer": str(small_tokenizer_path())}


async def test_process_into_a_file(tmp_path: Path) -> None:
    async with policy_server().running() as url:
        text = TEXT + "process: {groups: 3, group_size: 2}\n"
        spec = doors_spec(tmp_path, text.replace("servers:", "servers:\n  policy: " + json.dumps(named(url))))
        await run_process(spec, RunOptions("process", out=tmp_path / "run"))
    require_lines(lines(tmp_path / "run" / "rollouts.jsonl"))
    groups = lines(tmp_path / "run" / "groups.jsonl")
    trained = [mask != -100 for group in groups for masks in group["masks"] for mask in masks]
    assert sum(trained) == 2 * sum(map(tokens_of, DESERVED))


def require_lines(recorded: list[dict[str, Any]]) -> None:
    """The lines of rollouts, as a run records them, say what was deserved."""
    assert {line["row_key"] for line in recorded} == set(DESERVED)
    for line in recorded:
        assert values({name: reward["value"] for name, reward in line["rewards"].items()}) == DESERVED[line["row_key"]]
        assert line["score"] == SCORES[line["row_key"]] + COMPARED


async def test_a_trainer_that_is_served(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    shutil.copy(ROOT / "tests" / "trainers" / "counts.py", tmp_path)
    serve = {"trainer": "counts.py:Counts", "group_size": 2, "total_steps": 3, "eval_every": 0, "drop_uniform": False}
    serve["concurrency"] = 1  # groups arrive in the order of their rows, each row once
    async with policy_server().running() as url:
        served = TEXT.replace("servers:", f"serve: {json.dumps(serve)}\nservers:\n  policy: {json.dumps(named(url))}")
        (tmp_path / "doors.yaml").write_text(served)
        command = ("run", "doors.yaml", "serve", "--out", "run")
        done = await asyncio.to_thread(hermes, *command, cwd=tmp_path, loaded=LIBRARIES)
    assert done.returncode == 0, done.stderr
    got = lines(tmp_path / "got.jsonl")
    assert {tuple(line["scores"]) for line in got} == {(score + COMPARED,) * 2 for score in SCORES.values()}
    assert all(line["exact"] for line in got)
    require_lines([line for line in lines(tmp_path / "run" / "rollouts.jsonl") if line["row_key"] in DESERVED])


async def test_over_http(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    for name, text in (("doors", TEXT), ("alone", ALONE)):
        (tmp_path / f"{name}.yaml").write_text(text)
    async with policy_server().running() as url:
        service = await asyncio.to_thread(Served, tmp_path / "doors.yaml")
        with service:
            asked = {"rows": list(DESERVED), "n": 2, "batch": "one", "policy": named(url)}
            *groups, end = await asyncio.to_thread(lambda: list(service.stream(**asked)))
    assert end["groups"] == 3
    for group in groups:
        for one in group["rollouts"]:
            assert values(one["rewards"]) == DESERVED[group["row_key"]]
            assert one["score"] == SCORES[group["row_key"]] + COMPARED
            (sequence,) = one["sequences"]
            assert sum(sequence["mask"]) == tokens_of(group["row_key"])


async def test_trl(tmp_path: Path) -> None:
    def play() -> dict[str, Any]:
        with HermesRollouts(doors_spec(tmp_path), policy=policy()) as rollouts:
            prompts = [key for key in rollouts.rows("train") for _ in range(2)]
            return rollouts.rollout_func(prompts, trainer(num_generations=2)) | {"keys": prompts}

    columns = await asyncio.to_thread(play)
    assert columns["score"] == [SCORES[key] + COMPARED for key in columns["keys"]]
    assert [sum(mask) for mask in columns["env_mask"]] == [tokens_of(key) for key in columns["keys"]]


@pytest.mark.parametrize("key", list(DESERVED))
def test_what_is_deserved_adds_up(key: str) -> None:
    weights = {"right": 1.0, "judged": 0.5, "kept": 2.0}
    assert sum(weights[name] * value for name, value in DESERVED[key].items()) == SCORES[key]
