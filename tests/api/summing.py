"""A small task with a tool, and a policy in this process that is nothing but an async function of token ids."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hermes_rl import Policy, Rollout, Sampled, Sampling, Spec
from hermes_rl.spec.load import parse_spec
from hermes_rl.tokens.load import load_tokenizer

CODE = '''
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def longest(group) -> list:
    most = max(len(result.final_response) for result in group)
    return [float(len(result.final_response) == most) for result in group]
'''
TEXT = """
name: sums
dataset:
  items: [{a: 1, b: 2}, {a: 3, b: 4}, {a: 5, b: 6}, {a: 7, b: 8}]
  columns: {total: "{{ a + b }}"}
prompt: {system: Use your tool., user: "What is {{ a }} plus {{ b }}?"}
tools: [{python: "code.py:add"}]
agent: {max_turns: 4, max_tokens: 200}
rewards: {right: {fn: exact_match, args: {target: "The sum is {{ total }}."}}}
"""
COMPARED = TEXT.replace("{right:", '{longest: {fn: "code.py:longest"}, right:')
MASKED = TEXT.replace("max_turns: 4", "max_turns: 1") + "on_stop: {max_turns: mask}\n"
"""Every rollout ends after its first turn, and the spec masks it."""
WITH_EVAL = TEXT + "\nevaluate: {rollouts: 1}\n"
CALL = '<tool_call>\n{{"name": "add", "arguments": {{"a": {}, "b":  {}}}}}\n</tool_call>'
END = "<|im_end|>"
TOKENIZER = load_tokenizer()


def spec_in(folder: Path, text: str = TEXT) -> Spec:
    """The spec, with its code in the folder."""
    (folder / "code.py").write_text(CODE)
    return parse_spec(text, folder=folder)


def write(text: str, right: bool = True) -> str:
    """The next turn behind a prompt: a call of the tool with oddly spaced arguments, then what the tool said."""
    if "<tool_response>" not in text.rpartition("<|im_start|>user\nWhat")[2]:
        return CALL.format(*re.findall(r"What is (\d+) plus (\d+)", text)[-1])
    total = re.findall(r"<tool_response>\s*(\d+)", text)[-1]
    return f"The sum is {total}." if right else "I do not know."


class Sampler:
    """Samples what `write` says, at log-probabilities of its own, and remembers every answer.

    Args:
        fails: share of the calls that raise.
        wrong: share of the final answers that are wrong.
        version: that the answers carry; None: they carry none.
        thought: written before each answer.
    """

    def __init__(self, fails: float = 0.0, wrong: float = 0.0, version: int | None = None, thought: str = "") -> None:
        self.fails, self.wrong, self.version, self.thought = fails, wrong, version, thought
        self.random = random.Random(7)
        self.asked: list[tuple[list[int], Sampling]] = []
        self.answers: list[Sampled] = []

    async def __call__(self, ids: list[int], sampling: Sampling) -> Sampled:
        self.asked.append((ids, sampling))
        if self.random.random() < self.fails:
            raise OSError("the device is busy")
        text = write(TOKENIZER.decode(ids), right=self.random.random() >= self.wrong)
        whole, most = TOKENIZER.encode(self.thought + text + END), getattr(sampling, "max_tokens", None)
        tokens = whole[:most]
        finish = "stop" if tokens == whole else "length"
        self.answers.append(Sampled(tokens, [-self.random.random() for _ in tokens], finish, self.version))
        return self.answers[-1]

    def policy(self, tokenizer: Any = None, **given: Any) -> Policy:
        return Policy.sampling(self, tokenizer, **given)


def trained(rollouts: Iterable[Rollout]) -> list[tuple[int, float]]:
    """Every token that examples train on, with its log-probability, sorted."""
    found = []
    for rollout in rollouts:
        for example in rollout.examples():
            assert example.logprobs is not None
            assert len(example.response_ids) == len(example.mask) == len(example.logprobs)
            for token, mask, logprob in zip(example.response_ids, example.mask, example.logprobs, strict=True):
                if mask:
                    found.append((token, logprob))
                else:
                    assert logprob == 0.0
    return sorted(found)


def sampled(answers: Iterable[Sampled]) -> list[tuple[int, float]]:
    """Every token that was sampled, with its log-probability, sorted."""
    return sorted(pair for answer in answers for pair in zip(answer.ids, answer.logprobs, strict=True))
