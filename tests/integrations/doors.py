"""One spec with a bit of everything, for every door: its policy, its rows, and the scores that it deserves."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hermes_rl import Rollout, Sampled, Sampling, Spec
from hermes_rl.spec.load import parse_spec
from hermes_rl.tokens.load import load_tokenizer
from tests.servers.token_policy import TokenPolicy

CODE = '''
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def kept(ctx, total) -> float:
    return float(ctx.artifact("sum").decode().split() == [str(total)])


def longest(group) -> list:
    most = max(len(result.final_response) for result in group)
    return [0.25 * (len(result.final_response) == most) for result in group]
'''
TEXT = """
name: doors
dataset:
  items: [{a: 1, b: 2}, {a: 3, b: 4}, {a: 5, b: 6}]
  columns: {total: "{{ a + b }}"}
  key: a
prompt: {system: Use your tools., user: "What is {{ a }} plus {{ b }}?"}
toolsets: [terminal]
tools: [{python: "code.py:add"}]
agent: {max_turns: 6, max_tokens: 200}
artifacts: {sum: {path: sum}}
rewards:
  right: {fn: exact_match, args: {target: "The sum is {{ total }}."}}
  judged:
    fn: llm_judge
    weight: 0.5
    args: {rubric: "Names {{ total }}.", reference: "{{ total }}", fallback: keyword_overlap}
  kept: {fn: "code.py:kept", weight: 2, args: {total: "{{ total }}"}}
  longest: {fn: "code.py:longest"}
servers:
  judge: {type: scripted}
"""
ALONE = TEXT.replace('  longest: {fn: "code.py:longest"}\n', "").replace(", fallback: keyword_overlap", "")
"""Without the reward that compares members and the judge's fallback for a whole group: rollouts may come one by one."""
DESERVED = {
    "1": {"right": 1.0, "judged": 1.0, "kept": 1.0},
    "3": {"right": 0.0, "judged": 0.0, "kept": 1.0},
    "5": {"right": 1.0, "judged": 1.0, "kept": 0.0},
}
"""The rewards of each row, whose answers are: right; wrong, with the right file; and right, with another file."""
SCORES = {"1": 3.5, "3": 2.0, "5": 1.5}
COMPARED = 0.25
"""What `longest` gives every member, since members of a group say the same here."""
END = "<|im_end|>"
TOKENIZER = load_tokenizer()


def doors_spec(folder: Path, text: str = TEXT, **policy: Any) -> Spec:
    """The spec, with its code in the folder, and a policy where one is named."""
    (folder / "code.py").write_text(CODE)
    named = "".join(f", {name}: {value!r}" for name, value in policy.items()).removeprefix(", ")
    return parse_spec(text + (f"  policy: {{{named}}}\n" if policy else ""), folder=folder)


def answer(prompt: str) -> str:
    """Say what the model says behind a prompt: it calls both tools, then answers, each in its own turn."""
    a, b = re.findall(r"What is (\d+) plus (\d+)", prompt)[-1]
    responses = prompt.rpartition("<|im_start|>user\nWhat")[2].count("<tool_response>")
    if responses == 0:
        return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b":  {b}}}}}\n</tool_call>'
    if responses == 1:
        written = int(a) + int(b) + (a == "5")
        return f'<tool_call>\n{{"name": "terminal",  "arguments": {{"command": "echo {written} > sum"}}}}\n</tool_call>'
    return f"The sum is {int(a) + int(b)}." if a != "3" else "I do not know."


def policy_server() -> TokenPolicy:
    """The policy behind a token-level server."""
    return TokenPolicy(TOKENIZER, lambda prompt, _: answer(prompt) + END)


async def sample(ids: list[int], sampling: Sampling) -> Sampled:
    """The policy as a function of token ids; the log-probabilities follow from the prompt."""
    text = answer(TOKENIZER.decode(ids))
    tokens = TOKENIZER.encode(text + END)
    chance = random.Random(len(ids))
    return Sampled(tokens, [-chance.random() for _ in tokens], "stop")


def values(rewards: Mapping[str, Any]) -> dict[str, float]:
    """Return the plain values of rewards, without that which compares."""
    return {name: float(getattr(one, "value", one)) for name, one in rewards.items() if name != "longest"}


def require_deserved(rollouts: Iterable[Rollout], *, compared: bool = True) -> None:
    """Every row is there, and has the rewards and the score that it deserves."""
    found = list(rollouts)
    assert {rollout.key.row.key for rollout in found} == set(DESERVED)
    for rollout in found:
        key = rollout.key.row.key
        assert values(rollout.rewards) == DESERVED[key], rollout.error
        assert rollout.score == SCORES[key] + (COMPARED if compared else 0)
        (example,) = rollout.examples()
        assert sum(example.mask) == tokens_of(key)


def tokens_of(key: str) -> int:
    """Return how many tokens of a rollout of this row are trained on: all that were sampled, and no other."""
    asked = f"<|im_start|>user\nWhat is {key} plus {int(key) + 1}"
    turns = [answer(asked + "<tool_response>" * told) for told in range(3)]
    return sum(len(TOKENIZER.encode(turn + END)) for turn in turns)
