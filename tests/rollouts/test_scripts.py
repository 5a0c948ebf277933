"""What a scripted policy plays is what the solution says, also where that is a zero."""

from __future__ import annotations

from hermes_rl.data.rows import Row
from hermes_rl.rollouts.compiled import gold_turns
from hermes_rl.spec.load import parse_spec

SPEC = """
dataset: {items: [{n: 0}]}
prompt: {user: "{{ n }}"}
solution: {turns: [{say: "{{ n }}"}]}
servers: {policy: {type: scripted}}
"""


def test_a_solution_that_is_zero_is_said() -> None:
    (turn,) = gold_turns(parse_spec(SPEC), Row(key="r", columns={"n": 0}, index=0, digest="0" * 64))
    assert turn.say == "0"
