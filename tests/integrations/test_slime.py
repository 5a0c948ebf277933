"""slime's door over a stand-in of its `Sample` and of its router: samples, endings, hooks, refusals."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest

import hermes_rl
from hermes_rl.errors import UserError
from hermes_rl.integrations import slime
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.api.summing import CODE, COMPARED, MASKED, TEXT, TOKENIZER, write
from tests.env.test_token_exact import tokenizer_folder
from tests.integrations.doors import policy_server
from tests.real.doors_played import MEMBERS, require_as_everywhere, write_doors
from tests.servers.token_policy import TokenPolicy


@dataclass
class Sample:
    """What of slime's `Sample` is used, with its names and defaults."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    await slime.close()


def arguments(folder: Path, url: str, text: str = TEXT, **given: Any) -> SimpleNamespace:
    (folder / "code.py").write_text(CODE)
    (folder / "sums.yaml").write_text(text)
    host, port = url.removeprefix("http://").split(":")
    plain = {
        "hermes_spec": str(folder / "sums.yaml"), "sglang_router_ip": host, "sglang_router_port": port.split("/")[0],
        "hf_checkpoint": None,
        "custom_reward_post_process_path": None, "rollout_max_context_len": None, "hermes_retries": 0,
        "advantage_estimator": "grpo", "rewards_normalization": True, "grpo_std_normalization": True,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **given})


async def samples(args: Any, size: int = 4) -> list[Sample]:
    async with hermes_rl.open_env(args.hermes_spec) as env:
        keys = [row.key for row in env.rows()]
    return [
        Sample(number, size * number + member, metadata={"key": key})
        for number, key in enumerate(keys)
        for member in range(size)
    ]


SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 200, "stop": None}


async def test_masked_rollout_has_a_score_and_no_trained_token(tmp_path: Path) -> None:
    policy = TokenPolicy(TOKENIZER, lambda text, _: write(text), ("generate",))
    async with policy.running() as url:
        args = arguments(
            tmp_path, url, MASKED, hf_checkpoint=str(tokenizer_folder(tmp_path / "t", keeps_thinking=True))
        )
        one = await slime.generate(args, (await samples(args))[0], dict(SAMPLING))
    assert (one.reward, one.remove_sample) == (0.0, False)
    assert one.response_length > 1 and not any(one.loss_mask)


@pytest.mark.parametrize("workers", [None, pytest.param(2, marks=pytest.mark.slow)])
async def test_samples_hold_every_sampled_token_with_the_version_of_its_weights(
    tmp_path: Path, workers: int | None
) -> None:
    folder = str(tokenizer_folder(tmp_path / "t", keeps_thinking=True))
    policy = TokenPolicy(TOKENIZER, lambda text, chance: write(text, right=chance.random() < 0.5), ("generate",))
    async with policy.running() as url:
        args = arguments(tmp_path, url, hf_checkpoint=folder, hermes_workers=workers)
        given = await samples(args)
        made = await asyncio.gather(*(slime.generate(args, one, dict(SAMPLING)) for one in given))
    pairs = []
    for one in made:
        assert one.response_length == len(one.loss_mask) == len(one.rollout_log_probs)
        response = one.tokens[-one.response_length :]
        assert one.status is Sample.Status.COMPLETED
        assert one.weight_versions == ["0"]
        pairs += [pair for *pair, kept in zip(response, one.rollout_log_probs, one.loss_mask, strict=True) if kept]
    logged = [[token, value] for one in policy.log for token, value in zip(one.ids, one.logprobs, strict=True)]
    assert sorted(pairs) == sorted(logged)
    assert {one.reward for one in made} == {0.0, 1.0}
    assert slime.whole(args, made)


async def test_several_sequences_need_the_reward_hook_and_share_a_rollout_id(tmp_path: Path) -> None:
    folder = str(tokenizer_folder(tmp_path / "t", keeps_thinking=False))
    thought = "<think>\nI add.\n</think>\n\n"
    policy = TokenPolicy(TOKENIZER, lambda text, chance: thought + write(text), ("generate",))
    async with policy.running() as url:
        args = arguments(tmp_path, url, hf_checkpoint=folder, custom_reward_post_process_path=slime.REWARDS)
        given = await samples(args, size=1)
        made = await slime.generate(args, given[0], dict(SAMPLING))
        args.custom_reward_post_process_path = None
        with pytest.raises(UserError, match=r"2 sequences, .* set --custom-reward-post-process-path"):
            await slime.generate(args, given[1], dict(SAMPLING))
    assert [one.rollout_id for one in made] == [0, 0]
    assert [one.reward for one in made] == [1.0, 1.0]


