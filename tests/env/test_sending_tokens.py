"""What leaves for a trainer, and what does not: certificates, weights that are too old, sequences that are too long."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import HermesAgentBaseEnv, HermesAgentEnvConfig
from hermes_rl.env.custom_collection import FURTHER
from hermes_rl.env.serve import require_exact
from hermes_rl.errors import UserError
from hermes_rl.spec.load import parse_spec
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from hermes_rl.trainers.checks import TooLong
from tests.env.canned import Api, group, item, listening, make
from tests.servers.token_policy import TokenPolicy

EXACT = {"exact": True, "problems": [], "oldest": 3}


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with listening() as started:
        yield started


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
    assert scored["provenance"]["exact"]
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
def test_settings_that_prevent_exact_tokens_are_refused_with_a_hint(kind: str, serve: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        require_exact(parse_spec(SPEC.format(kind=kind, serve=serve)))
    require_exact(parse_spec(SPEC.format(kind="sglang", serve="max_staleness: 2")))
    require_exact(parse_spec(SPEC.format(kind="openai", serve="allow_inexact: true")))


def test_files_that_are_not_used_do_not_matter(tmp_path: Path) -> None:
    assert TooLong("drop", Counter()).enforce_max_length(group(1.0), 1)["tokens"] == [[1, 2, 3]]
