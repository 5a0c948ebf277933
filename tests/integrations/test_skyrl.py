"""SkyRL's door: how rollouts become its output in both modes, what stands in for a failure, and what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest

import hermes_rl
from hermes_rl.errors import RunError, UserError
from hermes_rl.integrations.skyrl import HermesGenerator, _stand_ins
from tests.api.summing import COMPARED, MASKED, TEXT, Sampler, sampled, spec_in
from tests.env.test_token_exact import tokenizer_folder

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 200, "stop": None, "logprobs": 1}


@dataclass(frozen=True)
class Name:
    instance_id: str
    repetition_id: int


class Engine:
    """SkyRL's client of its engines over a `Sampler`."""

    def __init__(self, **given: Any) -> None:
        self.sampler, self.asked = Sampler(**given), []  # type: ignore[var-annotated]

    async def generate(self, given: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(given)
        answer = await self.sampler(given["prompt_token_ids"][0], None)  # type: ignore[arg-type]
        return {
            "response_ids": [list(answer.ids)],
            "stop_reasons": ["stop"],
            "response_logprobs": [list(answer.logprobs)],
        }


def generator(spec: Any, engine: Any, tokenizer: Any = None, step_wise: bool = False, **given: Any) -> HermesGenerator:
    kwargs = given.pop("engine_init_kwargs", {})
    config = SimpleNamespace(
        step_wise_trajectories=step_wise,
        max_input_length=given.pop("max_input_length", 800),
        sampling_params=SimpleNamespace(max_generate_length=200),
        inference_engine=SimpleNamespace(engine_init_kwargs=kwargs),
    )
    return HermesGenerator(spec, config, engine, tokenizer, **given)


async def batch(spec: Any, size: int = 4, **sampling: Any) -> dict[str, Any]:
    async with hermes_rl.open_env(spec) as env:
        keys = [row.key for row in env.rows()]
    return {
        "prompts": [[]] * (size * len(keys)),
        "env_extras": [{"key": key} for key in keys for _ in range(size)],
        "trajectory_ids": [Name(str(n), member) for n in range(len(keys)) for member in range(size)],
        "sampling_params": {**SAMPLING, **sampling},
        "batch_metadata": SimpleNamespace(global_step=3, training_phase="train"),
    }


def pairs(output: dict[str, Any]) -> list[tuple[int, float]]:
    rows = zip(output["response_ids"], output["loss_masks"], output["rollout_logprobs"], strict=True)
    return sorted(
        (token, value)
        for ids, mask, values in rows
        for token, kept, value in zip(ids, mask, values, strict=True)
        if kept
    )


async def test_columns_of_different_lengths_are_refused(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    played, given = generator(spec, Engine()), await batch(spec)
    with pytest.raises(UserError, match="SkyRL's batch has 16 trajectory_ids and 15 env_extras"):
        await played.generate({**given, "env_extras": given["env_extras"][:-1]})
    with pytest.raises(UserError, match="a prompt has no `key` of a row"):
        await played.generate({**given, "env_extras": [None, *given["env_extras"][1:]]})
    with pytest.raises(UserError, match=r"temperature=1000.* of SkyRL is not a number"):
        await played.generate({**given, "sampling_params": {"temperature": 10**400}})
    await played.close()


async def test_every_sampled_token_is_trained_on_once(tmp_path: Path) -> None:
    spec, engine = spec_in(tmp_path), Engine(wrong=0.5)
    played = generator(spec, engine)
    output = await played.generate(await batch(spec))
    await played.close()
    assert pairs(output) == sampled(engine.sampler.answers)
    assert len(output["rewards"]) == 16
    assert set(output["rewards"]) == {0.0, 1.0}
    assert [one["right"] for one in output["env_metrics"]] == output["rewards"]
    assert output["is_last_step"] is None
    assert output["rollout_metrics"]["hermes_rl/unscored"] == 0
    assert output["rollout_metrics"]["hermes_rl/rewards/right_mean"] == fmean(output["rewards"])
    assert len({given["session_ids"][0] for given in engine.asked}) == 16


async def test_several_sequences_are_steps_of_one_trajectory_or_refused(tmp_path: Path) -> None:
    spec, engine = spec_in(tmp_path), Engine(thought="<think>\nI add.\n</think>\n\n")
    folder = str(tokenizer_folder(tmp_path / "t", keeps_thinking=False))
    played = generator(spec, engine, folder, step_wise=True)
    output = await played.generate(await batch(spec))
    await played.close()
    assert pairs(output) == sampled(engine.sampler.answers)
    assert output["is_last_step"] == [False, True] * 16
    assert [sum(row) for row in output["rewards"]] == [0.0, 1.0] * 16
    assert all(row[-1] == float(last) for row, last in zip(output["rewards"], output["is_last_step"], strict=True))
    assert {len(value) for value in output.values() if isinstance(value, list)} == {32}
    assert output["trajectory_ids"][0] == output["trajectory_ids"][1] != output["trajectory_ids"][2]
    plain = generator(spec, engine, folder)
    with pytest.raises(UserError, match="it has 2 sequences and one example is asked for"):
        await plain.generate(await batch(spec))
    await plain.close()


async def test_masked_rollouts_have_a_score_and_no_trained_token(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, MASKED)
    played = generator(spec, Engine())
    output = await played.generate(await batch(spec))
    await played.close()
    assert output["rewards"] == [0.0] * 16 and "error" not in output["stop_reasons"]
    assert all(len(ids) > 1 for ids in output["response_ids"]) and not any(map(any, output["loss_masks"]))


@pytest.mark.parametrize("step_wise", [False, True])
async def test_a_failure_is_masked_counted_and_leaves_the_baseline_of_its_group(
    tmp_path: Path, step_wise: bool
) -> None:
    spec, engine = spec_in(tmp_path), Engine(fails=0.55, wrong=0.4)
    played = generator(spec, engine, step_wise=step_wise, retries=0)
    output = await played.generate(await batch(spec, size=8))
    await played.close()
    scores = [row[-1] if step_wise else row for row in output["rewards"]]
    failed = [reason == "error" for reason in output["stop_reasons"]]
    assert 0 < sum(failed) == output["rollout_metrics"]["hermes_rl/unscored"] < len(failed)
    assert output["rollout_metrics"]["hermes_rl/failed/server_failure"] == sum(failed)
    assert all((sum(mask) == 0) == fail for mask, fail in zip(output["loss_masks"], failed, strict=True))
    every = [score for score, fail in zip(scores, failed, strict=True) if not fail]
    for start in range(0, 32, 8):
        whole = list(zip(scores, failed, strict=True))[start : start + 8]
        known = [score for score, fail in whole if not fail] or every
        assert fmean(score for score, _ in whole) == pytest.approx(fmean(known))


def test_substitute_scores_of_failed_rollouts_preserve_advantages() -> None:
    def played(*scores: float | None) -> list[Any]:
        rollouts = [SimpleNamespace(score=score, turns=1) for score in scores]
        return [(None if one.score is None else one, "finished", None) for one in rollouts]

    for scores in ((0.0, 1.0, None, None), (0.0, 1.0, 0.5, None, None, None), (0.0, None, 2.0, None, 0.25, None, None)):
        known = [score for score in scores if score is not None]
        whole = _stand_ins(played(*scores), ["g"] * len(scores))
        assert [one for one, score in zip(whole, scores, strict=True) if score is not None] == known
        assert (fmean(whole), stdev(whole)) == pytest.approx((fmean(known), stdev(known)))
    # A single stand-in cannot keep both: it keeps the mean.
    assert _stand_ins(played(0.0, 1.0, 1.0, None), ["g"] * 4)[-1] == pytest.approx(2 / 3)
    assert _stand_ins(played(1.0, None, None), ["g"] * 3) == [1.0, 1.0, 1.0]
    assert _stand_ins(played(1.0, 0.0, None, None), ["a", "a", "b", "b"]) == [1.0, 0.0, 0.5, 0.5]


async def test_a_batch_without_any_score_ends_training(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    played = generator(spec, Engine(fails=1.0), retries=0)
    with pytest.raises(RunError, match=r"not one of 16 rollouts could be scored \(16 server_failure\): .* is busy"):
        await played.generate(await batch(spec))
    await played.close()


async def test_compared_members_run_as_one_group(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, COMPARED)
    played = generator(spec, Engine(wrong=0.5))
    output = await played.generate(await batch(spec))
    await played.close()
    longest = [one["longest"] for one in output["env_metrics"]]
    assert all(max(longest[start : start + 4]) == 1.0 for start in range(0, 16, 4))
    assert 0.0 in longest


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"top_k": 5}, "top_k=5 of SkyRL"),
        ({"stop": ["x"]}, "is not applied"),
        ({"temperature": 0.7}, "logprobs_mode=processed_logprobs"),
    ],
)
async def test_sampling_whose_log_probabilities_would_not_fit_is_refused(
    tmp_path: Path, sampling: dict[str, Any], message: str
) -> None:
    spec = spec_in(tmp_path)
    played = generator(spec, Engine())
    with pytest.raises(UserError, match=message):
        await played.generate(await batch(spec, **sampling))
    await played.close()
    with pytest.raises(UserError, match="temperature is SkyRL's"):
        generator(spec, Engine(), sampling={"temperature": 0.5})


