"""OpenRLHF's door over a stand-in of its base class and of its engine: responses, refusals, failures."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import hermes_rl
from hermes_rl.errors import RunError, UserError
from hermes_rl.integrations.openrlhf import executor
from tests.api.summing import COMPARED, MASKED, Sampler, sampled, spec_in
from tests.env.test_token_exact import tokenizer_folder


class Engine:
    """The `generate` of OpenRLHF's rollout actor, over a `Sampler`."""

    def __init__(self, **given: Any) -> None:
        self.sampler, self.asked = Sampler(**given), list[Any]()

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        self.asked.append(sampling_params)
        answer = await self.sampler(prompt_token_ids, sampling_params)
        steps = [{one: SimpleNamespace(logprob=value)} for one, value in zip(answer.ids, answer.logprobs, strict=True)]
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=tuple(answer.ids), logprobs=steps, finish_reason="stop")]
        )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("openrlhf.utils.agent")
    module.AgentExecutorBase = type("AgentExecutorBase", (), {})  # type: ignore[attr-defined]
    for name in ("openrlhf", "openrlhf.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


async def play(spec: Any, engine: Any, count: int = 1, given: Mapping[str, Any] | None = None, **settings: Any) -> Any:
    tokenizer, label = settings.pop("tokenizer", None), settings.pop("label", None)
    one = executor(spec, retries=0, **settings)()
    async with hermes_rl.open_env(spec) as env:
        keys = [row.key for row in env.rows()]
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 200, "logprobs": 1, "min_tokens": 1}
    asked = SimpleNamespace(**{**params, **(given or {})})
    labels = [label or json.dumps({"key": keys[n % 4], "split": "train"}) for n in range(count)]
    try:
        work = [one.execute("p", label, asked, 4096, tokenizer, engine) for label in labels]
        return await asyncio.gather(*work)
    finally:
        await one.env.close()


@pytest.mark.parametrize("label", ["x", "[1]", "null", "[" * 100_000])
async def test_label_that_names_no_row_is_refused(tmp_path: Path, installed: None, label: str) -> None:
    with pytest.raises(UserError, match="a label names no row"):
        await play(spec_in(tmp_path), Engine(), label=label)


async def test_action_ranges_are_the_sampled_tokens_with_their_log_probabilities(
    tmp_path: Path, installed: None
) -> None:
    engine = Engine(wrong=0.5)
    responses = await play(spec_in(tmp_path), engine, 16)
    pairs = []
    for one in responses:
        assert len(one["observation_tokens"]) == len(one["rollout_log_probs"])
        assert len(one["action_ranges"]) == 2
        for start, end in one["action_ranges"]:
            pairs += zip(one["observation_tokens"][start:end], one["rollout_log_probs"][start:end], strict=True)
    assert sorted(pairs) == sampled(engine.sampler.answers)
    assert {one["reward"] for one in responses} == {0.0, 1.0}
    assert all(one["extra_logs"] == {"right": one["reward"]} for one in responses)
    assert all(asked.logprobs == 0 and asked.min_tokens == 0 for asked in engine.asked)


async def test_masked_rollout_has_a_score_and_no_trained_token(tmp_path: Path, installed: None) -> None:
    (one,) = await play(spec_in(tmp_path, MASKED), Engine())
    assert (one["reward"], one["action_ranges"]) == (0.0, []) and len(one["observation_tokens"]) > 1


async def test_a_failure_raises_so_that_it_is_never_scored(tmp_path: Path, installed: None) -> None:
    with pytest.raises(RunError, match=r"has no score .server_failure: .*the device is busy"):
        await play(spec_in(tmp_path), Engine(fails=1.0))


async def test_what_openrlhf_cannot_take_is_refused_by_name(tmp_path: Path, installed: None) -> None:
    spec = spec_in(tmp_path)
    forgetful = str(tokenizer_folder(tmp_path / "t", keeps_thinking=False))
    with pytest.raises(UserError, match="it has 2 sequences and one example is asked for"):
        await play(spec, Engine(thought="<think>\nI add.\n</think>\n\n"), tokenizer=forgetful)
    with pytest.raises(UserError, match="longest compares the members of a group"):
        await play(spec_in(tmp_path, COMPARED), Engine())
    with pytest.raises(UserError, match="top_k=5"):
        await play(spec, Engine(), given={"top_k": 5})
    with pytest.raises(UserError, match="logprobs_mode=processed_logprobs"):
        await play(spec, Engine(), given={"temperature": 0.7})
    with pytest.raises(UserError, match=r"a label names no row: .*docs/integrations/openrlhf.md"):
        await play(spec, Engine(), label="5")
    with pytest.raises(UserError, match="temperature is OpenRLHF's"):
        executor(spec, sampling={"temperature": 0.5})


async def test_processed_log_probabilities_know_of_the_temperature(tmp_path: Path, installed: None) -> None:
    engine = Engine()
    await play(spec_in(tmp_path), engine, given={"temperature": 0.7}, processed_logprobs=True)
    assert {asked.temperature for asked in engine.asked} == {0.7}


def test_missing_openrlhf_error_names_the_required_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openrlhf.utils.agent", None)
    with pytest.raises(UserError, match=r"the executor needs OpenRLHF 0\.11 .*install it"):
        executor("gsm8k")
