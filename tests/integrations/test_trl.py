"""TRL's doors without TRL: how rollouts become columns, who samples for them, and what is refused by name."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import math
import queue
import re
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from hermes_rl import Policy, Sampled, Sampling
from hermes_rl.errors import RunError, UserError
from hermes_rl.integrations import trl
from hermes_rl.integrations.trl import HermesEnvironments, HermesRollouts, HermesWorker, ModelCalls, places_of
from hermes_rl.servers.base import Malformed, generated
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.api.summing import COMPARED, END, MASKED, TEXT, TOKENIZER, Sampler, sampled, spec_in, write
from tests.env.test_token_exact import tokenizer_folder
from tests.servers.token_policy import TokenPolicy
from tests.waiting import stays, until_blocking

PAGE = (Path(__file__).parents[2] / "docs" / "integrations" / "trl.md").read_text("utf-8")
END_ID = TOKENIZER.encode(END)[0]
AGAIN = """
import json, sys, urllib.request

for question in ("What is 1 plus 2?", "What is 3 plus 4?"):
    body = json.dumps({"messages": [{"role": "user", "content": question}]}).encode()
    urllib.request.urlopen(urllib.request.Request(sys.argv[1], body)).read()
"""
"""An agent program that holds two conversations."""
ASKED = Sampling(array("i", [1]), 4, (END_ID,))


class TrainersTokenizer:
    """The small tokenizer with what a trainer asks one for."""

    eos_token_id = END_ID

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)


def trainer(**given: Any) -> Any:
    """What of a GRPOTrainer is looked at."""
    args = {
        "vllm_server_base_url": None, "vllm_server_host": "127.0.0.1", "vllm_server_port": 9, "generation_kwargs": None,
        "vllm_tensor_parallel_size": 1, "vllm_enable_sleep_mode": False, "vllm_max_model_length": None,
    }  # fmt: skip
    args = {name: given.pop(name, value) for name, value in args.items()}
    model = SimpleNamespace(training=True, config=SimpleNamespace(get_text_config=lambda: SimpleNamespace()))
    state = SimpleNamespace(deepspeed_plugin=given.pop("deepspeed", None))
    accelerator = SimpleNamespace(process_index=given.pop("rank", 0), state=state, unwrap_model=lambda one: one)
    plain = {
        "tools": [], "use_vllm": False, "vllm_mode": "server", "is_fsdp_enabled": False,
        "use_transformers_continuous_batching": False, "num_generations": 4, "num_generations_eval": 2,
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0,
        "processing_class": SimpleNamespace(eos_token_id=END_ID, name_or_path=None),
        "state": SimpleNamespace(global_step=3), "add_callback": lambda callback: None,
    }  # fmt: skip
    own = {**plain, "args": SimpleNamespace(**args), "model": model, "accelerator": accelerator}
    return SimpleNamespace(**{**own, **given})


def test_trainer_logprobs_that_differ_from_sampled_ones_cause_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Any] = []
    policy = Sampler().policy()
    with HermesRollouts(spec_in(tmp_path), policy=policy) as rollouts:
        training = trainer(add_callback=heard.append)
        for _ in range(2):
            rollouts.rollout_func(prompts_of(rollouts), training)
    (listener,) = heard

    def log(**logs: float) -> str:
        caplog.clear()
        listener.on_log(None, None, None, logs={name.replace("__", "/"): value for name, value in logs.items()})
        return caplog.text

    name = "sampling__sampling_logp_difference"
    assert log(loss=0.5) == log(**{f"{name}__mean": 0.02, f"{name}__max": 1.5}) == ""
    assert (policy.logprob_difference.mean, policy.logprob_difference.largest) == (0.02, 1.5)
    assert "differ from the sampled ones by 0.4 on average, at most 3.25" in log(
        **{f"{name}__mean": 0.4, f"{name}__max": 3.25}
    )
    assert log(**{f"{name}__mean": 0.5}) == "", "it is said once"
    assert log(**{f"{name}__mean": 0.01}) == ""
    assert "by nan on average" in log(**{f"{name}__mean": float("nan")})


def test_policy_that_replaces_the_trainer_model_is_reported_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: dict[str, float] = {}

    def score(columns: dict[str, Any]) -> None:
        given = {name: columns[name] for name in ("score", "rewards", "stop_reason", "turns", "other_policy")}
        trl.hermes_rl_score(None, None, **given, log_metric=logged.__setitem__)

    with HermesRollouts(spec_in(tmp_path), policy=Sampler().policy()) as rollouts:
        training = trainer()
        for _ in range(2):
            score(rollouts.rollout_func(prompts_of(rollouts), training))
    assert logged["hermes_rl/other_policy"] == 1.0
    assert caplog.text.count("replaces the trainer's model") == 1
    caplog.clear()
    monkeypatch.setattr(HermesRollouts, "_policy_of", lambda self, trainer: Sampler().policy())
    with HermesRollouts(spec_in(tmp_path)) as rollouts:
        score(rollouts.rollout_func(prompts_of(rollouts), trainer()))
    assert (logged["hermes_rl/other_policy"], caplog.text) == (0.0, "")


def prompts_of(rollouts: HermesRollouts, size: int = 4) -> list[str]:
    return [key for key in rollouts.rows("train") for _ in range(size)]


# ------------------------------------------------------------------------------- rollouts as TRL takes them


def test_exactly_the_sampled_tokens_are_trained_with_their_logprobs(tmp_path: Path) -> None:
    sampler = Sampler(wrong=0.5)
    policy = sampler.policy()
    with HermesRollouts(spec_in(tmp_path), policy=policy) as rollouts:
        assert list(rollouts.train_dataset["prompt"]) == list(rollouts.rows("train"))
        columns = rollouts.rollout_func(prompts_of(rollouts), trainer())
    assert policy.version == 3
    pairs = []
    for ids, mask, logprobs in zip(columns["completion_ids"], columns["env_mask"], columns["logprobs"], strict=True):
        assert ids[-1] == END_ID
        pairs += [(token, value) for token, kept, value in zip(ids, mask, logprobs, strict=True) if kept]
        assert all(value == 0.0 for kept, value in zip(mask, logprobs, strict=True) if not kept)
        assert 0 < sum(mask) < len(mask)
    assert sorted(pairs) == sampled(sampler.answers)
    assert all(columns["prompt_ids"])
    assert set(columns["score"]) == {0.0, 1.0}
    assert [values["right"] for values in columns["rewards"]] == columns["score"]
    assert set(columns["stop_reason"]) == {"finished"}
    assert set(columns["turns"]) == {2}
    assert {sampling.temperature for _, sampling in sampler.asked} == {1.0}


def test_masked_rollouts_have_a_score_and_no_trained_token(tmp_path: Path) -> None:
    with HermesRollouts(spec_in(tmp_path, MASKED), policy=Sampler().policy()) as rollouts:
        columns = rollouts.rollout_func(prompts_of(rollouts), trainer())
    assert set(columns["score"]) == {0.0} and set(columns["stop_reason"]) == {"max_turns"}
    assert all(len(ids) > 1 for ids in columns["completion_ids"]) and not any(map(any, columns["env_mask"]))


def test_failures_have_no_score_and_nothing_that_is_trained_on(tmp_path: Path) -> None:
    logged: dict[str, float] = {}
    with HermesRollouts(spec_in(tmp_path), policy=Sampler(fails=0.6).policy(), retries=0) as rollouts:
        columns = rollouts.rollout_func(prompts_of(rollouts), trainer())
        (score,) = rollouts.reward_funcs
    scores = score(prompts=[], completions=[], log_metric=logged.__setitem__, trainer_state=None, **columns)
    failed = [stop_reason == "server_failure" for stop_reason in columns["stop_reason"]]
    assert 0 < sum(failed) < len(failed)
    assert [one is None for one in scores] == failed
    for one, mask, ids in zip(failed, columns["env_mask"], columns["completion_ids"], strict=True):
        assert (mask == [0] and ids == [END_ID]) == one
    assert logged["hermes_rl/failed/server_failure"] == logged["hermes_rl/unscored"] == sum(failed) / len(failed)
    assert logged["hermes_rl/failed/sandbox_failure"] == 0.0
    assert logged["hermes_rl/rewards/right"] == 1.0


def test_training_ends_where_not_one_rollout_could_be_scored(tmp_path: Path) -> None:
    with HermesRollouts(spec_in(tmp_path), policy=Sampler(fails=1.0).policy(), retries=0) as rollouts:
        prompts = prompts_of(rollouts)
        with pytest.raises(RunError, match=r"not one of 16 rollouts could be scored \(16 server_failure\).* is busy"):
            rollouts.rollout_func(prompts, trainer())


def test_evaluation_runs_the_held_out_rows_with_its_group_size(tmp_path: Path) -> None:
    text = TEXT.replace("dataset:", "dataset:\n  eval: {fraction: 0.5}")
    with HermesRollouts(spec_in(tmp_path, text), rows=1, policy=Sampler().policy()) as rollouts:
        assert len(rollouts.train_dataset) == 1
        keys = list(rollouts.eval_dataset["prompt"])
        assert keys
        assert not set(keys) & set(rollouts.rows("train"))
        evaluated = trainer(model=SimpleNamespace(training=False))
        columns = rollouts.rollout_func([key for key in keys for _ in range(2)], evaluated)
    assert columns["score"] == [1.0] * (2 * len(keys))


def test_a_batch_is_recorded_in_a_run_directory_of_this_start(tmp_path: Path) -> None:
    given = spec_in(tmp_path)
    with HermesRollouts(given, policy=Sampler().policy(), record=tmp_path / "runs") as rollouts:
        for _ in range(2):
            rollouts.rollout_func(prompts_of(rollouts), trainer())
    (written,) = (tmp_path / "runs").glob("*/rollouts.jsonl")
    assert len(written.read_text().splitlines()) == 2 * 16


def test_rewards_that_compare_get_the_whole_group(tmp_path: Path) -> None:
    with HermesRollouts(spec_in(tmp_path, COMPARED), policy=Sampler(wrong=0.5).policy()) as rollouts:
        columns = rollouts.rollout_func(prompts_of(rollouts), trainer())
        for start in range(0, 16, 4):
            assert max(values["longest"] for values in columns["rewards"][start : start + 4]) == 1.0
        with pytest.raises(
            UserError, match="the prompt 'other' is not the key of a row: give the trainer `train_dataset`"
        ):
            rollouts.rollout_func(["other"] * 4, trainer())
        with pytest.raises(UserError, match=r"rewards.longest compares .* split groups of 4 .* have 6 rollouts each"):
            rollouts.rollout_func(prompts_of(rollouts)[6:12], trainer(rank=1))


def test_a_group_that_was_dropped_has_no_score_at_all(tmp_path: Path) -> None:
    sampler, failing = Sampler(), list[Any]()

    async def sample(ids: list[int], sampling: Sampling) -> Sampled:
        if not failing and "What is 5" in TOKENIZER.decode(ids):
            failing.append(sampling.seed)
        if sampling.seed in failing:  # one call, however often it is asked again
            raise OSError("the device is busy")
        return await sampler(ids, sampling)

    with HermesRollouts(spec_in(tmp_path, COMPARED), policy=Policy.sampling(sample, None), retries=0) as rollouts:
        columns = rollouts.rollout_func(prompts_of(rollouts), trainer())
    assert [score is None for score in columns["score"]] == [False] * 8 + [True] * 4 + [False] * 4


def test_what_dropped_all_groups_is_said(tmp_path: Path) -> None:
    with HermesRollouts(spec_in(tmp_path, COMPARED), policy=Sampler(fails=1.0).policy(), retries=0) as rollouts:
        prompts = prompts_of(rollouts)
        with pytest.raises(RunError, match=r"not one of 16 rollouts could be scored \(16 server_failure\).* is busy"):
            rollouts.rollout_func(prompts, trainer())


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            ["false"],
            r"not one of 16 rollouts could be scored \(16 program_aborted\): the policy was never asked.* status 1",
        ),
        (["python3", "-c", AGAIN], r"has 2 sequences.*agent\.program\.train: \[main\].*HermesWorker"),
    ],
)
def test_what_programs_keep_from_being_trained_on_is_said(tmp_path: Path, program: list[str], said: str) -> None:
    spec = yaml.safe_load(TEXT)
    del spec["tools"]
    spec["agent"]["program"] = {"command": [*program, "{{ endpoint }}/v1/chat/completions"]}
    with HermesRollouts(spec_in(tmp_path, yaml.safe_dump(spec)), policy=Sampler().policy()) as rollouts:
        prompts = prompts_of(rollouts)
        with pytest.raises((RunError, UserError), match=said):
            rollouts.rollout_func(prompts, trainer())


def test_rollouts_of_several_sequences_are_refused_by_name(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", keeps_thinking=False)
    policy = Sampler(thought="<think>\nI add.\n</think>\n\n").policy(folder)
    with HermesRollouts(spec_in(tmp_path), policy=policy) as rollouts:
        prompts = prompts_of(rollouts)
        with pytest.raises(UserError, match=r"has 2 sequences.*thinking_retention.*HermesWorker"):
            rollouts.rollout_func(prompts, trainer())


def test_tokens_that_are_not_proven_are_refused_unless_they_are_allowed(tmp_path: Path) -> None:
    async def chat(messages: Sequence[Any], tools: Any) -> str:
        return "The sum is 3."

    policy = Policy.chat(chat, tokenizer=TOKENIZER)
    with HermesRollouts(spec_in(tmp_path), policy=policy) as rollouts:
        prompts = prompts_of(rollouts)
        with pytest.raises(
            UserError, match=r"a chat server does not report which tokens it sampled.*allow_inexact=True"
        ):
            rollouts.rollout_func(prompts, trainer())
    with HermesRollouts(spec_in(tmp_path), policy=policy, allow_inexact=True) as rollouts:
        columns = rollouts.rollout_func(prompts_of(rollouts), trainer())
    assert columns["logprobs"] is None
    assert all(any(mask) for mask in columns["env_mask"])


# ------------------------------------------------------------------------------------------- prompts and groups


def test_groups_continue_across_trainer_processes() -> None:
    keys = ["a"] * 4 + ["b"] * 4 + ["a"] * 4
    both = places_of(keys[:6], 4, 0) + places_of(keys[6:], 4, 6)
    assert both == places_of(keys, 4, 0)
    assert [number for _, number, _ in both] == [0] * 4 + [1] * 4 + [2] * 4
    assert [index for _, _, index in both] == [0, 1, 2, 3] * 3


@pytest.mark.parametrize("prompts", [["a", "b"], [[{"role": "user", "content": "a"}]] * 2])
def test_prompts_that_are_not_grouped_row_keys_are_refused(prompts: list[Any]) -> None:
    with pytest.raises(UserError, match="give the trainer `train_dataset`"):
        places_of(prompts, 2, 0)


def test_endless_rows_need_a_number(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(
        "import itertools\n\n\ndef sums(*, seed, split):\n    return ({'a': n, 'b': 1} for n in itertools.count())\n"
    )
    text = re.sub(r"dataset:\n  items: .*\n", 'dataset:\n  generator: "rows.py:sums"\n', TEXT)
    with HermesRollouts(spec_in(tmp_path, text)) as rollouts, pytest.raises(UserError, match="say `rows=1000`"):
        rollouts.train_dataset  # noqa: B018
    with HermesRollouts(spec_in(tmp_path, text), rows=3, policy=Sampler().policy()) as rollouts:
        assert len(rollouts.train_dataset) == 3
        keys = prompts_of(rollouts)
        assert rollouts.rollout_func(keys, trainer())["score"] == [1.0] * 12
    with HermesRollouts(spec_in(tmp_path, text), rows=keys[4:5]) as rollouts:
        assert list(rollouts.rows("train")) == keys[4:5]


# ------------------------------------------------------------------------------------------------ who samples


@pytest.fixture
def own_model(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Batches that the trainer's model was asked for, and in which thread; what it says is `write`'s."""
    asked: list[tuple[int, str]] = []

    def generate(trainer: Any, calls: Sequence[tuple[list[int], Sampling]]) -> list[Sampled]:
        asked.append((len(calls), threading.current_thread().name))
        if len(asked) == 2:
            raise RuntimeError("out of memory")
        found = [TOKENIZER.encode(write(TOKENIZER.decode(ids)) + END) for ids, _ in calls]
        return [Sampled(ids, [-0.5] * len(ids)) for ids in found]

    monkeypatch.setattr(trl, "generate_with_model", generate)
    return asked


