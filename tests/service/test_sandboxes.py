"""Sandboxes of a service are released when nobody waits for them any more."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from tests.service.served import PLAYED, Served, spec_in
from tests.service.test_batches import in_flight
from tests.waiting import until_blocking


def running(mark: str) -> list[int]:
    """Processes of this machine with the mark in their command line; those in sandboxes are among them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gone", "terminated", "killed"])
def test_no_sandbox_outlives_its_reader_or_the_service(tmp_path: Path, how: str) -> None:
    mark = uuid.uuid4().hex
    solution = "solution: {turns: [{tools: [{name: terminal, args: {command: 'exec -a %s sleep 300'}}]}]}\n" % mark  # noqa: UP031
    text = PLAYED[: PLAYED.index("\nsolution:")] + f"\ntoolsets: [terminal]\n{solution}"
    with Served(spec_in(tmp_path, text), "--drain", "0.5") as service:
        connection = service.connect()
        body = json.dumps({"rows": service.keys()[:2], "n": 2}).encode()
        connection.request("POST", "/v1/rollouts", body, service.headers(body))
        until_blocking(lambda: len(running(mark)) >= 4)
        if how == "gone":
            connection.close()
            until_blocking(lambda: in_flight(service) == 0)
        elif how == "terminated":
            assert service.terminate() == 0
            last = json.loads(connection.getresponse().read().splitlines()[-1])
            assert (last["end"], last["groups"]) == (True, 0)
        else:
            service.kill()
        until_blocking(lambda: running(mark) == [])