async def test_processed_log_probabilities_know_of_the_temperature(tmp_path: Path) -> None:
    spec, engine = spec_in(tmp_path), Engine()
    played = generator(spec, engine, engine_init_kwargs={"logprobs_mode": "processed_logprobs"})
    await played.generate(await batch(spec, temperature=0.7))
    await played.close()
    assert {given["sampling_params"]["temperature"] for given in engine.asked} == {0.7}


async def test_batch_cancelled_while_the_spec_opens_does_not_affect_the_next(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    played, given = generator(spec, Engine()), await batch(spec, size=1)
    first = asyncio.create_task(played.generate(given))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert len((await played.generate(given))["rewards"]) == 4
    await played.close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [("[1.0] * result.turns_used", "credit to its turns"), ("Score(1.0, overrides={'a': 1})", r"overrides \(a\)")],
)
async def test_what_a_score_cannot_carry_is_refused_by_name(tmp_path: Path, answer: str, said: str) -> None:
    spec = spec_in(tmp_path, TEXT.replace("{right:", '{more: {fn: "more.py:more"}, right:'))
    (tmp_path / "more.py").write_text(f"from hermes_rl import Score\n\n\ndef more(result):\n    return {answer}\n")
    played = generator(spec, Engine())
    with pytest.raises(UserError, match=f"{said}, and SkyRL takes one score"):
        await played.generate(await batch(spec, size=1))
    await played.close()


async def test_a_prompt_without_a_row_is_named(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    played, given = generator(spec, Engine()), await batch(spec)
    given["env_extras"][0] = {}
    with pytest.raises(UserError, match=r"no `key` of a row: .*docs/integrations/skyrl.md"):
        await played.generate(given)
    await played.close()
