"""Functions as servers: versions, parts and failures in their replies."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable

import pytest

from hermes_rl.errors import UserError
from hermes_rl.servers.base import ChatRequest, ContextLengthExceeded, Sampled, Sampling
from hermes_rl.servers.client import SampledByFunction, assistant
from hermes_rl.servers.transport import AttemptFailed

REQUEST = ChatRequest(())


def asked(most: int = 10, seed: int | None = None) -> Sampling:
    return Sampling(array("i", [1, 2]), most, (9,), temperature=0.5, seed=seed, extra_body={"top_k": 3}, largest=99)


class Script:
    """Gives its answers in order, or raises them; remembers the prompts, limits and seeds."""

    def __init__(self, answers: Iterable[Sampled | Exception]) -> None:
        self.answers = list(answers)
        self.prompts: list[list[int]] = []
        self.limits: list[int] = []
        self.seeds: list[int | None] = []

    async def __call__(self, ids: list[int], sampling: Sampling) -> Sampled:
        self.prompts.append(ids)
        self.limits.append(sampling.max_tokens)
        self.seeds.append(sampling.seed)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def source(*answers: Sampled | Exception, version: int | None = None) -> tuple[Script, SampledByFunction]:
    script = Script(answers)
    return script, SampledByFunction(script, 100, lambda: version)


async def test_aborted_reply_continues_from_its_tokens_with_another_seed() -> None:
    script, tokens = source(Sampled([5, 6], [-0.5, -0.25], "abort", 1), Sampled([7, 9], [-1.0, -2.0], "stop", 2))
    run = await tokens.sample(asked(seed=4), REQUEST)
    assert (run.ids.tolist(), run.logprobs.tolist(), run.finish) == ([5, 6, 7, 9], [-0.5, -0.25, -1.0, -2.0], "stop")
    assert (script.prompts, script.limits) == ([[1, 2], [1, 2, 5, 6]], [10, 8])
    assert script.seeds[0] == 4
    assert script.seeds[1] not in (None, 4), "another request has another seed"
    assert (run.before, run.after) == (1, 2)
    assert run.sampling == {"temperature": 0.5, "top_k": 3}


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Sampled([5] * 11, [-0.5] * 11, "length"), "11 tokens; at most 10 were requested"),
        (Sampled([5, 9, 6], [-0.5] * 3), "continues after the token 9, which ends a turn"),
        (Sampled([5, 100, 9], [-0.5] * 3), "the token 100, and the vocabulary ends with 99"),
        (Sampled([5, 6], [-0.5] * 2), "finish reason `stop`, but its last token 6 ends no turn"),
        (
            Sampled([5, 9], [-0.5] * 2, "stop", 2, oldest=3),
            "its first token is of version 3, and its last of version 2",
        ),
    ],
)
async def test_what_no_engine_can_have_sampled_is_refused(answer: Sampled, why: str) -> None:
    _, tokens = source(answer)
    tokens.set_vocabulary(ends=(0,))
    with pytest.raises(AttemptFailed, match=f"gave a wrong answer: .*{re.escape(why)}"):
        await tokens.sample(asked(), REQUEST)


async def test_a_turn_may_end_with_another_control_token_of_the_model() -> None:
    _, tokens = source(Sampled([5, 0], [-0.5] * 2))
    tokens.set_vocabulary(ends=(0,))
    assert (await tokens.sample(asked(), REQUEST)).ids.tolist() == [5, 0]


async def test_an_answer_that_is_broken_off_at_the_limit_is_complete() -> None:
    _, tokens = source(Sampled([5, 6], [-0.5, -0.25], "abort"))
    run = await tokens.sample(asked(most=2), REQUEST)
    assert (run.ids.tolist(), run.finish) == ([5, 6], "length")


async def test_versions_are_brackets_also_where_answers_come_out_of_order() -> None:
    one = Sampled([9], [-0.5])
    _, untold = source(one)
    run = await untold.sample(asked(), REQUEST)
    assert (run.before, run.after, await untold.weights()) == (None, None, None)
    _, pushed = source(one, version=3)
    run = await pushed.sample(asked(), REQUEST)
    assert (run.before, run.after, await pushed.weights()) == (3, 3, 3)
    _, told = source(Sampled([9], [-0.5], version=4), Sampled([9], [-0.5], version=6), Sampled([9], [-0.5], version=5))
    runs = [await told.sample(asked(), REQUEST) for _ in range(3)]
    assert [(run.before, run.after) for run in runs] == [(4, 4), (4, 6), (5, 5)]
    assert await told.weights() == 6


async def test_what_the_function_raises_is_a_failed_attempt_unless_it_says_more() -> None:
    _, tokens = source(OSError("busy"), AttemptFailed("no", retryable=False), ContextLengthExceeded(), UserError("x"))
    with pytest.raises(AttemptFailed, match="OSError: busy") as failed:
        await tokens.sample(asked(), REQUEST)
    assert failed.value.retryable
    with pytest.raises(AttemptFailed, match="no") as failed:
        await tokens.sample(asked(), REQUEST)
    assert not failed.value.retryable
    with pytest.raises(ContextLengthExceeded):
        await tokens.sample(asked(), REQUEST)
    with pytest.raises(UserError):
        await tokens.sample(asked(), REQUEST)


def test_an_assistant_message_may_be_its_text() -> None:
    assert assistant("hi") == {"role": "assistant", "content": "hi"}
    assert assistant({"tool_calls": [1]}) == {"role": "assistant", "content": None, "tool_calls": [1]}
    for wrong in ({}, {"role": "user", "content": "hi"}, None, 3):
        with pytest.raises(UserError, match="an answer is a text"):
            assistant(wrong)  # type: ignore[arg-type]
    endless: dict[str, object] = {}
    endless["more"] = endless
    for odd in (b"hi", {1}, endless):
        with pytest.raises(UserError, match="has a value that JSON cannot represent"):
            assistant({"content": None, "tool_calls": [{"function": {"name": "add", "arguments": odd}}]})