def test_the_trainers_model_samples_in_batches_in_the_thread_that_trains(
    own_model: list[tuple[int, str]], tmp_path: Path
) -> None:
    with HermesRollouts(spec_in(tmp_path)) as rollouts:
        for _ in range(2):
            columns = rollouts.rollout_func(prompts_of(rollouts), trainer(processing_class=TrainersTokenizer()))
            assert columns["score"] == [1.0] * 16  # one batch failed, and was asked for again
    assert {name for _, name in own_model} == {threading.current_thread().name}
    assert max(size for size, _ in own_model) > 4
    assert len(own_model) < sum(size for size, _ in own_model)


def test_nan_logprob_of_a_sampled_token_is_malformed() -> None:
    asked = Sampling(array("i", [1]), 8, (9,))
    sampled = trl.until_end([1, 2], [-1.0, math.nan], asked)
    with pytest.raises(Malformed, match="log-probability nan"):
        generated(sampled.ids, sampled.logprobs, sampled.finish)
    assert trl.until_end([1, 9, 9], [1e-7, -1.0, math.nan], asked) == Sampled([1, 9], [0.0, -1.0], "stop")


def test_calls_of_a_mixed_batch_are_sampled_with_their_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, list[int]]] = []

    def generate(trainer: Any, calls: Sequence[tuple[list[int], Sampling]], temperature: float) -> list[Sampled]:
        asked.append((temperature, [ids[0] for ids, _ in calls]))
        return [Sampled([100 + ids[0]], [-0.5]) for ids, _ in calls]

    monkeypatch.setattr(trl, "_generate_alike", generate)
    settings = [(0.5, (9,)), (None, (9,)), (0.5, (9,)), (1.0, (9,)), (0.5, (8, 9))]
    calls = [([n], replace(ASKED, temperature=heat, stop_ids=stop)) for n, (heat, stop) in enumerate(settings)]
    assert [sampled.ids for sampled in trl.generate_with_model(None, calls)] == [[100 + n] for n in range(5)]
    assert asked == [(0.5, [0, 2]), (1.0, [1, 3]), (0.5, [4])]
    with pytest.raises(UserError, match=r"top_p=0\.9: the trainer's log-probabilities ignore it"):
        trl.generate_with_model(None, [([1], replace(ASKED, top_p=0.9))])


