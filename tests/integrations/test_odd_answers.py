"""What a trainer's own sampling may give back: each door makes a clear error or the right tokens of it, in time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hermes_rl import Policy, Sampled
from hermes_rl.errors import RunError, UserError
from hermes_rl.integrations.background_loop import Call
from hermes_rl.integrations.trl import HermesRollouts
from hermes_rl.integrations.verl import VerlAgentLoop
from tests.api.summing import END, TOKENIZER, Sampler, spec_in, write
from tests.integrations import test_openrlhf, test_skyrl, test_trl, test_verl

installed_verl, installed_openrlhf = test_verl.installed, test_openrlhf.installed
Change = Callable[[list[Any], list[Any]], tuple[Any, Any, Any]]


def raising(error: BaseException) -> Change:
    def change(ids: list[Any], logprobs: list[Any]) -> Any:
        raise error

    return change


ODD: dict[str, Change] = {
    "a log-probability is missing": lambda ids, logprobs: (ids, logprobs[:-1], "stop"),
    "a log-probability too many": lambda ids, logprobs: (ids, [*logprobs, -1.0], "stop"),
    "no log-probabilities": lambda ids, logprobs: (ids, [], "stop"),
    "None in their place": lambda ids, logprobs: (ids, None, "stop"),
    "a number in their place": lambda ids, logprobs: (ids, -1.0, "stop"),
    "None among them": lambda ids, logprobs: (ids, [None, *logprobs[1:]], "stop"),
    "NaN among them": lambda ids, logprobs: (ids, [math.nan, *logprobs[1:]], "stop"),
    "a text among them": lambda ids, logprobs: (ids, ["-1.0", *logprobs[1:]], "stop"),
    "one above 0": lambda ids, logprobs: (ids, [0.01, *logprobs[1:]], "stop"),
    "minus infinity": lambda ids, logprobs: (ids, [-math.inf, *logprobs[1:]], "stop"),
    "no tokens": lambda ids, logprobs: ([], [], "stop"),
    "None in place of tokens": lambda ids, logprobs: (None, logprobs, "stop"),
    "a text in place of tokens": lambda ids, logprobs: ("x" * len(ids), logprobs, "stop"),
    "a fraction among the tokens": lambda ids, logprobs: ([1.5, *ids[1:]], logprobs, "stop"),
    "a negative token": lambda ids, logprobs: ([-1, *ids[1:]], logprobs, "stop"),
    "a token that no vocabulary has": lambda ids, logprobs: ([2**40, *ids[1:]], logprobs, "stop"),
    "nested tokens": lambda ids, logprobs: ([ids], [logprobs], "stop"),
    "tokens after the turn's end": lambda ids, logprobs: ([*ids, ids[0]], [*logprobs, -1.0], "stop"),
    "aborted again and again": lambda ids, logprobs: ([], [], "abort"),
    "an error": raising(ValueError("out of memory")),
    "a wait that ended": raising(TimeoutError()),
    "a cancelled wait": raising(asyncio.CancelledError()),
    "an ended iteration": raising(StopAsyncIteration()),
}
"""What the sampling gives of right ids and log-probabilities: ids, log-probabilities, and why it stopped."""
WORDS = {
    "a log-probability is missing": "27 tokens and 26 log-probabilities",
    "a log-probability too many": "27 tokens and 28 log-probabilities",
    "NaN among them": "has the log-probability nan",
    "a token that no vocabulary has": "no list of token ids",
    "aborted again and again": "broke a generation off 3 times",
    "an error": "raised ValueError: out of memory",
    "a cancelled wait": "was cancelled by its own code",
}
"""What the user reads of some of them."""
RIGHT: dict[str, Change] = {
    "arrays": lambda ids, logprobs: (np.array(ids), np.array(logprobs, dtype=np.float64), "stop"),
    "numbers of numpy": lambda ids, logprobs: (list(np.array(ids)), list(np.array(logprobs)), "stop"),
    "a rounding above 0": lambda ids, logprobs: (ids, [5e-7, *logprobs[1:]], "stop"),
}


async def of_verl(folder: Path, change: Change) -> float:
    sampler = Sampler()

    class Manager:
        async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
            answer = await sampler(prompt_ids, test_verl.sampling_of(sampling_params))
            ids, logprobs, finish = change(list(answer.ids), list(answer.logprobs))
            finish = {"stop": "completed", "abort": "aborted"}[finish]
            return SimpleNamespace(token_ids=ids, log_probs=logprobs, stop_reason=finish, extra_fields={})

    played = test_verl.loop(folder, Manager(), retries=0)
    (key, *_) = await test_verl.rows(folder)
    output = await played.run(dict(test_verl.PARAMETERS), **test_verl.sample(key))
    return float(output.reward_score)


async def of_skyrl(folder: Path, change: Change) -> float:
    class Engine(test_skyrl.Engine):
        async def generate(self, given: dict[str, Any]) -> dict[str, Any]:
            answer: Sampled = await self.sampler(given["prompt_token_ids"][0], None)  # type: ignore[arg-type]
            ids, logprobs, finish = change(list(answer.ids), list(answer.logprobs))
            return {"response_ids": [ids], "stop_reasons": [finish], "response_logprobs": [logprobs]}

    spec = spec_in(folder)
    played = test_skyrl.generator(spec, Engine(), retries=0)
    try:
        whole = await test_skyrl.batch(spec, size=1)
        one = {name: value[:1] if isinstance(value, list) else value for name, value in whole.items()}
        output = await played.generate(one)
    finally:
        await played.close()
    return float(output["rewards"][0])


async def of_openrlhf(folder: Path, change: Change) -> float:
    class Engine(test_openrlhf.Engine):
        async def generate(
            self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None
        ) -> Any:
            answer = await self.sampler(prompt_token_ids, sampling_params)
            ids, logprobs, finish = change(list(answer.ids), list(answer.logprobs))
            steps = logprobs
            if hasattr(logprobs, "__iter__"):
                known = [*(ids if isinstance(ids, list | np.ndarray) else answer.ids), *answer.ids]
                steps = [
                    {token if not isinstance(token, list) else 0: SimpleNamespace(logprob=value)}
                    for token, value in zip(known, logprobs, strict=False)  # ids come twice, so that none is short
                ]
            output = SimpleNamespace(token_ids=ids, logprobs=steps, finish_reason=finish)
            return SimpleNamespace(outputs=[output])

    (response,) = await test_openrlhf.play(spec_in(folder), Engine())
    return float(response["reward"])


async def of_trl(folder: Path, change: Change, count: Callable[[list[Any]], Any] = list) -> float:
    class Rollouts(HermesRollouts):
        def _policy_of(self, trainer: Any) -> Policy:
            policy = super()._policy_of(trainer)
            self._generate = answers
            return policy

    def answers(trainer: Any, calls: Sequence[Call]) -> Any:
        made = []
        for ids, _ in calls:
            tokens = TOKENIZER.encode(write(TOKENIZER.decode(ids)) + END)
            made.append(Sampled(*change(tokens, [-0.5] * len(tokens))))
        return count(made)

    def play() -> float:
        training = test_trl.trainer(num_generations=1, processing_class=test_trl.TrainersTokenizer())
        with Rollouts(spec_in(folder), rows=1, retries=0) as rollouts:
            return float(rollouts.rollout_func(list(rollouts.rows("train")), training)["score"][0])

    return await asyncio.to_thread(play)


@pytest.mark.parametrize(
    ("count", "problem"),
    [
        (lambda made: made[:-1], "1 calls got 0 answers"),
        (lambda made: made * 2, "1 calls got 2 answers"),
        (lambda made: None, "'NoneType' object is not iterable"),
        (lambda made: next(iter([])), "raised RuntimeError: StopIteration"),
    ],
)
async def test_wrong_number_of_answers_of_a_trainer_is_a_clear_error(tmp_path: Path, count: Any, problem: str) -> None:
    with pytest.raises(RunError, match=f"server_failure.*{problem}"):
        await asyncio.wait_for(of_trl(tmp_path, RIGHT["arrays"], count), 60)


@pytest.mark.parametrize("door", [of_verl, of_skyrl, of_openrlhf, of_trl])
async def test_odd_answer_of_a_trainer_is_a_clear_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed_verl: None,
    installed_openrlhf: None,
    door: Callable[[Path, Change], Awaitable[float]],
) -> None:
    monkeypatch.setattr("hermes_rl.servers.client._MOST_ABORTS", 3)

    async def outcome(number: int, change: Change) -> str:
        (folder := tmp_path / str(number)).mkdir()
        try:
            score = await asyncio.wait_for(door(folder, change), 30)
        except (RunError, UserError) as error:
            return str(error)
        return f"score {score}"

    cases = {**ODD, **RIGHT}
    found = await asyncio.gather(*(outcome(number, change) for number, change in enumerate(cases.values())))
    named = dict(zip(cases, found, strict=True))
    assert {name: text for name, text in named.items() if name in ODD and "server_failure" not in text} == {}
    for name, text in named.items():
        assert WORDS.get(name, "") in text
    assert {named[name] for name in RIGHT} == {"score 1.0"}
    await VerlAgentLoop.close()
