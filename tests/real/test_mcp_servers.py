"""Third-party MCP servers from the package index: rollouts list and call their tools."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.real.conftest import hermes
from tests.real.environments import mcp_servers_python, mcp_sqlite_python

COMPONENT = "MCP servers: fetch, git, sqlite, time"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(600)]
SPEC = """
version: 1
name: strangers
dataset: {items: [{q: one}, {q: two}]}
prompt: {user: "{{ q }}"}
tools: [TOOLS]
rewards: {called: {fn: tool_usage, args: {all_of: [NAMES]}}}
solution:
  turns:
    - tools: [CALLS]
    - say: done
servers: {policy: {type: scripted}}
process: {group_size: 1, groups: 2}
"""


def answers(
    folder: Path, tools: str, calls: dict[str, dict[str, Any]], more: str = "", score: float = 1.0
) -> list[list[str]]:
    """Return the tool results of each rollout."""
    given = [{"name": name, "args": args} for name, args in calls.items()]
    text = SPEC.replace("TOOLS", tools).replace("NAMES", ", ".join(calls)) + more
    (folder / "spec.yaml").write_text(text.replace("[CALLS]", json.dumps(given)), "utf-8")
    hermes("run", "spec.yaml", "process", "--out", "run", folder=folder)
    rollouts = [json.loads(line) for line in (folder / "run" / "rollouts.jsonl").read_text("utf-8").splitlines()]
    assert [one["score"] for one in rollouts] == [score, score]
    assert len(json.loads((folder / "run" / "run.json").read_text("utf-8"))["tool_servers"]) == tools.count("mcp:")
    return [[turn["content"] for turn in one["messages"] if turn["role"] == "tool"] for one in rollouts]


def host(name: str, *arguments: str) -> str:
    """Yield a server on this machine, for `tools`."""
    python = mcp_sqlite_python() if name == "sqlite" else mcp_servers_python()
    command = json.dumps([str(python.with_name(f"mcp-server-{name}")), *arguments])
    return f"{{mcp: {{name: {name}, command: {command}, where: host, timeout: 60}}}}"


def test_the_time_in_one_place_is_another_elsewhere(tmp_path: Path) -> None:
    asked = {"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "UTC"}
    for told in answers(tmp_path, host("time", "--local-timezone", "UTC"), {"convert_time": asked}):
        found = json.loads(told[0])
        assert found["target"]["datetime"].split("T")[1].startswith("03:00")


def test_mcp_git_server_returns_history_and_errors_to_the_agent(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    identity = ["-c", "user.name=me", "-c", "user.email=me@example.com"]
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    (repository / "a.txt").write_text("a")
    subprocess.run(["git", "-C", str(repository), "add", "."], check=True)
    subprocess.run(["git", "-C", str(repository), *identity, "commit", "-qm", "The first"], check=True)
    calls = {"git_log": {"repo_path": str(repository)}, "git_status": {"repo_path": str(tmp_path / "none")}}
    for log, status in answers(tmp_path, host("git", "--repository", str(repository)), calls, score=0.0):
        assert "The first" in log
        assert "is outside the allowed repository" in json.loads(status)["error"]


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"<html><body><h1>Found</h1><p>The page.</p></body></html>"
        self.send_response(404 if self.path == "/robots.txt" else 200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def page() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/page"
    server.shutdown()
    server.server_close()


def test_a_page_is_fetched_on_the_host(tmp_path: Path, page: str) -> None:
    for told in answers(tmp_path, host("fetch", "--allow-private-ips"), {"fetch": {"url": page}}):
        assert "The page." in told[0]


def test_mcp_server_runs_in_the_sandbox_with_its_packages(tmp_path: Path) -> None:
    command = "[python3, -m, mcp_server_time, --local-timezone, UTC]"
    tools = f"{{mcp: {{name: time, command: {command}}}}}"
    asked = {"get_current_time": {"timezone": "UTC"}}
    for told in answers(tmp_path, tools, asked, "sandbox: {python: [mcp-server-time==2026.10.19]}"):
        assert json.loads(told[0])["timezone"] == "UTC"


def test_a_database_is_written_and_asked(tmp_path: Path) -> None:
    calls = {
        "create_table": {"query": "CREATE TABLE IF NOT EXISTS words (word TEXT)"},
        "write_query": {"query": "INSERT INTO words VALUES ('one')"},
        "read_query": {"query": "SELECT DISTINCT word FROM words"},
    }
    for *_, read in answers(tmp_path, host("sqlite", "--db-path", str(tmp_path / "words.db")), calls):
        assert read == "[{'word': 'one'}]"
