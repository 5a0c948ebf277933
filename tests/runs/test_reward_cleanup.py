"""A reward that releases its sandbox, as code of other environments does, ends neither the rollout nor the run."""

from __future__ import annotations

from pathlib import Path

from tests.cli.test_run import lines
from tests.commands import hermes

SPEC = """
name: cleaned
dataset: {items: [{q: one}]}
prompt: {user: "{{ q }}"}
toolsets: [terminal]
rewards:
  first: {fn: "code.py:cleans"}
  second: {fn: "code.py:looks"}
solution: {turns: [{tools: [{name: terminal, args: {command: "echo one > f"}}]}, {say: done}]}
servers: {policy: {type: scripted, error_rate: 0}}
process: {groups: 1, group_size: 2}
"""
CODE = """
def cleans(item, result, ctx):
    found = ctx.terminal("cat f")["output"].strip() == item["q"]
    ctx.cleanup()
    return float(found)


def looks(item, result, ctx):
    return float(ctx.read_file("f")["content"].strip() == item["q"])
"""


def test_cleanup_in_a_reward_leaves_the_sandbox_to_the_run(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "code.py").write_text(CODE)
    done = hermes("run", "spec.yaml", "process", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line["score"] for line in lines(tmp_path / "run" / "rollouts.jsonl")] == [2.0, 2.0]