@pytest.mark.slow
def test_logprobs_of_a_mixed_batch_use_the_temperature_of_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 1, "initializer_range": 2.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    utils = ModuleType("trl.models.utils")
    utils.unwrap_model_for_generation = lambda model, *_, **__: nullcontext(model)  # type: ignore[attr-defined]
    for name in ("trl", "trl.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "trl.models.utils", utils)
    accelerator = SimpleNamespace(device="cpu")
    one = SimpleNamespace(
        processing_class=SimpleNamespace(pad_token_id=0), accelerator=accelerator, model_wrapped=model,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )  # fmt: skip
    heats = [0.25, 1.0, 4.0, 0.25]
    plain = replace(ASKED, max_tokens=6, stop_ids=())
    calls = [([5, 6, 7 + n], replace(plain, temperature=heat)) for n, heat in enumerate(heats)]
    for (prompt, _), heat, answer in zip(calls, heats, trl.generate_with_model(one, calls), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer.ids]])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / heat).log_softmax(-1)[range(len(answer.ids)), list(answer.ids)]
        assert list(answer.logprobs) == pytest.approx(expected.tolist(), abs=1e-4)


async def test_cancelled_call_is_not_sampled() -> None:
    calls, playing = ModelCalls(), concurrent.futures.Future[None]()
    given_up = asyncio.create_task(calls.sample([1], ASKED))
    kept = asyncio.create_task(calls.sample([2], ASKED))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    seen: list[list[int]] = []

    def generate(batch: Sequence[Any]) -> list[Sampled]:
        seen.append([ids[0] for ids, _ in batch])
        return [Sampled([END_ID], [0.0]) for _ in batch]

    thread = threading.Thread(target=calls.answer_until, args=(playing, generate))
    thread.start()
    assert (await kept).ids == [END_ID]
    playing.set_result(None)
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()
    assert seen == [[2]]