async def test_a_failure_is_aborted_removed_and_has_no_reward(tmp_path: Path) -> None:
    policy = TokenPolicy(TOKENIZER, lambda text, chance: "", ("generate",))
    async with policy.running() as url:
        args = arguments(tmp_path, url, hf_checkpoint=str(tokenizer_folder(tmp_path / "t", keeps_thinking=True)))
        text = (tmp_path / "sums.yaml").read_text()
        (tmp_path / "code.py").write_text(CODE + "\n\ndef broken(item):\n    raise RuntimeError('gone')\n")
        (tmp_path / "sums.yaml").write_text(text.replace("{right:", '{broken: {fn: "code.py:broken"}, right:'))
        policy.write = lambda text, chance: write(text)
        given = await samples(args, size=1)
        failed = await slime.generate(args, given[0], dict(SAMPLING))
        again = await slime.generate(args, given[1], dict(SAMPLING))
        args.custom_reward_post_process_path = slime.REWARDS
        (listed,) = await slime.generate(args, given[2], dict(SAMPLING))
    for one in (failed, again, listed):
        assert (one.status, one.remove_sample, one.reward) == (Sample.Status.ABORTED, True, None)
        assert one.metadata["stop_reason"] == "reward_failure"
    assert not slime.whole(args, [failed])
    assert not slime.whole(args, [[listed]])


async def test_common_spec_gives_the_same_scores_and_tokens_in_every_integration(tmp_path: Path) -> None:
    async with policy_server().running() as url:
        args = arguments(tmp_path, url, hf_checkpoint=str(small_tokenizer_path()))
        args.hermes_spec = str(tmp_path / "alone.yaml")
        write_doors(tmp_path)
        given = await samples(args, MEMBERS)
        made = await asyncio.gather(*(slime.generate(args, one, dict(SAMPLING)) for one in given))
        require_as_everywhere(((one.metadata["key"], one.reward, sum(one.loss_mask)) for one in made), compared=False)
        args.hermes_spec = str(tmp_path / "doors.yaml")
        with pytest.raises(UserError, match=r"rewards.judged.args.fallback, rewards.longest compares the members"):
            await slime.generate(args, given[0], dict(SAMPLING))


def test_the_baseline_counts_a_rollout_once_and_failures_not_at_all(tmp_path: Path) -> None:
    args = arguments(tmp_path, "http://h:1")
    two = [Sample(0, 0, 0, reward=1.0), Sample(0, 0, 0, reward=1.0)]
    rest = [Sample(0, 1, 1, reward=0.0), Sample(0, 2, 2, reward=0.5), Sample(0, 3, 3, remove_sample=True)]
    raw, made = slime.rewards(args, [*two, *rest, Sample(1, 4, 4, reward=3.0)])
    scores = [1.0, 0.0, 0.5]
    assert raw == [1.0, 1.0, 0.0, 0.5, 0.5, 3.0]
    wanted = [(score - fmean(scores)) / (stdev(scores) + 1e-6) for score in (1.0, 1.0, 0.0, 0.5)]
    assert made == pytest.approx([*wanted, 0.0, 0.0])
    args.rewards_normalization = False
    assert slime.rewards(args, rest)[0] == slime.rewards(args, rest)[1]
    assert not any(map(math.isnan, made))


async def test_what_slime_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    folder = str(tokenizer_folder(tmp_path / "t", keeps_thinking=True))
    args = arguments(tmp_path, "http://127.0.0.1:9", hf_checkpoint=folder)
    given = await samples(args, size=1)
    with pytest.raises(UserError, match=r"top_p=0.9 of slime is not applied"):
        await slime.generate(args, given[0], {**SAMPLING, "top_p": 0.9})
    for metadata in ({}, None, ["key"], "key"):
        with pytest.raises(UserError, match=r"no `key` in its metadata: .*docs/integrations/slime.md"):
            await slime.generate(args, Sample(metadata=metadata), dict(SAMPLING))  # type: ignore[arg-type]
    del args.hermes_spec
    with pytest.raises(UserError, match="name the spec as `hermes_spec`"):
        await slime.generate(args, given[0], dict(SAMPLING))
    args = arguments(tmp_path, "http://127.0.0.1:8", COMPARED, hf_checkpoint=folder)
    with pytest.raises(UserError, match="compares the members of a group, and slime runs each rollout by itself"):
        await slime.generate(args, given[0], dict(SAMPLING))
