"""Agent programs of others, as docs/agents.md starts them: what is trained on is what the policy sampled."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_rl import Ending, Group, certify, open_env
from hermes_rl.spec.load import parse_spec
from tests.api import summing
from tests.api.summing import Sampler, sampled, trained
from tests.real.environments import ROOT, python_of

COMPONENT = "agent programs: codex, Claude Code, hermes-agent, mini-swe-agent"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]


def specs() -> dict[str, dict[str, Any]]:
    """The specs of known programs in docs/agents.md, by their names."""
    text = (ROOT / "docs" / "agents.md").read_text("utf-8").partition("## Known programs")[2].partition("\n## ")[0]
    read = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    return {spec["name"]: spec for spec in read}


def called(name: str, **arguments: Any) -> str:
    """A call in JSON that no program writes so: odd blanks, and escapes."""
    written = " ,  ".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in arguments.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{ {written} }}}}\n</tool_call>'


def writes_and_reads(write: Callable[[str], str], end: str = "It says hello. \n") -> Callable[..., str]:
    """A policy that writes the file, reads it, and says so."""
    turns = [write("printf hello > answer.txt"), f" Now I read it. é\n{write('cat answer.txt')}", end]
    return lambda text, right=True: turns[text.count("<tool_response>")]


POLICIES = {
    "codex": writes_and_reads(lambda command: called("exec_command", yield_time_ms=60000, cmd=command)),
    "claude": writes_and_reads(lambda command: called("Bash", timeout=60000, description="run é", command=command)),
    "hermes": writes_and_reads(lambda command: called("terminal", timeout=60.0, command=command)),
    "mini": writes_and_reads(
        lambda command: called("bash", command=command),
        called("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ),
}


@pytest.mark.parametrize("name", POLICIES)
async def test_it_plays_from_its_package_and_is_trained_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PATH", f"{python_of('node').parent}:{os.environ['PATH']}")
    monkeypatch.setattr(summing, "write", POLICIES[name])
    sampler = Sampler()
    async with open_env(parse_spec(yaml.safe_dump(specs()[name]), folder=tmp_path)) as env:
        rollout = await env.play(env.rows()[0], sampler.policy())
    assert rollout.result is not None
    program = rollout.result.program
    assert program is not None
    assert (rollout.ending, rollout.score, rollout.turns) == (Ending.FINISHED, 1.0, 3), program
    assert (program.exit_code, program.refused, program.left_out) == (0, 0, {})
    assert [(call["kind"], call["continues"]) for call in program.calls] == [("main", None), ("main", 0), ("main", 1)]
    assert len(rollout.sequences or ()) == 1
    assert trained([rollout]) == sampled(sampler.answers)
    assert certify(Group("g", rollout.key.row, [rollout])).exact
