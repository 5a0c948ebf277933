"""What environments ask of `self.server` beside chats: managed servers, completions, tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from hermes_rl import HermesAgentEnvConfig, HermesAgentLoop
from hermes_rl.errors import UserError
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.env.greetings import Greetings
from tests.env.writer_model import WriterModel, writer_model
from tests.servers.token_policy import TokenPolicy


class Asked(NamedTuple):
    policy: TokenPolicy
    url: str


@pytest.fixture
async def served() -> AsyncIterator[Asked]:
    policy = TokenPolicy(load_tokenizer(None), lambda prompt, source: f"word {source.random()}")
    async with policy.running() as url:
        yield Asked(policy, url)


def make(url: str, server_type: str = "vllm") -> Greetings:
    tokenizer = str(small_tokenizer_path())
    config = HermesAgentEnvConfig(group_size=2, tokenizer_name=tokenizer)
    server = APIServerConfig(base_url=url, model_name="m", server_type=server_type, tokenizer_name=tokenizer)
    return Greetings(config, [server])


async def test_a_managed_server_remembers_every_token_of_a_conversation(served: Asked) -> None:
    env = make(served.url)
    assert env._use_managed_server()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    async with env.server.managed_server(tokenizer=env.tokenizer) as managed:
        first = await managed.chat_completion(messages=messages, max_tokens=8, temperature=1.0)
        messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
        await managed.chat_completion(messages=messages, max_tokens=8)
        (node,) = managed.get_state()["nodes"]
        assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
        assert sum(token != -100 for token in node.masked_tokens) == sum(len(one.ids) for one in served.policy.log)
        managed.reset()
        assert managed.get_state() == {"nodes": []}
    await env.shut_down()


async def test_choices_are_separate_conversations_with_distinct_seeds(served: Asked) -> None:
    env = make(served.url)
    async with env.server.managed_server() as managed:
        completion = await managed.chat_completion(
            messages=[{"role": "user", "content": "hi"}], n=3, max_tokens=4, seed=7
        )
        assert len(completion.choices) == len(managed.get_state()["nodes"]) == 3
    assert len({one.seed for one in served.policy.log}) == 3
    await env.shut_down()


async def test_an_agent_loop_takes_a_managed_server(served: Asked) -> None:
    env = make(served.url)
    async with env.server.managed_server(tokenizer=env.tokenizer) as managed:
        loop = HermesAgentLoop(managed, [], set(), max_turns=2, max_tokens=8)
        result = await loop.run([{"role": "user", "content": "hi"}])
        nodes = managed.get_state()["nodes"]
    assert result.managed_state is not None
    assert [node.tokens for node in result.managed_state["nodes"]] == [node.tokens for node in nodes]
    await env.shut_down()


async def test_completion_continues_the_prompt_tokens_unchanged(served: Asked) -> None:
    env = make(served.url)
    completion = await env.server.completion(prompt="once upon", max_tokens=5, n=2)
    assert len(completion.choices) == 2
    prompt, outputs, logprobs, reasons = await env.server.tokens_and_logprobs_completion(
        prompt="once upon", max_tokens=5, n=2
    )
    assert prompt == env.tokenizer.encode("once upon", add_special_tokens=False)
    assert [len(ids) for ids in outputs] == [len(values) for values in logprobs]
    assert all(0 < len(ids) <= 5 for ids in outputs)
    assert set(reasons) <= {"stop", "length"}
    same, *_ = await env.server.tokens_and_logprobs_completion(input_ids=prompt, max_tokens=2)
    assert same == prompt
    await env.shut_down()


@pytest.mark.parametrize(
    ("server_type", "dialects"),
    [("vllm", ("completions",)), ("vllm", ("generate",)), ("sglang", ("generate",))],
)
async def test_get_logprobs_scores_token_ids_text_and_messages(server_type: str, dialects: tuple[str, ...]) -> None:
    policy = TokenPolicy(load_tokenizer(None), lambda prompt, source: "word", dialects)
    async with policy.running() as url:
        env = make(url, server_type)
        scored = await env.server.get_logprobs(input_ids=[8, 11, 14], top_k=2, split="eval")
        assert scored == {
            "prompt_tokens": [8, 11, 14],
            "prompt_topk_token_ids": [[], [11, 12, 13], [14, 15]],
            "prompt_topk_logprobs": [[], [-3.0, -1.0, -1.1], [-0.25, -1.0]],
        }
        by_text = await env.server.get_logprobs(prompt="once upon")
        assert by_text["prompt_tokens"] == env.tokenizer.encode("once upon", add_special_tokens=False)
        async with env.server.managed_server(tokenizer=env.tokenizer) as managed:
            asked = [{"role": "user", "content": "hi"}]
            by_messages = await managed.get_logprobs(messages=asked, top_k=1)
            await managed.chat_completion(messages=asked, max_tokens=2)
            assert by_messages["prompt_tokens"] == policy.log[-1].prompt
        await env.shut_down()


async def test_an_answer_without_the_tokens_of_the_prompt_is_none(served: Asked) -> None:
    def less(body: dict[str, Any]) -> None:
        body["choices"][0]["prompt_logprobs"][1] = {"5": {"logprob": -1.0}}

    env = make(served.url)
    served.policy.faults = [less]
    assert (await env.server.get_logprobs(input_ids=[8, 11]))["prompt_tokens"] == [8, 11]
    assert len(served.policy.asked) == 2, "the answer was asked for again"
    with pytest.raises(UserError, match="needs input_ids, prompt or messages"):
        await env.server.get_logprobs(top_k=1)
    await env.shut_down()


model = pytest.fixture(writer_model)


async def test_chat_server_refuses_calls_that_need_tokens(model: WriterModel) -> None:
    env = make(model.url, "openai")
    assert not env._use_managed_server()
    with pytest.raises(NotImplementedError, match="does not report which tokens it sampled"):
        async with env.server.managed_server():
            pass
    with pytest.raises(NotImplementedError, match="vllm or sglang"):
        await env.server.completion(prompt="once")
    with pytest.raises(NotImplementedError, match="vllm or sglang"):
        await env.server.get_logprobs(prompt="once")
    await env.shut_down()


async def test_managed_state_of_a_third_party_server_is_recorded() -> None:
    class Foreign:
        async def chat_completion(self, **kwargs: Any) -> Any:
            message = {"role": "assistant", "content": "done"}
            return {"model": "m", "choices": [{"message": message, "finish_reason": "stop"}]}

        def get_state(self) -> dict[str, Any]:
            return {"nodes": ["theirs"]}

    result = await HermesAgentLoop(Foreign(), [], set(), max_turns=1).run([{"role": "user", "content": "hi"}])
    assert result.managed_state == {"nodes": ["theirs"]}
