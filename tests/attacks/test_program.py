"""Hostile agent programs: each ends by itself and is graded, and holds up nobody who plays beside it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from hermes_rl import StopReason, attach_provenance, open_env
from hermes_rl.agent import endpoint
from hermes_rl.rollouts.rollout import Group
from hermes_rl.spec.load import parse_spec
from tests.agent.test_program import AGENT, TEXT
from tests.api.summing import Sampler

pytestmark = pytest.mark.slow
HOSTILE = """
import json, os, socket, sys, threading, time
WAY, PORT = sys.argv[1], 8181
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "What is 1 plus 2?"}]}).encode()

def sent(path="/v1/chat/completions", body=BODY, wait=True, length=None):
    one = socket.create_connection(("127.0.0.1", PORT), 20)
    length = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {length}\\r\\n\\r\\n"
    one.sendall(head.encode() + body)
    if not wait:
        return one
    data = b""
    while piece := one.recv(65536):
        data += piece
        if b"}" in piece: break
    return data

if WAY == "floods":
    def flood():
        try:
            while sent(body=b"no JSON"): pass
        except OSError:
            pass
    threads = [threading.Thread(target=flood, daemon=True) for _ in range(8)]
    for each in threads: each.start()
    for each in threads: each.join()
    os._exit(1)
if WAY == "connects":
    held = []
    try:
        for _ in range(3000): held.append(socket.create_connection(("127.0.0.1", PORT), 1))
    except OSError:
        pass
    time.sleep(2)
    os._exit(1)
if WAY == "dawdles":
    held = [sent(body=b"", length=9, wait=False) for _ in range(60)]
    for _ in range(20):
        time.sleep(0.2)
        for each in held[:20]:
            try: each.sendall(b" ")
            except OSError: pass
    os._exit(1)
if WAY == "babbles":
    for text in (b"\\x00" * 100000, b"GET " + b"/" * 1000000 + b" HTTP/1.1\\r\\n\\r\\n", b"POST / HTTP/9.9\\r\\n\\r\\n",
                 b"POST /v1/chat/completions HTTP/1.1\\r\\n" + b"A: b\\r\\n" * 100000 + b"\\r\\n",
                 b"POST /v1/models HTTP/1.1\\r\\nHost: x\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\nZZ\\r\\n"):
        for _ in range(20):
            try:
                one = socket.create_connection(("127.0.0.1", PORT), 5)
                one.sendall(text); one.settimeout(0.05); one.recv(1000); one.close()
            except OSError:
                pass
    os._exit(1)
if WAY == "outlives":
    if os.fork() == 0:
        os.setsid()
        while True:
            try: sent()
            except OSError: time.sleep(0.01)
    time.sleep(0.5)
    os._exit(0)
if WAY == "escapes":
    for path in ("/r/other/v1/chat/completions", "/../../v1/chat/completions", "//127.0.0.1/v1/chat/completions",
                 "http://127.0.0.1:22/v1/chat/completions", "/v1/chat/completions?model=other"):
        data = sent(path)
        assert b" 200 " in data or b" 404 " in data or b" 400 " in data, data
    for port in (22, 80, 8080, 8182):
        try:
            socket.create_connection(("127.0.0.1", port), 1)
            os._exit(99)
        except OSError:
            pass
    os._exit(1)
"""
ENDINGS = {
    "floods": {StopReason.PROGRAM_ABORTED},
    "connects": {StopReason.PROGRAM_ABORTED},
    "dawdles": {StopReason.PROGRAM_ABORTED},
    "babbles": {StopReason.PROGRAM_ABORTED},
    # What it goes on asking for, nobody answers once it has ended; before that it has had its turns.
    "outlives": {StopReason.MAX_TURNS, StopReason.FINISHED, StopReason.PROGRAM_ABORTED},
    "escapes": {StopReason.PROGRAM_ABORTED, StopReason.MAX_TURNS, StopReason.FINISHED},
}


@pytest.mark.parametrize("way", ENDINGS)
async def test_hostile_program_is_graded_without_delaying_other_rollouts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """An honest program plays beside it again and again, and takes no longer than a few seconds each time."""
    monkeypatch.setattr(endpoint, "MOST_REQUESTS", 2000)
    (tmp_path / "agent.py").write_text(AGENT)
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    (hostile / "agent.py").write_text(HOSTILE)
    honest = parse_spec(TEXT.format(mode="verbatim", command="python3", timeout=200), folder=tmp_path)
    text = TEXT.format(mode=way, command="python3", timeout=200)
    async with open_env(honest) as env, open_env(parse_spec(text, folder=hostile)) as other:
        sampler = Sampler()
        attack = asyncio.create_task(other.run(other.rows()[0], Sampler().policy()))
        longest, played = 0.0, 0
        while not attack.done() or not played:
            began = time.monotonic()
            rollout = await env.run(env.rows()[0], sampler.policy())
            longest, played = max(longest, time.monotonic() - began), played + 1
            assert (rollout.stop_reason, rollout.score) == (StopReason.FINISHED, 1.0)
        attacked = await attack
    assert attacked.result is not None and attacked.result.program is not None
    assert attacked.stop_reason in ENDINGS[way], (attacked.stop_reason, attacked.error, attacked.result.program)
    assert attacked.stop_reason.graded and attacked.score is not None
    assert attacked.result.program.exit_code != 99, attacked.result.program.output
    assert attach_provenance(Group("g", attacked.key.row, [attacked])).exact or not attacked.turns
    assert longest < 20
    assert [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []
