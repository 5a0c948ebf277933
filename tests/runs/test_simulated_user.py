"""A spec with a simulated user and a state that both sides change, played by scripts into training data."""

from __future__ import annotations

from pathlib import Path

from hermes_rl.runs.process import run_process
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import load_spec
from hermes_rl.tokens.load import load_tokenizer
from tests.runs.playing import lines

SHOP = '''
class Shop:
    def __init__(self, item):
        self.stock, self.said = dict(item["stock"]), []

    agent_tools = ["take"]
    user_tools = ["note"]

    def take(self, name: str) -> str:
        """Take one of an article from the shelf.

        Args:
            name: the article.
        """
        self.stock[name] -= 1
        return str(self.stock[name])

    def note(self, word: str) -> str:
        """Write down a word.

        Args:
            word: the word.
        """
        self.said.append(word)
        return "noted"


def left(state, *, goal: dict) -> bool:
    return state.stock == goal
'''
SPEC = """
version: 1
name: shop
dataset: {items: [{stock: {pear: 3}, goal: {pear: 2}}]}
prompt: {system: You run a shop.}
state: shop.py:Shop
tools: [{state: agent_tools}]
user: {system: "You want one of {{ stock }}.", speaks_first: true, stop: ["###STOP###"], tools: [{state: user_tools}]}
rewards:
  shelf: {fn: shop.py:left, args: {goal: "{{ goal }}"}}
  told: {fn: contains_all, weight: 0, args: {values: [two left]}}
solution:
  turns:
    - user: One pear please.
    - tools: [{name: take, args: {name: pear}}]
    - {say: "Here, two left.", user: "And an apple?"}
    - {say: "We have none."}
servers: {policy: {type: scripted, error_rate: 0}, user: {type: scripted}}
process: {group_size: 2, groups: 1}
"""


async def test_the_user_speaks_and_is_never_trained_on(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "shop.yaml").write_text(SPEC)
    _, directory = await run_process(load_spec(tmp_path / "shop.yaml"), RunOptions("process", out=tmp_path / "out"))
    for record in lines(directory.path / "rollouts.jsonl"):
        told = [message["content"] for message in record["messages"] if message["role"] == "user"]
        assert told == ["One pear please.", "And an apple?", "###STOP###"]
        assert (record["score"], record["rewards"]["told"]["value"], record["stop_reason"]) == (1.0, 1.0, "user_stop")
        assert record["turns"] == 3
    (group,) = lines(directory.path / "groups.jsonl")
    tokenizer = load_tokenizer(None)
    for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
        trained = tokenizer.decode([token for token, mask in zip(tokens, masks, strict=True) if mask != -100])
        assert "two left" in trained and "We have none." in trained
        assert "pear please" not in trained and "apple" not in trained and "STOP" not in trained
        assert "pear please" in tokenizer.decode(tokens)
