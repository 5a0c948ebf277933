"""What leaves for a trainer, and what does not: certificates, weights that are too old, sequences that are too long."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from canned import Api, Canned, group, item, listening, make

from hermes_rl import HermesAgentBaseEnv, HermesAgentEnvConfig
from hermes_rl.env.assemble import FURTHER
from hermes_rl.env.serve import require_exact
from hermes_rl.env.too_long import TooLong
from hermes_rl.errors import UserError
from hermes_rl.spec.load import parse_spec
from hermes_rl.tokens.tokenizer import load_tokenizer, small_tokenizer_path
from tests.servers.token_policy import TokenPolicy

EXACT = {"exact": True, "problems": [], "oldest": 3}


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with listening() as started:
        yield started


async def send(env: Canned, api: Api, scored: Any) -> None:
    env.config.rollout_server_url = api.url
    await env.handle_send_to_api(scored)


async def test_a_group_without_a_certificate_is_refused_where_exactness_is_asked_for(api: Api) -> None:
    env = make()
    env._allow_inexact = False
    await send(env, api, group(0.0, 1.0))
    await send(env, api, group(0.0, 1.0, certificate={"problems": ["a turn is missing"]}))
    assert (api.posted, env._dropped_groups) == ([], {"uncertified": 2})
    await send(env, api, group(0.0, 1.0, certificate=EXACT))
    assert len(api.posted) == 1


@pytest.mark.parametrize(("keep", "sent"), [(False, 1), (True, 3)])
async def test_weights_are_compared_with_those_of_the_moment_of_sending(keep: bool, sent: int, api: Api) -> None:
    env = make()
    env._max_staleness, env._keep_stale = 2, keep
    version: int | None = 5

    async def now() -> int | None:
        return version

    env._weights_now = now  # type: ignore[method-assign]
    await send(env, api, group(0.0, 1.0, certificate=EXACT))
    version = 6
    await send(env, api, group(0.0, 1.0, certificate=EXACT))
    version = None
    await send(env, api, group(0.0, 1.0, certificate=EXACT))
    assert (len(api.posted), env._dropped_groups) == (sent, {"stale": 2})


async def test_a_stated_policy_for_what_is_too_long(api: Api) -> None:
    long = group(0.0, 1.0, inference_logprobs=[[1.0, -0.5, -0.25]] * 2)
    long["tokens"] = [[1, 2], [1, 2, 3]]
    long["masks"], long["inference_logprobs"][0] = [[-100, 2], [-100, 2, 3]], [1.0, -0.5]
    for policy in ("truncate", "mask"):
        env = make()
        env.max_token_len, env._too_long = 3, TooLong(policy, env._sequence_counts)  # type: ignore[arg-type]
        await send(env, api, long)
    cut, masked = api.groups
    assert (cut["tokens"], cut["masks"]) == ([[1, 2], [1, 2]], [[-100, 2], [-100, 2]])
    assert cut["inference_logprobs"] == [[1.0, -0.5]] * 2
    assert (masked["tokens"], masked["masks"]) == ([[1, 2], [1]], [[-100, 2], [-100]])
    assert masked["overrides"] == [{}, {"set_advantage_to_zero": True}]
    assert env._training_metrics()["train/sequences_masked"] == 1


async def test_layers_leave_together_or_not_at_all(api: Api) -> None:
    env = make()
    layers = [group(0.0, 1.0, layer=0), group(0.0, 1.0, layer=1)]
    await send(env, api, layers)
    ((path, body),) = api.posted
    assert (path, len(body)) == ("/scored_data_list", 2)
    layers[1]["tokens"] = [[1, 2, 3]]
    await send(env, api, layers)
    assert (len(api.posted), env._dropped_groups) == (1, {"wrong_size": 1})


async def test_further_sequences_of_a_hand_written_environment_become_layers() -> None:
    further = {"tokens": [5, 6], "masks": [-100, 6], "inference_logprobs": [1.0, -0.5], "scores": 1.0}
    rollouts = [item(1.0, **{FURTHER: [further]}), item(0.0)]
    (first, second), _ = await make(play=lambda number: rollouts.pop(0)).collect_trajectories(1)
    assert [len(layer["tokens"]) for layer in (first, second)] == [2, 2]
    assert second["tokens"] == [[5, 6], [1]]
    assert second["overrides"] == [{}, {"set_advantage_to_zero": True}]


class Answering(HermesAgentBaseEnv):
    """A hand-written environment on a token-level server."""

    name = "answering"
    default_toolsets = ["todo"]

    async def setup(self) -> None: ...

    async def get_next_item(self) -> str:
        return "hi"

    def format_prompt(self, item: Any) -> str:
        return str(item)

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return float(len(result.final_response))

    async def evaluate(self, *args: Any, **kwargs: Any) -> None: ...


async def test_hand_written_environments_are_token_exact_on_token_level_servers() -> None:
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig

    def write(prompt: str, chance: random.Random) -> str:
        return f"{'a' * chance.randrange(1, 9)}<|im_end|>"

    policy = TokenPolicy(load_tokenizer(), write)
    folder = str(small_tokenizer_path())
    async with policy.running() as url:
        server = APIServerConfig(base_url=url, model_name="m", server_type="vllm", tokenizer_name=folder)
        config = HermesAgentEnvConfig(group_size=2, tokenizer_name=folder)
        env = Answering(config, [server])
        completion = await env.server.chat_completion(messages=[{"role": "user", "content": "hi"}], n=2)
        assert all(set(choice.message.content) == {"a"} for choice in completion.choices)
        policy.log.clear()
        scored, _ = await env.collect_trajectories("hi")
        await env.shut_down()
    assert scored["certificate"]["exact"]
    sent = sorted([v for v in line if v != 1.0] for line in scored["inference_logprobs"])
    assert sent == sorted(one.logprobs for one in policy.log)


SPEC = """
dataset: {{items: [{{q: hi}}]}}
prompt: {{user: "{{{{ q }}}}"}}
servers: {{policy: {{type: {kind}, base_url: "http://h/v1", model: m}}}}
serve: {{{serve}}}
"""


@pytest.mark.parametrize(
    ("kind", "serve", "words"),
    [("openai", "group_size: 2", "allow_inexact: true"), ("vllm", "max_staleness: 2", "weights_path")],
)
def test_what_cannot_be_exact_is_refused_with_the_way_out(kind: str, serve: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        require_exact(parse_spec(SPEC.format(kind=kind, serve=serve)))
    require_exact(parse_spec(SPEC.format(kind="sglang", serve="max_staleness: 2")))
    require_exact(parse_spec(SPEC.format(kind="openai", serve="allow_inexact: true")))


def test_files_that_are_not_used_do_not_matter(tmp_path: Path) -> None:
    assert TooLong("drop", Counter()).applied([group(1.0)], 1)[0]["tokens"] == [[1, 2, 3]]
