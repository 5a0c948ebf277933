"""pytest test_rewards.py"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rewards import kept_before_found

from hermes_rl import AgentResult
from hermes_rl.agent.result import ToolCall


@pytest.mark.parametrize(("names", "value"), [(["keep", "find"], 1), (["find", "keep"], 0), ([], 0)])
def test_notes_are_kept_before_they_are_found(names: list[str], value: int) -> None:
    calls = [
        ToolCall(turn=1, id=str(n), name=name, arguments={}, result="", seconds=0.0) for n, name in enumerate(names)
    ]
    result = AgentResult(
        messages=[], turns_used=1, finished_naturally=True, reasoning_per_turn=[None], tool_errors=[], tool_calls=calls
    )
    assert kept_before_found(result).value == value


def test_the_server_finds_what_it_keeps() -> None:
    asked = [
        {"method": "tools/call", "params": {"name": "keep", "arguments": {"note": "a red hat"}}},
        {"method": "tools/call", "params": {"name": "find", "arguments": {"word": "hat"}}},
    ]
    lines = "".join(json.dumps({"jsonrpc": "2.0", "id": n, **one}) + "\n" for n, one in enumerate(asked))
    server = [sys.executable, str(Path(__file__).parent / "server.py")]
    said = subprocess.run(server, input=lines, capture_output=True, text=True, timeout=20, check=True).stdout
    assert "a red hat" in said.splitlines()[1]
