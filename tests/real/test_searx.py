"""A real searx (Debian's package), with a local page as its only engine, for the toolset `search`."""

from __future__ import annotations

import json
import os
import shutil
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from tests.real.conftest import Engine, hermes

COMPONENT = "searx"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(300)]
DEFAULTS = Path("/usr/share/doc/searx/examples/settings.yml")
SPEC = """
version: 1
name: searched
dataset: {items: [{q: one}, {q: two}, {q: three}]}
prompt: {user: "Find {{ q }}."}
toolsets: [search]
rewards: {called: {fn: tool_usage, args: {all_of: [web_search]}}}
solution: {turns: [{tools: [{name: web_search, args: {query: "{{ q }} & more", limit: 2}}]}, {say: done}]}
servers: {policy: {type: scripted}}
process: {group_size: 2, groups: 3}
"""


class Index(BaseHTTPRequestHandler):
    """Source of the service's results: as many pages as requested, or none while it is broken."""

    broken = False

    def do_GET(self) -> None:
        (query,) = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)["q"]
        results = [{"url": f"http://e.example/{n}", "title": f"{n} of {query}", "content": query} for n in range(5)]
        text = json.dumps({"results": results}).encode()
        self.send_response(500 if Index.broken else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


class Searx(Engine):
    health = "/healthz"

    def __init__(self, index: str, log: Path) -> None:
        super().__init__(log)
        self.index = index

    def environ(self) -> dict[str, str]:
        return {"SEARX_SETTINGS_PATH": str(self.log.with_name("settings.yml"))}

    def command(self) -> list[str]:
        program = shutil.which("searx-run")
        assert program is not None, "the tests of a real search service need searx (apt-get install searx)"
        settings: dict[str, Any] = yaml.safe_load(DEFAULTS.read_text("utf-8"))
        settings["server"] |= {"port": self.port, "bind_address": "127.0.0.1", "secret_key": "none"}
        asked = {"search_url": f"{self.index}/?q={{query}}", "results_query": "results", "url_query": "url"}
        asked |= {"title_query": "title", "content_query": "content", "enable_http": True}
        settings["engines"] = [{"name": "here", "engine": "json_engine", "shortcut": "he", "paging": False, **asked}]
        settings["engines"][0]["categories"] = "general"
        Path(self.environ()["SEARX_SETTINGS_PATH"]).write_text(yaml.safe_dump(settings), "utf-8")
        return [program]


@pytest.fixture(scope="module")
def searx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Searx]:
    index = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    Thread(target=index.serve_forever, daemon=True).start()
    service = Searx(f"http://127.0.0.1:{index.server_address[1]}", tmp_path_factory.mktemp("searx") / "log")
    service.start()
    yield service
    service.kill()
    index.shutdown()
    index.server_close()


def answers(folder: Path, searx: Searx, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the search results of the rollouts."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SEARXNG_URL", searx.url)
    (folder / "spec.yaml").write_text(SPEC)
    hermes("run", "spec.yaml", "process", "--out", "run", folder=folder)
    lines = [json.loads(line) for line in (folder / "run/rollouts.jsonl").read_text("utf-8").splitlines()]
    assert len(lines) == 6
    told = [turn["content"] for one in lines for turn in one["messages"] if turn["role"] == "tool"]
    return [json.loads(text) for text in told]


def test_what_the_service_finds_reaches_the_model(
    searx: Searx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answers(tmp_path, searx, monkeypatch)
    assert {one["data"]["web"][0]["description"] for one in found} == {"one & more", "two & more", "three & more"}
    assert {len(one["data"]["web"]) for one in found} == {2}
    assert found[0]["data"]["web"][1]["url"] == "http://e.example/1"


def test_search_with_broken_engines_returns_no_results(
    searx: Searx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Index, "broken", True)
    assert [one["data"]["web"] for one in answers(tmp_path, searx, monkeypatch)] == [[]] * 6