def test_interrupt_of_the_sampling_thread_cancels_the_rollouts() -> None:
    calls, playing = ModelCalls(), concurrent.futures.Future[None]()

    def interrupted(batch: Sequence[Any]) -> list[Sampled]:
        raise KeyboardInterrupt

    def ask() -> None:
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(calls.sample([1], ASKED), 0.5))

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        calls.answer_until(playing, interrupted)
    assert playing.cancelled()
    thread.join()


async def test_a_vllm_server_is_asked_in_token_ids_for_its_own_model(tmp_path: Path) -> None:
    server = TokenPolicy(TOKENIZER, lambda text, chance: write(text) + END)
    async with server.running() as url:

        def play() -> dict[str, Any]:
            host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
            vllm = trainer(use_vllm=True, vllm_server_host=host, vllm_server_port=int(port), temperature=0.7, top_p=0.9)
            vllm.processing_class.name_or_path = str(small_tokenizer_path())
            with HermesRollouts(spec_in(tmp_path), rows=1) as rollouts:
                return rollouts.rollout_func(prompts_of(rollouts), vllm)

        columns = await asyncio.to_thread(play)
    assert columns["score"] == [1.0] * 4
    assert {(body["temperature"], body["top_p"], "model" in body) for body in server.asked} == {(0.7, 0.9, False)}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tools": [len]}, "name them in the spec"),
        ({"top_k": 20}, "top_k=20 of TRL"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"top_p": 0.9}, "top_p=0.9: .* use vLLM"),
        ({"is_fsdp_enabled": True}, "sharded .*use_vllm=True"),
        ({"deepspeed": SimpleNamespace(zero_stage=3)}, "ZeRO-3"),
        ({"use_transformers_continuous_batching": True}, "continuous_batching is not supported"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs"),
        ({"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2}, "vllm_mode='server'"),
        ({"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}, "sleep between calls"),
    ],
)
def test_trainer_settings_that_conflict_with_rollouts_are_refused(
    given: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with HermesRollouts(spec_in(tmp_path), rows=1) as rollouts, pytest.raises(UserError, match=says):
        rollouts.rollout_func(prompts_of(rollouts), trainer(processing_class=TrainersTokenizer(), **given))


def test_the_temperature_is_the_trainers(tmp_path: Path) -> None:
    given = HermesRollouts(spec_in(tmp_path), rows=1, policy=Sampler().policy(), sampling={"temperature": 0.5})
    with given as rollouts, pytest.raises(UserError, match="temperature is TRL's"):
        rollouts.rollout_func(prompts_of(rollouts), trainer())


# --------------------------------------------------------------------------------------------- AsyncGRPOTrainer


@dataclass
class RolloutSample:
    """As TRL's, as far as it is looked at."""

    prompt: Any
    completion: Any
    input_ids: Any
    completion_mask: Any
    old_log_probs: Any
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one thing of TRL that the worker takes."""
    names = ["trl", "trl.experimental", "trl.experimental.async_grpo"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    home = ModuleType(f"{names[-1]}.async_rollout_worker")
    home.RolloutSample = RolloutSample  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home.__name__, home)


def configuration(**given: Any) -> Any:
    plain = {
        "num_generations": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0,
        "max_staleness": 1, "queue_maxsize": 10, "max_inflight_tasks": 8, "vllm_server_base_url": "http://127.0.0.1:9",
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **given})


def taken(worker: HermesWorker, many: int) -> Iterator[RolloutSample]:
    for _ in range(many):
        yield worker.rollout_buffer.get(timeout=30)


def told(worker: HermesWorker) -> list[dict[str, Any]]:
    found = []
    while not worker.metrics_queue.empty():
        found.append(worker.metrics_queue.get())
    return found


@pytest.mark.usefixtures("installed")
def test_all_sequences_of_a_group_are_queued_and_a_full_queue_blocks(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", keeps_thinking=False)
    sampler = Sampler(wrong=0.5, thought="<think>\nI add.\n</think>\n\n")
    with HermesWorker(spec_in(tmp_path), configuration(), policy=sampler.policy(folder)) as worker:
        assert len(worker.train_dataset) == 4
        worker.update_model_version(5)
        worker.start()
        samples = list(taken(worker, 24))
        worker.check_health(10)
        waiting = len(sampler.asked)
        until_blocking(worker.rollout_buffer.full)
        until_blocking(stays(lambda: len(sampler.asked)))
        assert len(sampler.asked) - waiting < 80  # the queue is full, and only what was begun is played
        assert worker.rollout_buffer.full()
    by_group = Counter(one.group_id for one in samples)
    assert by_group == {0: 8, 1: 8, 2: 8}
    assert {one.model_version for one in samples} == {5}
    for one in samples:
        assert len(one.input_ids) == len(one.completion_mask) == len(one.old_log_probs)
        assert (one.old_log_probs[one.completion_mask == 0] == 0).all()
        assert one.completion_mask.any()
        assert one.metrics["reward"] == one.metrics["rewards/right"]
        assert one.prompt[-1]["role"] == "user"
        assert one.completion[-1]["role"] == "assistant"
    for number in by_group:
        assert sum(one.advantage for one in samples if one.group_id == number) == pytest.approx(0)
    first = told(worker)[0]
    assert first["hermes_rl/zero_variance_frac"][1] == 1
    assert first["hermes_rl/versions_spread_max"] == 0.0


@pytest.mark.usefixtures("installed")
def test_log_probabilities_that_do_not_exist_are_refused_and_never_made_up(tmp_path: Path) -> None:
    async def chat(messages: Sequence[Any], tools: Any) -> str:
        return "The sum is 3."

    given = {"policy": Policy.chat(chat, tokenizer=TOKENIZER), "allow_inexact": True}
    with HermesWorker(spec_in(tmp_path), configuration(max_staleness=None), **given) as worker:
        worker.start()
        with pytest.raises(UserError, match="no log-probabilities, and TRL trains with the log-probabilities"):
            until_blocking(lambda: worker.check_health(30))
        assert worker.rollout_buffer.empty()


@pytest.mark.usefixtures("installed")
def test_stale_and_uniform_groups_are_excluded_and_counted(tmp_path: Path) -> None:
    sampler = Sampler(wrong=0.1, version=1)  # 43 of 100 groups of eight are uniform
    given = {"policy": sampler.policy(), "drop_uniform": True}
    with HermesWorker(spec_in(tmp_path), configuration(queue_maxsize=100), **given) as worker:
        worker.update_model_version(2)
        worker.start()
        samples, parts = list(taken(worker, 8)), []
        while not any(uniform for uniform, _ in parts) and len(samples) < 800:
            samples += taken(worker, 8)
            parts += [one["hermes_rl/zero_variance_frac"] for one in told(worker)]
        assert {one.model_version for one in samples} == {1}
        assert all(one.metrics["reward_std"] > 0 for one in samples)
        assert sum(uniform for uniform, _ in parts) > 0
        assert all(whole == uniform + 1 for uniform, whole in parts)
        worker.update_model_version(5)
        enough, deadline = len(sampler.asked) + 80, time.monotonic() + 60
        while len(sampler.asked) < enough and time.monotonic() < deadline:  # ten groups whose weights are too old
            with suppress(queue.Empty):
                worker.rollout_buffer.get(timeout=0.05)
        sampler.version = 5
        while worker.rollout_buffer.get(timeout=30).model_version != 5:
            pass
        assert sum(one["hermes_rl/left_out_stale_total"] for one in told(worker)) > 0


@pytest.mark.usefixtures("installed")
def test_groups_that_failed_are_counted_by_their_cause_and_never_sent(tmp_path: Path) -> None:
    sampler = Sampler(fails=0.8, version=0)
    with HermesWorker(spec_in(tmp_path), configuration(queue_maxsize=500), policy=sampler.policy()) as worker:
        worker.start()
        counted: Counter[str] = Counter()

        def failures() -> bool:
            for one in told(worker):
                counted.update(one.keys())
            return counted["hermes_rl/failed_server_failure_total"] >= 2

        until_blocking(failures, seconds=60)
    while not worker.rollout_buffer.empty():
        assert worker.rollout_buffer.get().metrics["reward"] in (0.0, 1.0)


@pytest.mark.usefixtures("installed")
def test_worker_failure_is_raised_by_the_health_check(tmp_path: Path) -> None:
    async def chat(messages: Sequence[Any], tools: Any) -> str:
        return "The sum is 3."

    policy = Policy.chat(chat, tokenizer=TOKENIZER)
    policy.version = 0
    with HermesWorker(spec_in(tmp_path), configuration(max_staleness=9), policy=policy) as worker:
        with pytest.raises(RunError, match="has not been started"):
            worker.check_health(1)
        worker.start()
        with pytest.raises(UserError):
            until_blocking(lambda: worker.check_health(1), seconds=60)
        worker.stop()
        worker.stop()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("workers", [None, pytest.param(2, marks=pytest.mark.slow)])
async def test_versions_of_an_adapter_are_asked_for_by_their_names(tmp_path: Path, workers: int | None) -> None:
    server = TokenPolicy(TOKENIZER, lambda text, chance: write(text) + END)
    async with server.running() as url:

        def play() -> None:
            args = configuration(vllm_server_base_url=url.removesuffix("/v1"))
            given = {"tokenizer": str(small_tokenizer_path()), "adapter": "trl-policy"}
            with HermesWorker(spec_in(tmp_path), args, "base", **given, workers=workers) as worker:
                worker.update_model_version(1)
                worker.start()
                assert {one.model_version for one in taken(worker, 4)} == {1}
                worker.update_model_version(2)
                while next(taken(worker, 1)).model_version != 2:
                    pass

        await asyncio.to_thread(play)
    assert list(dict.fromkeys(body["model"] for body in server.asked)) == ["trl-policy-v1", "trl-policy-v2"]


def test_missing_trl_error_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(UserError, match=r"needs TRL 1\.16.*pip install .*\[trl\]"):
        HermesWorker(spec_in(tmp_path), configuration(), "base")


@pytest.mark.usefixtures("installed")
def test_a_worker_needs_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name the `model`"):
        HermesWorker(spec_in(tmp_path), configuration())


# --------------------------------------------------------------------------------------------------- TRL's own loop


def test_the_tools_of_a_spec_are_methods_and_its_rewards_score(tmp_path: Path) -> None:
    with HermesEnvironments(spec_in(tmp_path)) as environments:
        columns = environments.train_dataset[0]
        assert columns["prompt"][-1] == {"role": "user", "content": "What is 1 plus 2?"}
        made = [environments.environment_factory() for _ in range(3)]
        named = [name for name, _ in inspect.getmembers(type(made[0]), inspect.isfunction) if not name.startswith("_")]
        assert named == ["add", "reset"]  # whatever else is public would be a tool
        signature = inspect.signature(made[0].add)
        assert {name: one.annotation for name, one in signature.parameters.items()} == {"a": int, "b": int}
        assert made[0].add.__doc__ == "Add two numbers.\n\nArgs:\n    a: a\n    b: b"
        for one in made:
            one.reset(**columns)
        assert [one.add(a=1, b=2) for one in made[:2]] == ["3", "3"]
        said = [[{"role": "assistant", "content": text}] for text in ("The sum is 3.", "4", "")]
        (score,) = environments.reward_funcs
        assert score(completions=said, environments=made, prompts=[]) == [1.0, 0.0, 0.0]
        made[0].reset(**columns)
        for _ in range(4):  # agent.max_turns
            last = call_or_end(made[0].add)
        assert last == "the episode is over: max_turns"
        assert score(completions=[[{"role": "tool", "content": "x"}]], environments=made[:1], prompts=[]) == [0.0]


def call_or_end(add: Callable[..., str]) -> str:
    try:
        return add(a=1, b=2)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TEXT + "user: {system: Be brief.}\nservers: {user: {type: scripted}}", "simulated user"),
        (re.sub("tools: .*", "", TEXT).replace("agent: {", "agent: {program: {command: [x]}, "), "is a program"),
        (
            TEXT + "agents: {a: {}, b: {server: rival, train: false}}\nschedule: alternate\n"
            "servers: {rival: {type: scripted}}",
            "several agents",
        ),
        (TEXT + "toolsets: {distribution: {todo: 0.5, terminal: 0.5}}", "tools differ between rows"),
        (COMPARED, "rewards.longest compares the members of a group, and TRL's own loop runs each"),
    ],
)
def test_spec_features_that_the_trl_loop_lacks_are_refused(text: str, says: str, tmp_path: Path) -> None:
    opened = HermesEnvironments(spec_in(tmp_path, text))
    with opened as environments, pytest.raises(UserError, match=f"{says}.*use HermesRollouts"):
        environments.environment_factory  # noqa: B018


# ------------------------------------------------------------------------------------------------------- documents


def test_the_scripts_of_the_page_are_python_and_its_configuration_is_yaml() -> None:
    scripts = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(scripts) == 4
    for script in scripts:
        compile(script, "trl.md", "exec")
    (configuration,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    named = yaml.safe_load(configuration)["trl"]
    namespace: dict[str, Any] = {"__name__": "plays"}
    exec(compile(scripts[3], "plays.py", "exec"), namespace)
    for path in [named["rollout_func"], *named["reward_funcs"], "plays.prompts"]:
        assert path.startswith("plays.")
        assert len(inspect.signature(namespace[path.removeprefix("plays.")]).parameters) >= 2
    assert namespace["prompts"](None)({"prompt": "key"}) == {"prompt": "key"}
