"""wandb's own program uploads an offline run; an online run is uploaded while it runs, to a local service."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

COMPONENT = "wandb: sync of an offline run, and online to a service on loopback"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(300)]
BUCKET = {
    "id": "r1", "name": "run1", "displayName": "n", "description": "", "config": "{}", "sweepName": None,
    "project": {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}, "historyLineCount": 0,
}  # fmt: skip
ARTIFACT = {"id": "a", "digest": "d", "state": "COMMITTED", "artifactSequence": {"id": "s", "latestArtifact": None}}
DATA = {
    "upsertBucket": {"bucket": BUCKET, "inserted": True},
    "viewer": {"id": "u", "entity": "e", "username": "u", "flags": "{}", "teams": {"edges": []}},
    "serverInfo": {"cliVersionInfo": {"max_cli_version": "0.99.0"}, "latestLocalVersionInfo": None, "features": []},
    "createRunFiles": {"runID": "r1", "uploadHeaders": [], "files": []},
    "createArtifact": {"artifact": ARTIFACT},
    "model": {"bucket": None},
    "project": None,
}
"""What the service answers to every query: clients take from it what they asked for."""


class Service(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.streamed: list[dict[str, Any]] = []

    @property
    def history(self) -> list[dict[str, Any]]:
        """Return the received steps in the order of their numbers."""
        files = [body["files"]["wandb-history.jsonl"] for body in self.streamed if "wandb-history.jsonl" in
                 (body.get("files") or {})]  # fmt: skip
        return sorted((json.loads(line) for file in files for line in file["content"]), key=lambda step: step["_step"])


class Answer(BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        if self.path.endswith("/file_stream"):
            self.server.streamed.append(json.loads(body))
        text = json.dumps({"data": DATA} if self.path == "/graphql" else {}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def service() -> Iterator[Service]:
    server = Service()
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def said(service: Service, folder: Path, *command: str) -> str:
    """Return the output of a command, which must succeed, with an empty home and the local wandb service."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    own = {"HOME": str(folder), "WANDB_BASE_URL": f"http://127.0.0.1:{service.server_address[1]}"}
    environ = {**kept, **own, "WANDB_API_KEY": "a" * 40, "WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a" * 40 not in done.stdout + done.stderr
    return done.stdout + done.stderr


def play(service: Service, folder: Path, mode: str) -> str:
    more = ["--out", "run", "--set", "process.groups=3", "--set", f"wandb={{project: p, mode: {mode}}}"]
    return said(service, folder, sys.executable, "-m", "hermes_rl.cli.main", "run", "terminal-files", "process", *more)


def require_metrics(service: Service) -> None:
    assert [step["_step"] for step in service.history] == [1, 2, 3]
    for step in service.history:
        assert 0 < step["train/mean_reward"] < 1
        assert step["train/tool_errors_count"] == 0
        assert "train/reward/file_matches" in step
    assert service.history[-1]["train/rollouts"]["nrows"] == 3


def test_an_offline_run_is_read_and_sent_on_by_wandbs_own_program(service: Service, tmp_path: Path) -> None:
    play(service, tmp_path, "offline")
    assert service.streamed == []
    (run,) = (tmp_path / "run/wandb").glob("offline-run-*")
    said(service, tmp_path, sys.executable, "-m", "wandb", "sync", str(run))
    require_metrics(service)
    assert service.streamed[-1]["exitcode"] == 0


def test_an_online_run_is_sent_while_it_goes(service: Service, tmp_path: Path) -> None:
    play(service, tmp_path, "online")
    require_metrics(service)
    assert service.streamed[-1]["exitcode"] == 0
