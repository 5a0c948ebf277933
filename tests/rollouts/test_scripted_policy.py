"""A scripted policy plays what the solution says, zero included."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl import open_env
from hermes_rl.data.rows import Row
from hermes_rl.rollouts.solutions import gold_turns
from hermes_rl.spec.load import parse_spec
from hermes_rl.stop_reasons import StopReason

SPEC = """
dataset: {items: [{n: 0}]}
prompt: {user: "{{ n }}"}
solution: {turns: [{say: "{{ n }}"}]}
servers: {policy: {type: scripted}}
"""


def test_a_solution_that_is_zero_is_said() -> None:
    (turn,) = gold_turns(parse_spec(SPEC), Row(key="r", columns={"n": 0}, index=0, digest="0" * 64))
    assert turn.say == "0"


DOOR = '''
class Door:
    def __init__(self, item):
        self.open = False

    def turn(self, key: str) -> str:
        """Turn a key in the lock."""
        self.open = key == "brass"
        return "It clicks." if self.open else "Nothing happens."

    def push(self) -> str:
        """Push the door."""
        return "It opens." if self.open else "It is locked."

def opened(state):
    return float(state.open)
'''
TOGETHER = """
dataset: {items: [{key: brass}]}
state: door.py:Door
prompt: {system: You help somebody with a door.}
tools: [{state: push}]
user: {speaks_first: true, stop: [Thanks.], tools: [{state: turn}]}
rewards: {opened: {fn: "door.py:opened"}}
solution:
  turns:
    - user: The door is locked.
    - say: Turn the key.
      user_tools: [{name: turn, args: {key: wood}}, {name: turn, args: {key: "{{ key }}"}}]
      user: Done.
    - {tools: [{name: push}]}
    - {say: It is open.}
servers: {policy: {type: scripted}, user: {type: scripted}}
"""


@pytest.mark.parametrize("state", ["door.py:Door", '{python: "door.py:Door", isolate: process}'])
async def test_a_scripted_user_calls_its_tools_before_it_speaks(state: str, tmp_path: Path) -> None:
    (tmp_path / "door.py").write_text(DOOR)
    text = TOGETHER.replace("state: door.py:Door", f"state: {state}")
    async with open_env(parse_spec(text, folder=tmp_path)) as env:
        rollout = await env.run(env.rows()[0])
    assert (rollout.score, rollout.stop_reason) == (1.0, StopReason.USER_STOP)
    assert rollout.result is not None
    said = [(message["role"], message["content"]) for message in rollout.result.messages]
    assert [text for role, text in said if role == "user"] == ["The door is locked.", "Done.", "Thanks."]
    assert ("tool", "It opens.") in said
