"""A `hermes-rl view` in a process of its own."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from tests.commands import Command, environment

PATIENCE = 60.0
ROOT = Path(__file__).parents[2]


class Viewed:
    """It runs until the context ends.

    Args:
        runs: what it is given.
        listen: where it listens.
    """

    def __init__(self, *runs: Path, listen: str = "127.0.0.1:0", cwd: Path | None = None) -> None:
        words = ["view", *map(str, runs), "--listen", listen]
        reader, writer = os.pipe()
        self._stdout = os.fdopen(reader)
        with os.fdopen(writer, "w") as stdout, Path(os.devnull).open("r+") as nothing:
            streams = (nothing, stdout, nothing)
            self.process = Command(*words, cwd=cwd or Path.cwd(), env=environment(), streams=streams)
        try:
            ready, _, _ = select.select([self._stdout], [], [], PATIENCE)
            self.said = self._stdout.readline() if ready else ""
            found = re.search(r"(http://(\S+):(\d+)/)\?token=(\S+)", self.said)
            assert found is not None, self.said
        except BaseException:
            self.close()
            raise
        self.url, self.port, self.token = found[1], int(found[3]), found[4]

    def ask(
        self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET", *, token: bool = True
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            own = {"Authorization": f"Bearer {self.token}"} if token else {}
            connection.request(method, path, headers={**own, **(headers or {})})
            answer = connection.getresponse()
            return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def get(self, *parts: str, **query: Any) -> Any:
        """Return what an address below `api` says."""
        path = "/api/" + "/".join(quote(part, safe="") for part in parts)
        status, _, body = self.ask(f"{path}?{urlencode(query)}" if query else path)
        assert status == 200, body
        return json.loads(body)

    def names(self) -> list[str]:
        """Return the names of the runs."""
        return [run["run"] for run in self.get("runs")["runs"]]

    def read(self, run: str) -> Any:
        """Return the page of a run, once all of it was read."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.get("runs", run))["read"] < 1:
            assert time.monotonic() < deadline
        return found

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it as a user would, and return its exit status."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self._stdout.close()

    def __enter__(self) -> Viewed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
