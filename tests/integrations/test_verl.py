"""verl's door without verl: how rollouts become its outputs, which members of a group wait for each other, and what is
refused by name."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hermes_rl import Sampled, Sampling
from hermes_rl.errors import RunError, UserError
from hermes_rl.integrations import verl
from hermes_rl.integrations.verl import VerlAgentLoop
from tests.api.summing import CODE, COMPARED, MASKED, TEXT, TOKENIZER, Sampler, sampled
from tests.env.test_token_exact import tokenizer_folder
from tests.waiting import until

PARAMETERS = {"temperature": 1.0, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


class Manager:
    """verl's server manager over a `Sampler`; its weights change while the second turn is sampled."""

    def __init__(self, **given: Any) -> None:
        self.sampler = Sampler(**given)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.asked.append((request_id, sampling_params))
        answer: Sampled = await self.sampler(prompt_ids, sampling_of(sampling_params))
        ids, logprobs = list(answer.ids), list(answer.logprobs)
        size, turn = sampling_params["max_tokens"], "tool_response" in TOKENIZER.decode(prompt_ids)
        return SimpleNamespace(
            token_ids=ids[:size],
            log_probs=logprobs[:size],
            stop_reason="completed",
            extra_fields={"min_global_steps": 3, "max_global_steps": 5 if turn else 3},
        )


def sampling_of(given: dict[str, Any]) -> Sampling:
    return Sampling(prompt=None, max_tokens=given["max_tokens"], stop_ids=())  # type: ignore[arg-type]


class Settings(dict[str, Any]):
    """What of verl's configuration of rollouts is looked at."""

    __getattr__ = dict.__getitem__


@pytest.fixture(autouse=True)
async def installed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    module = ModuleType("verl.experimental.agent_loop.agent_loop")
    module.AgentLoopOutput = module.AgentLoopMetrics = SimpleNamespace  # type: ignore[attr-defined]
    for name in ("verl", "verl.experimental", "verl.experimental.agent_loop"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield
    await VerlAgentLoop.close()


def loop(folder: Path, manager: Any, text: str = TEXT, tokenizer: Any = None, **given: Any) -> VerlAgentLoop:
    (folder / "code.py").write_text(CODE)
    (folder / "sums.yaml").write_text(text)
    plain = {
        "n": 4, "val_kwargs": SimpleNamespace(n=1), "prompt_length": 500, "response_length": 500, "max_model_len": None,
        "calculate_log_probs": True,
    }  # fmt: skip
    config = Settings({name: given.pop(name, value) for name, value in plain.items()})
    for name in ("logprobs_mode", "ignore_eos"):
        config.update({name: given.pop(name)} if name in given else {})
    wrapped = SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=config)))
    return VerlAgentLoop(wrapped, manager, tokenizer, str(folder / "sums.yaml"), name="hermes_rl", **given)


async def rows(folder: Path) -> list[str]:
    import hermes_rl

    async with hermes_rl.open_env(folder / "sums.yaml") as env:
        return [row.key for row in env.rows()]


def sample(key: str, uid: str = "u", **given: Any) -> dict[str, Any]:
    return {"uid": uid, "extra_info": {"key": key, "split": "train", "index": 0}, "raw_prompt": [], **given}


@pytest.mark.parametrize("member", [4, -1])
async def test_member_outside_of_a_compared_group_is_refused(tmp_path: Path, member: int) -> None:
    played = loop(tmp_path, Manager(), COMPARED)
    (key, *_) = await rows(tmp_path)
    with pytest.raises(UserError, match=f"a group of 4 has members from 0 to 3, not {member}"):
        await played.run(dict(PARAMETERS), **sample(key, session_id=member))


@pytest.mark.parametrize("value", [None, "x", [1.0]])
async def test_temperature_that_is_not_a_number_is_refused_by_name(tmp_path: Path, value: object) -> None:
    played = loop(tmp_path, Manager())
    (key, *_) = await rows(tmp_path)
    with pytest.raises(UserError, match=r"temperature=.* of verl is not a number"):
        await played.run({**PARAMETERS, "temperature": value}, **sample(key))


