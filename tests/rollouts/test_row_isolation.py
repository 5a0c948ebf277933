"""Code of a spec changes neither the rows of other rollouts nor what a rollout has recorded."""

from __future__ import annotations

from pathlib import Path

from hermes_rl.data.load import load_rows
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import Encoder
from hermes_rl.rollouts.runner import RolloutRunner
from hermes_rl.spec.load import parse_spec

CODE = """
class Stock:
    def __init__(self, item):
        self.items = item["stock"]
        self.items.remove("a")


def grows(item, *, stock: list) -> float:
    item["stock"].append("z")
    stock.append("y")
    return float(len(item["stock"]) + len(stock))


def tampers(result) -> float:
    result.messages[-1]["content"] = "TAMPERED"
    result.messages.append({"role": "assistant", "content": "more"})
    return 0.0


def compares(group) -> list:
    for result in group:
        result.messages[-1]["content"] = "TAMPERED"
    return [0.0] * len(group)
"""
TEXT = """
dataset: {items: [{stock: [a, b]}]}
prompt: {user: "Take {{ stock | join }}."}
state: code.py:Stock
rewards:
  grows: {fn: "code.py:grows", range: [0, 9], args: {stock: "{{ stock }}"}}
  again: {fn: "code.py:grows", range: [0, 9], args: {stock: "{{ stock }}"}}
  tampers: {fn: "code.py:tampers", range: [0, 9]}
  compares: {fn: "code.py:compares", range: [0, 9]}
solution: {turns: [{say: played}]}
servers: {policy: {type: scripted}}
"""


async def test_code_of_the_spec_changes_neither_rows_nor_what_is_trained_on(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    spec = parse_spec(TEXT, folder=tmp_path)
    async with CompiledSpec(spec) as world:
        row = load_rows(spec, "train", notify=print)[0]
        group = await RolloutRunner(world).start(row, "g", 3)
    assert group.scores == [12.0] * 3, "3 + 3 for each of the two, every time"
    assert row.columns["stock"] == ["a", "b"]
    encoder = Encoder.load(None)
    await encoder.encode_group(group)
    assert encoder.tokenizer is not None
    for rollout in group.rollouts:
        assert rollout.result is not None and rollout.sequence is not None
        assert [message["role"] for message in rollout.result.messages] == ["user", "assistant"]
        assert encoder.tokenizer.decode(rollout.sequence.trained) == "played<|im_end|>"
