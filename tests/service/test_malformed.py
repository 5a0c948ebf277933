"""Hundreds of malformed requests: each is told what is wrong with it, none costs more than its answer."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.service.served import Served, raw

pytestmark = pytest.mark.slow

ODD: list[Any] = [
    None, True, 0, -1, 1.5, 2**63, 10**400, float("nan"), float("inf"), "", "\ud800", "\0", "../..", "a" * 5000, "%s{}",
    [], [None], [[[[]]]], {}, {"": {}}, {"role": "system"}, {"__class__": 1}, list(range(300)),
]  # fmt: skip
PATHS = [
    ("POST", "/v1/rollouts"), ("POST", "/v1/sessions"), ("POST", "/v1/sessions/SESSION/step"), ("PUT", "/v1/policy"),
    ("POST", "/run"), ("POST", "/aggregate_metrics"),
]  # fmt: skip


def whole(key: str) -> dict[str, dict[str, Any]]:
    """A request that is right, for each path; what is changed in it makes it wrong."""
    policy = {"type": "vllm", "base_url": "http://127.0.0.1:9/v1", "model": "m", "tokenizer": "/none", "version": 1}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    return {
        "/v1/rollouts": {"rows": [key], "n": 2, "batch": "b", "sampling": {"temperature": 1.0}, "policy": policy},
        "/v1/sessions": {"row": key, "sampling": {"max_turns": 2}, "split": "train"},
        "/v1/sessions/SESSION/step": {"message": {"role": "assistant", "content": "x", "tool_calls": [call]}},
        "/v1/policy": {"version": 1, "model": "m"},
        "/run": {"responses_create_params": {"temperature": 1.0}, "verifier_metadata": {"row_key": key}},
        "/aggregate_metrics": {"verify_responses": [{"reward": 1.0, "_ng_task_index": 0}]},
    }


def changed(body: Any, chance: random.Random) -> Any:
    """One value of the body replaced by an odd one, renamed, or left out."""
    body = json.loads(json.dumps(body))
    places: list[tuple[Any, Any]] = []

    def look(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            look(value[key])

    look(body)
    holder, key = chance.choice(places)
    how = chance.randrange(4)
    if how == 0 and isinstance(holder, dict):
        holder[chance.choice(["x", "", "\0", "rows "])] = holder.pop(key)
    elif how == 1:
        del holder[key]
    else:
        holder[key] = chance.choice(ODD)
    return body


def requests(key: str, session: str, count: int) -> Iterator[tuple[str, str, bytes]]:
    chance = random.Random(5)
    right = whole(key)
    for _ in range(count):
        method, path = chance.choice(PATHS)
        body = json.dumps(changed(right[path], chance)).encode()
        if chance.random() < 0.25:  # the text itself is broken
            place = chance.randrange(len(body))
            body = body[:place] + bytes([chance.randrange(256)]) + body[place + chance.randrange(3) :]
        yield method, path.replace("SESSION", session), body


def test_no_malformed_request_is_a_500_or_a_traceback(served: Served) -> None:
    key = served.keys()[0]
    statuses: Counter[int] = Counter()
    session = served.post("/v1/sessions", {"row": key})["id"]
    for method, path, body in requests(key, session, 300):
        answer = served.ask(method, path, body)
        statuses[answer.status] += 1
        assert answer.status < 500, (method, path, body[:500], answer.body[:500])
        if answer.status >= 400:
            assert answer.json["error"], (path, body[:500])
            assert answer.json["detail"], (path, body[:500])
        if answer.status == 200 and path == "/v1/sessions":
            assert served.ask("DELETE", f"/v1/sessions/{answer.json['id']}").status == 204
        if served.ask("GET", f"/v1/sessions/{session}").json.get("done"):  # an odd step may end it, as any message may
            served.ask("DELETE", f"/v1/sessions/{session}")
            session = served.post("/v1/sessions", {"row": key})["id"]
    assert statuses[422] > 150, statuses
    served.ask("DELETE", f"/v1/sessions/{session}")
    assert "Traceback" not in served.said, served.said[-3000:]
    assert served.get("/v1/metrics")["in_flight"]["rollouts"] == 0


def test_random_bytes_instead_of_http_do_not_harm_the_service(served: Served) -> None:
    chance = random.Random(7)
    head = f"POST /v1/rollouts HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.token}\r\n"
    head += "Content-Type: application/json\r\n"
    for _ in range(60):
        text = bytearray((head + "Content-Length: 2\r\nConnection: close\r\n\r\n{}").encode())
        for _ in range(chance.randrange(1, 8)):
            text[chance.randrange(len(text))] = chance.randrange(256)
        answer = raw(served.port, bytes(text), 0.5)
        assert not answer.startswith(b"HTTP/1.1 5"), (bytes(text), answer[:300])
    assert "Traceback" not in served.said, served.said[-3000:]
    assert served.get("/v1/health")["status"] == "ok"