async def test_masked_rollout_has_a_score_and_no_trained_token(tmp_path: Path) -> None:
    played = loop(tmp_path, Manager(), MASKED)
    (key, *_) = await rows(tmp_path)
    one = await played.run(dict(PARAMETERS), **sample(key))
    assert (one.reward_score, one.extra_fields["stop_reason"]) == (0.0, "max_turns")
    assert len(one.response_ids) > 1 and not any(one.response_mask)


async def test_every_sampled_token_is_in_the_mask_with_its_log_probability(tmp_path: Path) -> None:
    manager = Manager(wrong=0.5)
    played = loop(tmp_path, manager)
    keys = await rows(tmp_path)
    outputs = await asyncio.gather(*(played.run(dict(PARAMETERS), **sample(key)) for key in keys for _ in range(4)))
    pairs = []
    for one in outputs:
        assert len(one.response_ids) == len(one.response_mask) == len(one.response_logprobs)
        given = zip(one.response_ids, one.response_mask, one.response_logprobs, strict=True)
        pairs += [(token, value) for token, kept, value in given if kept]
        assert 0 < sum(one.response_mask) < len(one.response_mask)
    assert sorted(pairs) == sampled(manager.sampler.answers)
    assert {one.reward_score for one in outputs} == {0.0, 1.0}
    assert [one.extra_fields["reward_extra_info"]["right"] for one in outputs] == [one.reward_score for one in outputs]
    told = {(one.extra_fields["min_global_steps"], one.extra_fields["max_global_steps"]) for one in outputs}
    assert told == {(3, 5)}
    asked = manager.asked[0][1]
    assert (asked["temperature"], asked["top_p"], asked["max_tokens"]) == (1.0, 1, 200)
    by_rollout = [request for request, _ in manager.asked]
    assert len(set(by_rollout)) == 16
    assert all(by_rollout.count(one) == 2 for one in by_rollout)


async def test_newer_trainer_gets_all_sequences_and_older_one_refuses_several(tmp_path: Path) -> None:
    manager = Manager(thought="<think>\nhm\n</think>\n\n")
    played = loop(tmp_path, manager, tokenizer=str(tokenizer_folder(tmp_path / "t", keeps_thinking=False)))
    key = (await rows(tmp_path))[0]
    outputs = await played.run(dict(PARAMETERS), **sample(key, session_id=0))
    assert len(outputs) == 2
    assert sum(sum(one.response_mask) for one in outputs) == len(sampled(manager.sampler.answers))
    assert [one.extra_fields["max_global_steps"] for one in outputs] == [3, 5]
    assert [one.reward_score for one in outputs] == [1.0, 1.0]
    with pytest.raises(UserError, match="it has 2 sequences and one example is asked for"):
        await played.run(dict(PARAMETERS), **sample(key))


async def test_a_failure_raises_so_that_it_is_never_scored(tmp_path: Path) -> None:
    played = loop(tmp_path, Manager(fails=1.0), retries=0)
    key = (await rows(tmp_path))[0]
    for more in ({}, {"session_id": 1}):
        with pytest.raises(RunError, match=r"has no score .server_failure: .*the device is busy"):
            await played.run(dict(PARAMETERS), **sample(key, **more))


async def test_a_response_never_exceeds_what_the_trainer_takes(tmp_path: Path) -> None:
    whole = loop(tmp_path, Manager())
    key = (await rows(tmp_path))[0]
    mask = (await whole.run(dict(PARAMETERS), **sample(key))).response_mask
    first = mask.index(0)
    second = mask.index(1, first)
    ended = []
    for response_length in (len(mask), second + 2, second, first - 1):
        await VerlAgentLoop.close()
        cut = await loop(tmp_path, Manager(), response_length=response_length).run(dict(PARAMETERS), **sample(key))
        ended.append((len(cut.response_ids), cut.extra_fields["stop_reason"]))
    assert ended == [(len(mask), "finished"), (second + 2, "length"), (first, "token_budget"), (first - 1, "length")]
    await VerlAgentLoop.close()
    with pytest.raises(UserError, match=r"a prompt has \d+ tokens: set data.max_prompt_length"):
        await loop(tmp_path, Manager(), prompt_length=3).run(dict(PARAMETERS), **sample(key))


