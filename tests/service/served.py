"""A service as its users start it: a process of its own, asked over real sockets."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.api.summing import CODE, TEXT
from tests.commands import ROOT, Command

TOKEN = "a-long-random-value"
PATIENCE = 180.0
SPEC = TEXT + "servers: {policy: {type: scripted}}\n"
SOLUTION = """
solution:
  turns:
    - {tools: [{name: add, args: {a: "{{ a }}", b: "{{ b }}"}}]}
    - {say: "The sum is {{ total }}."}
"""
PLAYED = SPEC + SOLUTION


def spec_in(folder: Path, text: str = PLAYED) -> Path:
    """A spec in a file, with its code beside it."""
    (folder / "code.py").write_text(CODE)
    (folder / "sums.yaml").write_text(text)
    return folder / "sums.yaml"


class Served:
    """`hermes-rl serve-http` in a process of its own; use it with `with`."""

    def __init__(
        self,
        spec: Path,
        *options: str,
        token: str | None = None,
        environ: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self.token = token
        secured = ["--token-env", "SERVICE_TOKEN"] if token is not None else []
        words = ["serve-http", str(spec), "--listen", "127.0.0.1:0", *secured, *options]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "SERVICE_TOKEN": token or "", **(environ or {})}
        self.log = spec.parent / "service.log"
        reader, writer = os.pipe()
        self._stdout = os.fdopen(reader)
        self.process: Command | subprocess.Popen[bytes]
        with self.log.open("a") as log, os.fdopen(writer, "w") as stdout, Path(os.devnull).open() as nothing:
            if python == sys.executable:
                self.process = Command(*words, cwd=spec.parent, env=env, streams=(nothing, stdout, log))
            else:
                command = [python, "-m", "hermes_rl.cli.main", *words]
                self.process = subprocess.Popen(command, cwd=spec.parent, env=env, stdout=stdout, stderr=log)
        self.port = self._port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def said(self) -> str:
        """What it wrote to stderr."""
        return self.log.read_text("utf-8", "replace")

    def _port(self) -> int:
        lines: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            with self._stdout:
                for line in self._stdout:
                    lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        deadline = time.monotonic() + PATIENCE
        while (line := lines.get(timeout=max(0.1, deadline - time.monotonic()))) is not None:
            if line.startswith("listening on http://127.0.0.1:"):
                return int(line.rsplit(":", 1)[1])
        raise AssertionError(f"the service did not start: {self.said}")

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)

    def terminate(self) -> int:
        """Tell it to end, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(PATIENCE)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def headers(self, body: object = None) -> dict[str, str]:
        kind = {"Content-Type": "application/json"} if body is not None else {}
        return {**kind, **({"Authorization": f"Bearer {self.token}"} if self.token is not None else {})}

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answered:
        """Ask, and return the whole answer."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = self.connect()
        try:
            connection.request(method, path, data, {**self.headers(body), **(headers or {})})
            response = connection.getresponse()
            return Answered(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        answer = self.ask("GET", path)
        assert answer.status == 200, answer.body
        return answer.json

    def post(self, path: str, body: Any) -> Any:
        answer = self.ask("POST", path, body)
        assert answer.status == 200, answer.body
        return answer.json

    def keys(self, split: str = "train") -> list[str]:
        return [row["key"] for row in self.get(f"/v1/rows?split={split}")["rows"]]

    def batch(self, **asked: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The groups of a batch, and its last line."""
        lines = list(self.stream(**asked))
        assert lines and lines[-1].get("end") is True, lines[-1:]
        return lines[:-1], lines[-1]

    def stream(self, **asked: Any) -> Iterator[dict[str, Any]]:
        """The lines of a batch as they come; leaving the iteration closes the connection."""
        connection = self.connect()
        try:
            connection.request("POST", "/v1/rollouts", json.dumps(asked).encode(), self.headers(asked))
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.getheader("Content-Type") == "application/x-ndjson"
            while line := response.readline():
                yield json.loads(line)
        finally:
            connection.close()


class Answered:
    """An answer."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, {k.lower(): v for k, v in headers.items()}, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def raw(port: int, sent: bytes, seconds: float = 10.0) -> bytes:
    """Send bytes as they are, and return what comes back until the other end closes or says nothing more."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(sent)
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
        except (TimeoutError, ConnectionError):
            pass
        return found
