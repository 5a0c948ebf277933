"""From a policy server through hermes-rl serve and a real run-api to a trainer: nothing is lost, added or changed."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.tokens.chat import chat_tokens
from hermes_rl.tokens.hub import HubTokenizer
from hermes_rl.tokens.tokenizer import Tokenizer, small_tokenizer_path
from tests.env.test_serve import serve
from tests.env.trainer import train, trajectory_api
from tests.runs.test_kills import seed_of
from tests.servers.token_policy import Logged, TokenPolicy

logger = logging.getLogger(__name__)

STOP = "<|im_end|>"
SPEC = """
name: exact
dataset: {{generator: "code.py:rows"}}
prompt: {{system: You add., user: "{{{{ q }}}}"}}
tools: [{{python: "code.py:add"}}]
agent: {{max_turns: 5, max_tokens: 200}}
rewards: {{some: {{fn: "code.py:some"}}}}
servers:
  policy: {{type: vllm, base_url: "{policy}", model: m, tokenizer: "{tokenizer}", weights_path: /get_weight_version}}
serve: {{group_size: 2, total_steps: {steps}, eval_every: 0, api_url: "{api}", drop_uniform: false, max_staleness: 5}}
atropos: {{max_batches_offpolicy: 20}}
"""
CODE = '''
def rows(*, seed, split):
    return ({"q": f"row {number}: what is {number} plus one?"} for number in range(100_000))


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def some(item, result):
    return float(len(result.messages))
'''


def writes(prompt: str, chance: random.Random) -> str:
    """Thinks, calls with its own spaces, breaks a call now and then, and answers at last."""
    spaces = " " * chance.randrange(4)
    thought = "<think>\nhm\n</think>\n\n" if chance.random() < 0.5 else ""
    if chance.random() < 0.3:
        return f"{thought}It is {chance.randrange(99)}.{STOP}"
    end = "" if chance.random() < 0.1 else "}"
    arguments = f'{{"b":{spaces}{chance.randrange(99)},"a": {chance.randrange(99)}}}'
    return f'{thought}<tool_call>\n{{"name":"add",{spaces}"arguments": {arguments}{end}\n</tool_call>{STOP}'


def tokenizer_folder(folder: Path, *, keeps_thinking: bool) -> Path:
    """The small tokenizer; without `keeps_thinking` its template drops the thinking of all turns but the last."""
    folder.mkdir()
    for file in small_tokenizer_path().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if not keeps_thinking:
        template = folder / "chat_template.jinja"
        text = template.read_text()
        changed = text.replace("{%- if thinking -%}", "{%- if thinking and loop.last -%}")
        assert changed != text
        template.write_text(changed)
    return folder


def runs(tokens: list[int], masks: list[int], logprobs: list[float]) -> list[tuple[list[int], list[float]]]:
    """The unmasked stretches of a line, in order."""
    found: list[tuple[list[int], list[float]]] = []
    for place, mask in enumerate(masks):
        if mask == -100:
            assert logprobs[place] == 1.0
            continue
        assert mask == tokens[place]
        if place == 0 or masks[place - 1] == -100:
            found.append(([], []))
        found[-1][0].append(mask)
        found[-1][1].append(logprobs[place])
    return found


def check(groups: list[dict[str, Any]], log: list[Logged], run: Path) -> int:
    """Every answer of the rollouts that arrived is there once, in order and in its context; returns how many."""
    played = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    of_call = {seed_of(line, turn): line["id"] for line in played for turn in range(line["turns"])}
    by_rollout: dict[str, list[Logged]] = defaultdict(list)
    for logged in log:
        if logged.seed in of_call:
            by_rollout[of_call[logged.seed]].append(logged)
    rollout_of = {tuple(one.logprobs): rollout for rollout, answers in by_rollout.items() for one in answers}
    arrived: dict[str, list[tuple[list[int], list[float]]]] = defaultdict(list)
    for group in groups:
        assert len(group["tokens"]) == 2
        lines = zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True)
        for line in lines:
            for ids, logprobs in runs(*line):
                arrived[rollout_of[tuple(logprobs)]].append((ids, logprobs))
    for rollout, stretches in arrived.items():
        expected = [(logged.ids, logged.logprobs) for logged in by_rollout[rollout]]
        assert sorted(stretches, key=lambda pair: expected.index(pair)) == expected, "each once"
    return sum(len(stretches) for stretches in arrived.values())


def rendered_again(groups: list[dict[str, Any]], log: list[Logged], tokenizer: Tokenizer) -> tuple[float, float]:
    """The usual way: the share of sampled tokens, and of rollouts, that differ where the messages are rendered."""
    tokens = wrong_tokens = rollouts = wrong_rollouts = 0
    for group in groups:
        for messages, ids, masks in zip(group["messages"] or (), group["tokens"], group["masks"], strict=False):
            sampled = [token for token, mask in zip(ids, masks, strict=True) if mask != -100]
            prompt = next(i for i, one in enumerate(messages) if one["role"] == "assistant")
            found = chat_tokens(tokenizer, messages, sampled_from=prompt).sequences or []
            again = [token for line in found for token in line.trained]
            same = sum(a == b for a, b in zip(sampled, again, strict=False))
            tokens, wrong_tokens = tokens + len(sampled), wrong_tokens + len(sampled) - same
            rollouts, wrong_rollouts = rollouts + 1, wrong_rollouts + (sampled != again)
    return wrong_tokens / tokens, wrong_rollouts / rollouts


async def serve_and_train(
    tmp_path: Path, folder: Path, *, steps: int, batch: int
) -> tuple[list[dict[str, Any]], TokenPolicy]:
    tokenizer = HubTokenizer(str(folder))
    policy = TokenPolicy(tokenizer, writes)
    (tmp_path / "code.py").write_text(CODE)
    async with policy.running() as url, trajectory_api() as api:
        spec = tmp_path / "exact.yaml"
        spec.write_text(SPEC.format(policy=url, tokenizer=folder, api=api, steps=steps))
        async with serve(spec, tmp_path / "run") as process:
            batches = await asyncio.wait_for(train(api, steps=steps, batch_size=batch), 100)
            policy.version = 1
            output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, output.decode()
    return [group for one in batches for group in one], policy


@pytest.mark.slow
async def test_every_sampled_token_reaches_the_trainer_once_and_in_order(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", keeps_thinking=True)
    groups, policy = await serve_and_train(tmp_path, folder, steps=25, batch=8)
    assert len(groups) >= 100
    turns = check(groups, policy.log, tmp_path / "run")
    assert turns > len(groups) * 2 * 1.5, "rollouts of several turns"
    tokens, rollouts = rendered_again(groups, policy.log, HubTokenizer(str(folder)))
    logger.info(
        "rendered again: %.1f %% of the tokens and %.1f %% of the rollouts differ", tokens * 100, rollouts * 100
    )
    assert rollouts > 0.3
    lines = [json.loads(line) for line in (tmp_path / "run" / "groups.jsonl").read_text().splitlines()]
    assert all(line["provenance"]["exact"] for line in lines)
    assert {line["provenance"]["oldest"] for line in lines} <= {0, 1}


@pytest.mark.slow
async def test_several_sequences_arrive_as_layers_of_whole_groups(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", keeps_thinking=False)
    groups, policy = await serve_and_train(tmp_path, folder, steps=6, batch=8)
    check_layers = [group for group in groups if group["overrides"]]
    assert check_layers, "a second sequence begins where thinking is dropped"
    for group in check_layers:
        for override, masks in zip(group["overrides"], group["masks"], strict=True):
            assert bool(override.get("set_advantage_to_zero")) == (masks == [-100])
    lines = [json.loads(line) for line in (tmp_path / "run" / "groups.jsonl").read_text().splitlines()]
    check(lines, policy.log, tmp_path / "run")
