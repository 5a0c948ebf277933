"""A spec with MCP servers, in the sandbox and on the host, from the command line's entry to its files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hermes_rl.errors import RunError
from hermes_rl.runs.evaluate import run_evaluate
from hermes_rl.runs.process import run_process
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import load_spec
from tests.runs.playing import lines
from tests.tools.searxng import searxng

SERVER = Path(__file__).parents[1] / "tools" / "bad_mcp_server.py"
SPEC = """
version: 1
name: sums
dataset: {items: [{a: 1, b: 2}, {a: 3, b: 4}]}
prompt: {user: "{{ a }} + {{ b }}"}
tools:
  - mcp: {name: near, command: [python3, server.py], files: [{to: server.py, from: server.py}], allow: [add, count]}
  - mcp: {name: far, command: [python3, server.py], where: host, prefix: far_, allow: [count, crash], timeout: 5}
rewards:
  right: {fn: exact_match, args: {target: "{{ a + b }}"}}
solution:
  turns:
    - tools: [{name: far_crash, args: {}}]
    - tools: [{name: add, args: {a: "{{ a }}", b: "{{ b }}"}}, {name: count, args: {}}, {name: far_count, args: {}}]
    - say: "{{ a + b }}"
servers: {policy: {type: scripted, error_rate: 0}}
process: {group_size: 2, groups: 2}
"""


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    shutil.copy(SERVER, tmp_path / "server.py")
    (tmp_path / "sums.yaml").write_text(SPEC)
    return tmp_path / "sums.yaml"


async def test_each_rollout_has_separate_tool_servers(spec_file: Path, tmp_path: Path) -> None:
    summary, directory = await run_process(load_spec(spec_file), RunOptions("process", out=tmp_path / "out"))
    assert summary.written == 2
    for record in lines(directory.path / "rollouts.jsonl"):
        answers = [message["content"] for message in record["messages"] if message["role"] == "tool"]
        total = record["messages"][-1]["content"]
        assert answers[1:] == [total, "1", "1"]
        assert "the next call restarts it" in answers[0]
        assert record["score"] == 1.0
    listed = directory.read_run_info()["tool_servers"]
    assert set(listed) == {"near", "far"}
    assert all(len(digest) == 64 for digest in listed.values())


async def test_tool_server_that_cannot_start_stops_the_run_early(spec_file: Path, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("raise SystemExit('no licence')")
    with pytest.raises(RunError, match=r"(?s)MCP server near cannot be started.*no licence"):
        await run_process(load_spec(spec_file), RunOptions("process", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


OUTSIDE = """
version: 1
name: looked-up
dataset: {items: [{word: one}, {word: two}], eval: only}
prompt: {user: "{{ word }}"}
toolsets: {enabled: [search], record: tape}
tools:
  - {python: "ask.py:ask", external: true}
  - mcp: {name: far, command: [python3, server.py], where: host, allow: [count]}
rewards:
  named: {fn: exact_match, args: {target: "{{ word }}"}}
solution:
  turns:
    - tools: [{name: web_search, args: {query: "{{ word }}"}}, {name: count, args: {}}]
    - tools: [{name: ask, args: {word: "{{ word }}"}}]
    - say: "{{ word }}"
servers: {policy: {type: scripted, error_rate: 0}}
evaluate: {rollouts: 1}
"""
ASK = """
from pathlib import Path

def ask(word: str) -> str:
    \"\"\"Ask somebody.\"\"\"
    here = Path(__file__).with_name("asked")
    here.write_text(here.read_text() + "x" if here.exists() else "x")
    return word + here.read_text()
"""


@pytest.mark.slow
async def test_recorded_tool_results_repeat_an_evaluation_offline(
    spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = spec_file.with_name("looked-up.yaml")
    path.write_text(OUTSIDE)
    (tmp_path / "ask.py").write_text(ASK)
    async with searxng() as searches:
        environ = {**os.environ, "SEARXNG_URL": searches.url}
        _, first = await run_evaluate(load_spec(path), RunOptions("evaluate", out=tmp_path / "first", environ=environ))
        assert sorted(searches.queries) == ["one", "two"]
    (tmp_path / "server.py").unlink()
    path.write_text(OUTSIDE.replace("record: tape", "replay: tape"))
    again = load_spec(path)
    _, second = await run_evaluate(again, RunOptions("evaluate", out=tmp_path / "second", environ={}))
    assert answers(second.path) == answers(first.path)
    assert (tmp_path / "asked").read_text() == "xx"


def answers(folder: Path) -> dict[str, list[str]]:
    """Row → what its tools answered."""
    return {
        line["row_key"]: [message["content"] for message in line["messages"] if message["role"] == "tool"]
        for line in lines(folder / "rollouts.jsonl")
    }
