"""Third-party MCP servers from npm: rollouts list and call their tools, including a browser's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.environments import npm_server
from tests.real.test_mcp_servers import answers, page

COMPONENT = "MCP servers of npm: everything, filesystem, playwright"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(600)]
__all__ = ["page"]


def host(name: str, package: str, *arguments: str) -> str:
    command = json.dumps([*npm_server(package), *arguments])
    return f"{{mcp: {{name: {name}, command: {command}, where: host, timeout: 60}}}}"


def test_mcp_server_reads_and_writes_files_and_refuses_other_directories(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    server = host("filesystem", "@modelcontextprotocol/server-filesystem", str(shared))
    calls = {
        "write_file": {"path": str(shared / "a.txt"), "content": "kept"},
        "read_text_file": {"path": str(shared / "a.txt")},
        "list_directory": {"path": "/etc"},
    }
    for wrote, read, refused in answers(tmp_path, server, calls, score=0.0):
        assert "Successfully wrote" in wrote
        assert "kept" in read
        assert "Access denied" in json.loads(refused)["error"]
    assert (shared / "a.txt").read_text() == "kept"


def test_mcp_server_with_every_kind_of_tool_works(tmp_path: Path) -> None:
    server = host("everything", "@modelcontextprotocol/server-everything")
    calls = {"echo": {"message": "hi"}, "get-sum": {"a": 2, "b": 3}, "get-tiny-image": {}}
    for echoed, added, image in answers(tmp_path, server, calls):
        assert echoed == "Echo: hi"
        assert "5" in added
        assert "image" in image


@pytest.fixture
def browser() -> Iterator[str]:
    found = shutil.which("chromium")
    assert found is not None, "the tests of a real browser need chromium (apt-get install chromium)"
    yield found


def test_a_browser_reads_a_page(tmp_path: Path, page: str, browser: str) -> None:
    options = ["--headless", "--isolated", "--no-sandbox", "--executable-path", browser, "--output-dir", str(tmp_path)]
    server = host("playwright", "@playwright/mcp", *options)
    for opened, seen in answers(tmp_path, server, {"browser_navigate": {"url": page}, "browser_snapshot": {}}):
        assert "### " in opened
        assert "Found" in seen and "The page." in seen