async def test_compared_members_run_as_one_group_if_verl_identifies_them(tmp_path: Path) -> None:
    manager = Manager(wrong=0.5)
    played = loop(tmp_path, manager, COMPARED)
    keys = await rows(tmp_path)
    work = [
        played.run(dict(PARAMETERS), **sample(key, uid=key, session_id=index)) for key in keys for index in range(4)
    ]
    outputs = [output for (output,) in await asyncio.gather(*work)]
    texts = [TOKENIZER.decode(one.response_ids) for one in outputs]
    for start in range(0, 16, 4):
        longest = max(map(len, texts[start : start + 4]))
        for one, text in zip(outputs[start : start + 4], texts[start : start + 4], strict=True):
            assert one.extra_fields["reward_extra_info"]["longest"] == float(len(text) == longest)
    assert manager.sampler.answers


async def test_compared_members_are_refused_if_verl_does_not_identify_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = loop(tmp_path, Manager(), COMPARED)
    key = (await rows(tmp_path))[0]
    with pytest.raises(UserError, match=r"rewards.longest compares .* set trainer.use_v1=true"):
        await played.run(dict(PARAMETERS), **sample(key))
    monkeypatch.setattr(verl, "GROUP_START_SECONDS", 0.2)
    with pytest.raises(RunError, match=r"verl has started 1 of 4 within"):
        await played.run(dict(PARAMETERS), **sample(key, session_id=0))


async def test_a_member_that_is_cancelled_leaves_the_others_their_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verl, "GROUP_START_SECONDS", 600.0)  # no group ends because of it
    played = loop(tmp_path, Manager(), COMPARED)
    key = (await rows(tmp_path))[0]

    def start(*members: int) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(played.run(dict(PARAMETERS), **sample(key, session_id=n))) for n in members]

    await asyncio.gather(*start(0, 1, 2, 3))  # from now on a member waits for the others as soon as it runs
    before = asyncio.all_tasks()
    work = start(0, 1, 2)
    await until(lambda: len(asyncio.all_tasks() - before) == 4)  # they wait for their group
    work[0].cancel()
    ended = await asyncio.gather(*work, *start(3), return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in ended] == [True, False, False, False]
    assert [outputs[0].reward_score for outputs in ended[1:]] == [2.0] * 3  # type: ignore[index]
    # Where nobody waits any more, the group ends too.
    again = start(0, 1)
    await until(lambda: len(asyncio.all_tasks() - before) == 3)
    for one in again:
        one.cancel()
    await asyncio.gather(*again, return_exceptions=True)
    await until(lambda: asyncio.all_tasks() <= before)


async def test_a_failed_member_fails_its_whole_group(tmp_path: Path) -> None:
    played = loop(tmp_path, Manager(fails=1.0), COMPARED, retries=0)
    key = (await rows(tmp_path))[0]
    work = [played.run(dict(PARAMETERS), **sample(key, session_id=index)) for index in range(4)]
    ended = await asyncio.gather(*work, return_exceptions=True)
    assert all(isinstance(one, RunError) and "has no scores (server_failure" in str(one) for one in ended)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"calculate_log_probs": False}, "calculate_log_probs=true"),
        ({"logprobs_mode": "raw_logprobs"}, "processed_logprobs"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"sampling": {"temperature": 0.5}}, "temperature is verl's"),
    ],
)
def test_settings_that_make_logprobs_differ_from_tokens_are_refused(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        loop(tmp_path, Manager(), **given)


async def test_what_a_sample_or_the_sampling_lacks_is_named(tmp_path: Path) -> None:
    played = loop(tmp_path, Manager())
    with pytest.raises(UserError, match=r"no `split` and `key` in its extra_info.*docs/integrations/verl.md"):
        await played.run(dict(PARAMETERS), uid="u", extra_info={"index": 0})
    with pytest.raises(UserError, match="top_k=5 of verl is not applied"):
        await played.run({**PARAMETERS, "top_k": 5}, **sample((await rows(tmp_path))[0]))


async def test_missing_verl_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl.experimental.agent_loop.agent_loop", None)
    with pytest.raises(UserError, match=r"pip install .*\[verl\]"):
        await loop(tmp_path, Manager()).run(dict(PARAMETERS), **sample("k"))
