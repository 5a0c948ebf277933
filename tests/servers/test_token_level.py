"""Token-level servers: three dialects, answers that are wrong, weights that change, pauses and aborts."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hermes_rl.agent.loop import HermesAgentLoop
from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.errors import RowFailure, ServerFailure
from hermes_rl.servers.base import (
    ChatRequest,
    ContextLengthExceeded,
    Malformed,
    ServerConfig,
    drawn_seed,
    generated,
    version_of,
)
from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.factory import create_client
from hermes_rl.servers.transport import RetryPolicy
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.rendering import render_prompt
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from hermes_rl.tokens.transcript import Transcript, WeightVersions
from hermes_rl.tools.base import Toolkit
from hermes_rl.tools.python_tools import python_tool
from tests.servers.token_policy import TokenPolicy

SMALL = load_tokenizer()
STOP = "<|im_end|>"
HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name":"add", "arguments": {"a": 2,   "b": 3}}\n</tool_call>'
DIALECTS = {"vllm": ("completions",), "sglang": ("generate",), "atropos": ("generate",)}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


TOOLKIT = Toolkit([python_tool(add)])


def adds(prompt: str, _: random.Random) -> str:
    """Calls the tool once, then answers; goes on where it was broken off."""
    turn = prompt.rpartition("<|im_start|>assistant\n")[2]
    whole = f"The sum is 5.{STOP}" if "tool_response" in prompt.rpartition("<|im_start|>tool")[2] else CALL + STOP
    return whole[len(turn) :] if whole.startswith(turn) else whole


def role_of(kind: str, url: str, **more: Any) -> ModelClient:
    config = ServerConfig(kind, url, "m", tokenizer=str(small_tokenizer_path()), **more)
    return create_client("policy", [config], RetryPolicy(random=lambda: 0.0))


async def play(role: ModelClient, **options: Any) -> Any:
    try:
        return await HermesAgentLoop(role, TOOLKIT.schemas, options=LoopOptions(**options)).run(HI)
    finally:
        await role.close()


@pytest.mark.parametrize("kind", DIALECTS)
async def test_ids_go_in_and_ids_and_logprobs_come_out(kind: str) -> None:
    policy = TokenPolicy(SMALL, adds, DIALECTS[kind])
    async with policy.running() as url:
        result = await play(role_of(kind, url), max_tokens=50, seed=3, temperature=0.7, top_p=0.9)
    assert (result.stop_reason, result.final_response) == (StopReason.FINISHED, "The sum is 5.")
    (sequence,) = result.transcript.sequences()
    assert sequence.trained == [token for one in policy.log for token in one.ids]
    assert list(sequence.sampled) == [value for one in policy.log for value in one.logprobs]
    assert policy.log[1].prompt == sequence.tokens[: len(policy.log[1].prompt)]
    assert [one.seed for one in policy.log] == [drawn_seed(3, "turn", 0), drawn_seed(3, "turn", 1)]
    asked = policy.asked[0].get("sampling_params", policy.asked[0])
    assert (asked["temperature"], asked["top_p"], asked["skip_special_tokens"]) == (0.7, 0.9, False)
    assert asked["stop_token_ids"] == SMALL.encode(STOP)
    assert result.usage.completion_tokens == len(sequence.trained)


def _cached(body: dict[str, Any]) -> None:
    if "meta_info" in body:
        body["meta_info"]["cached_tokens"] = 4
    else:
        body["usage"] = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_cached_tokens_that_a_server_reports_have_their_price(kind: str) -> None:
    policy = TokenPolicy(SMALL, adds, DIALECTS[kind])
    policy.faults = [_cached]
    async with policy.running() as url:
        role = role_of(kind, url, prices={"prompt": 1e6, "completion": 0.0, "cached": 0.0})
        replies = [await role.chat(ChatRequest(HI)) for _ in range(2)]
        await role.close()
    costs = [reply.usage["prompt_tokens"] - reply.usage["cost"] for reply in replies]
    assert costs == pytest.approx([4, 0]), "the second answer names no cached tokens"


async def test_vllm_without_the_path_is_asked_the_older_way_and_probed_once() -> None:
    policy = TokenPolicy(SMALL, adds, ("generate",))
    async with policy.running() as url:
        role = role_of("vllm", url)
        await asyncio.gather(*(role.chat(ChatRequest(HI)) for _ in range(8)))
        await play(role)
    assert all("prompt_token_ids" in body["prompt"] for body in policy.asked)
    assert len(policy.log) == 10


async def test_the_managed_state_has_every_sequence() -> None:
    policy = TokenPolicy(SMALL, adds)
    async with policy.running() as url:
        result = await play(role_of("vllm", url))
    (node,) = result.managed_state["nodes"]
    assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
    assert [token for token in node.masked_tokens if token != -100] == [t for one in policy.log for t in one.ids]


async def test_unparsable_tool_call_returns_an_error_to_the_model() -> None:
    answers = [f'<tool_call>\n{{"name": "add", "arguments": {{"a": 2,}}\n</tool_call>{STOP}', f"Sorry.{STOP}"]
    policy = TokenPolicy(SMALL, lambda prompt, _: answers.pop(0))
    async with policy.running() as url:
        result = await play(role_of("vllm", url))
    assert result.tool_errors[0].error == "this tool call cannot be executed: its arguments are no valid JSON"
    assert "no valid JSON" in result.messages[-2]["content"]
    assert len(result.transcript.branches) == 1
    assert "no valid JSON" in policy.tokenizer.decode(policy.log[1].prompt)


async def test_a_cut_turn_is_text_and_calls_nothing() -> None:
    policy = TokenPolicy(SMALL, adds)
    async with policy.running() as url:
        result = await play(role_of("vllm", url), max_tokens=4)
    assert (result.stop_reason, result.tool_calls) == (StopReason.LENGTH, [])
    assert len(result.transcript.sequences()[0].trained) == 4


def _drop(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["choices"][0].pop(key)


def _logprob(value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        body["choices"][0]["logprobs"]["token_logprobs"][0] = value

    return change


def _ids(change: Callable[[list[int]], list[int]]) -> Callable[[dict[str, Any]], None]:
    """Change the ids of an answer; each has a log-probability."""

    def apply(body: dict[str, Any]) -> None:
        choice = body["choices"][0]
        choice["token_ids"] = change(choice["token_ids"])
        choice["logprobs"]["token_logprobs"] = [-0.5] * len(choice["token_ids"])

    return apply


WRONG = {
    "no ids": _drop("token_ids"),
    "no log-probabilities": _drop("logprobs"),
    "one too few": lambda body: body["choices"][0]["logprobs"]["token_logprobs"].pop(),
    "None": _logprob(None),
    "positive": _logprob(0.5),
    "sentinel": _logprob(-9999.0),
    "text": _logprob("x"),
    "not in the vocabulary": _ids(lambda ids: [10_000_000, *ids[1:]]),
    "negative": _ids(lambda ids: [-1, *ids[1:]]),
    "more than were asked for": _ids(lambda ids: ids * 5000),
    "an error": lambda body: body["choices"][0].update(finish_reason="error"),
    "no tokens": lambda body: body["choices"][0].update(token_ids=[], logprobs={"token_logprobs": []}),
    "no choices": lambda body: body.pop("choices"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_wrong_answer_is_asked_for_again_and_never_trained_on(what: str) -> None:
    policy = TokenPolicy(SMALL, adds)
    policy.faults = [WRONG[what]]
    async with policy.running() as url:
        result = await play(role_of("vllm", url))
    assert result.stop_reason is StopReason.FINISHED
    (sequence,) = result.transcript.sequences()
    assert sequence.trained == [token for one in policy.log[1:] for token in one.ids]


async def test_answers_that_stay_wrong_are_a_failure() -> None:
    policy = TokenPolicy(SMALL, adds)
    policy.faults = [WRONG["sentinel"]] * 10
    async with policy.running() as url:
        with pytest.raises(ServerFailure, match="which no token can have"):
            await play(role_of("vllm", url))


async def test_a_log_probability_above_0_by_rounding_counts_as_0() -> None:
    policy = TokenPolicy(SMALL, adds)
    policy.faults = [_logprob(1e-7)]
    async with policy.running() as url:
        result = await play(role_of("vllm", url))
    (sequence,) = result.transcript.sequences()
    assert sequence.trained == [token for one in policy.log for token in one.ids]
    assert max(sequence.sampled) == 0.0


async def test_a_token_of_the_padding_of_a_vocabulary_is_trained() -> None:
    policy = TokenPolicy(SMALL, adds)
    padding = max(SMALL.vocabulary.values()) + 11
    policy.faults = [_ids(lambda ids: [padding, *ids])]
    async with policy.running() as url:
        result = await play(role_of("vllm", url))
    (sequence,) = result.transcript.sequences()
    assert (result.stop_reason, sequence.trained[0]) == (StopReason.FINISHED, padding)


def test_numbers_of_a_server_are_read_with_care() -> None:
    assert [version_of(value) for value in (3, "12", "default", "v2", None, True)] == [3, 12, 0, None, None, None]
    assert [version_of(value) for value in (-1, 2**70, "9" * 5000, 1.5, [3])] == [None] * 5
    assert generated([1], [0.0], "stop").logprobs == [0.0]
    for ids, logprobs in (
        ([1.5], [-1.0]), ("ab", [-1.0]), ([-1], [-1.0]), ([1], [float("nan")]), ([1], [True]),
        ([True], [-1.0]), ([2**31], [-1.0]), ([10**400], [-1.0]), ([1], [-(10**400)]),
        ([1, 2, 3], [-1.0, float("nan"), -2.0]), ([1, 2], [-1.0, 0.5]), ([1, True], [-1.0, -1.0]),
    ):  # fmt: skip
        with pytest.raises(Malformed):
            generated(ids, logprobs, "stop")


@pytest.mark.parametrize("kind", ["sglang", "atropos"])
async def test_each_step_records_the_versions_of_its_weights(kind: str) -> None:
    policy = TokenPolicy(SMALL, adds, DIALECTS[kind])
    async with policy.running() as url:
        role, transcript = role_of(kind, url), Transcript()
        for version in (4, 5):
            policy.version = version
            await role.chat(ChatRequest(HI, transcript=transcript))
        assert await role.weights() == 5
        await role.close()
    # 5 was not known when the second call was sent, so it may have begun with 4.
    assert [turn.weights for turn in transcript.turns] == [WeightVersions(4, 4), WeightVersions(4, 5)]


async def test_concurrent_calls_continue_if_the_weights_path_is_missing() -> None:
    policy = TokenPolicy(SMALL, adds)
    policy.tells = set()
    async with policy.running() as url:
        role, transcript = role_of("vllm", url, weights_path="/model_info"), Transcript()
        await asyncio.gather(*(role.chat(ChatRequest(HI)) for _ in range(8)))
        await role.chat(ChatRequest(HI, transcript=transcript))
        await role.close()
    assert (len(policy.log), policy.told.count("/model_info")) == (9, 1)
    assert [turn.weights for turn in transcript.turns] == [WeightVersions()]


@pytest.mark.parametrize("path", ["/get_weight_version", "/model_info"])
async def test_older_and_newer_sglang_tell_the_version_of_their_weights(path: str) -> None:
    policy = TokenPolicy(SMALL, adds, DIALECTS["sglang"])
    policy.tells, policy.version = {path}, 4
    async with policy.running() as url:
        role, transcript = role_of("sglang", url), Transcript()
        await asyncio.gather(*(role.chat(ChatRequest(HI)) for _ in range(8)))
        await role.chat(ChatRequest(HI, transcript=transcript))
        assert await role.weights() == 4
        await role.close()
    assert [turn.weights for turn in transcript.turns] == [WeightVersions(4, 4)]
    assert policy.told.count("/get_weight_version") == 1 or path == "/get_weight_version"


async def test_a_server_that_tells_no_version_is_believed_to_have_none() -> None:
    policy = TokenPolicy(SMALL, adds)
    async with policy.running() as url:
        transcript = Transcript()
        role = role_of("vllm", url)
        await role.chat(ChatRequest(HI, transcript=transcript))
        assert await role.weights() is None
        told = role_of("vllm", url, weights_path="/get_weight_version")
        await told.chat(ChatRequest(HI, transcript=transcript))
        await asyncio.gather(role.close(), told.close())
    assert [turn.weights for turn in transcript.turns] == [WeightVersions(), WeightVersions(0, 0)]


@pytest.mark.parametrize("kind", DIALECTS)
async def test_aborted_generation_continues_from_its_partial_ids(kind: str) -> None:
    policy = TokenPolicy(SMALL, adds, DIALECTS[kind])
    policy.cut_at = 5
    async with policy.running() as url:
        result = await play(role_of(kind, url), max_tokens=60)
    assert result.stop_reason is StopReason.FINISHED
    first, rest = policy.log[:2]
    assert rest.prompt == first.prompt + first.ids
    (sequence,) = result.transcript.sequences()
    assert list(sequence.sampled) == [value for one in policy.log for value in one.logprobs]
    assert result.turns_used == 2
    limits = [body.get("max_tokens") or body["sampling_params"]["max_new_tokens"] for body in policy.asked]
    assert limits[:2] == [60, 55]


NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@pytest.mark.parametrize(("kind", "top_k"), [("vllm", 0), ("sglang", -1)])
async def test_unset_sampling_options_are_sent_as_neutral_values(kind: str, top_k: int) -> None:
    policy = TokenPolicy(SMALL, adds, DIALECTS[kind])
    async with policy.running() as url:
        plain = await play(role_of(kind, url), temperature=None)
        own = await play(role_of(kind, url), temperature=0.7, top_p=0.9, extra_body={"top_k": 5, "no_such": 1})
    asked = [body.get("sampling_params", body) for body in policy.asked]
    neutral = {**NEUTRAL, "temperature": 1.0, "top_p": 1.0, "top_k": top_k}
    chosen = {**NEUTRAL, "temperature": 0.7, "top_p": 0.9, "top_k": 5}
    assert [{name: body[name] for name in neutral} for body in asked] == [neutral] * 2 + [chosen] * 2
    assert not any("no_such" in body for body in policy.asked), "only what is known to be a parameter of sampling"
    assert [reply.sampling for reply in (plain.replies[0], own.replies[0])] == [neutral, chosen]


async def test_older_server_receives_only_the_set_sampling_options() -> None:
    policy = TokenPolicy(SMALL, adds, DIALECTS["atropos"])
    async with policy.running() as url:
        result = await play(role_of("vllm", url), temperature=0.7)
    assert result.replies[0].sampling == {"temperature": 0.7}
    assert not policy.asked[0].keys() & NEUTRAL.keys()


@pytest.mark.parametrize("kind", DIALECTS)
async def test_continuation_after_an_abort_uses_a_different_seed(kind: str) -> None:
    policy = TokenPolicy(SMALL, adds, DIALECTS[kind])
    policy.cut_at = 5
    async with policy.running() as url:
        await play(role_of(kind, url), max_tokens=60, seed=3)
    seeds = [one.seed for one in policy.log]
    assert (len(seeds), len(set(seeds)), None in seeds) == (3, 3, False)


async def test_a_call_that_is_sent_again_keeps_its_seed() -> None:
    policy = TokenPolicy(SMALL, adds)
    policy.faults = [WRONG["no ids"], WRONG["no ids"]]
    async with policy.running() as url:
        await play(role_of("vllm", url), seed=3)
    seeds = [one.seed for one in policy.log]
    assert seeds == [drawn_seed(3, "turn", turn) for turn in (0, 0, 0, 1)]


async def test_without_a_seed_none_is_sent() -> None:
    policy = TokenPolicy(SMALL, adds)
    policy.cut_at = 5
    async with policy.running() as url:
        await play(role_of("vllm", url))
    assert len(policy.asked) == 3
    assert not any("seed" in body for body in policy.asked)


async def test_a_pause_for_new_weights_is_neither_a_failure_nor_working_time() -> None:
    policy = TokenPolicy(SMALL, adds)
    async with policy.running() as url:
        role = role_of("vllm", url)
        await role.chat(ChatRequest(HI))
        policy.pause()
        asyncio.get_running_loop().call_later(3.0, policy.resume)
        result = await play(role, timeout=2.5)
    assert result.stop_reason is StopReason.FINISHED
    assert result.timings.generation < 2.0 < result.timings.queue


async def test_a_server_that_refuses_while_it_is_paused_is_waited_for() -> None:
    policy = TokenPolicy(SMALL, adds)
    async with policy.running() as url:
        role = role_of("vllm", url)
        policy.mode = "refuse"
        asyncio.get_running_loop().call_later(1.0, policy.resume)
        result = await play(role)
    assert result.stop_reason is StopReason.FINISHED
    assert [reply.attempts for reply in result.replies] == [1, 1]


async def test_a_server_that_never_ends_its_pause_is_a_failure_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_rl.servers.weights.LONGEST_PAUSE", 0.4)
    policy = TokenPolicy(SMALL, adds)
    async with policy.running() as url:
        role = role_of("vllm", url)
        policy.mode = "refuse"
        with pytest.raises(ServerFailure, match="that it is paused"):
            async with asyncio.timeout(60):
                await play(role)
        await role.close()


async def test_a_prompt_beyond_the_context_is_the_policys_doing() -> None:
    policy = TokenPolicy(SMALL, adds)
    async with policy.running() as url:
        async with role_of("vllm", url) as role:
            policy.context = await role.count(ChatRequest(HI * 5))
        async with role_of("vllm", url) as role:
            await role.chat(ChatRequest(HI))
            with pytest.raises(ContextLengthExceeded, match=f"the model's context {policy.context}"):
                await role.chat(ChatRequest(HI * 10))


async def test_the_bound_of_a_trajectory_holds_to_the_token() -> None:
    policy = TokenPolicy(SMALL, adds)
    async with policy.running() as url:
        first, second = [(await play(role_of("vllm", url))).replies[turn].sampled for turn in (0, 1)]
        asked = len(policy.log)
        with pytest.raises(RowFailure, match=rf"{first.prompt} tokens, and agent.max_trajectory_tokens is 20"):
            await play(role_of("vllm", url), max_trajectory_tokens=20)
        assert len(policy.log) == asked
        # The tool's result leaves no room; then room for a part of the last turn, and for all of it.
        for bound, turns, stop_reason in (
            (second.prompt, 1, StopReason.TOKEN_BUDGET),
            (second.prompt + 1, 2, StopReason.TOKEN_BUDGET),
            (second.prompt + second.count, 2, StopReason.FINISHED),
        ):
            result = await play(role_of("vllm", url), max_trajectory_tokens=bound)
            assert (result.stop_reason, result.turns_used) == (stop_reason, turns)
            assert max(map(len, result.transcript.sequences())) <= bound


@pytest.mark.parametrize(
    "more",
    [
        {"content": "x" * 30_000},
        {"reasoning_content": "x" * 30_000},
        {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "[" * 30_000}}]},
    ],
)
async def test_a_large_conversation_is_rendered_off_the_event_loop(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def rendered(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return render_prompt(*arguments)

    monkeypatch.setattr("hermes_rl.servers.token_level.render_prompt", rendered)
    async with TokenPolicy(SMALL, adds).running() as url:
        role = role_of("vllm", url)
        for messages in (HI, [*HI, {"role": "assistant", "content": "", **more}, *HI]):
            await role.chat(ChatRequest(messages, TOOLKIT.schemas))
        await role.close()
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_images_are_refused_before_server_is_asked() -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    policy = TokenPolicy(SMALL, adds)
    async with policy.running() as url:
        role = role_of("vllm", url)
        with pytest.raises(ServerFailure, match=r"'policy' .*'image_url'.*only text can be sent"):
            await role.chat(ChatRequest(image))
        await role.close()
