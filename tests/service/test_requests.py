"""What is wrong in a request is answered with its place and the way out, before anything is begun."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from hermes_rl.service.bodies import StepRequest
from hermes_rl.values import too_many_values
from tests.service.served import Served

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"rows": []}, "invalid", "rows"),
    ({"rows": "abc"}, "invalid", "rows"),
    ({"rows": [1]}, "invalid", "rows.0"),
    ({}, "invalid", "rows"),
    ({"rows": ["?"], "n": 0}, "invalid", "n"),
    ({"rows": ["?"], "n": "8"}, "invalid", "n"),
    ({"rows": ["?"], "n": True}, "invalid", "n"),
    ({"rows": ["?"], "batch": "../../etc"}, "invalid", "batch"),
    ({"rows": ["?"], "batch": ""}, "invalid", "batch"),
    ({"rows": ["?"], "split": "test"}, "invalid", "split"),
    ({"rows": ["?"], "colour": 1}, "invalid", "colour"),
    ({"rows": ["?"], "max_staleness": -1}, "invalid", "max_staleness"),
    ({"rows": ["?"], "policy": {"base_url": "file:///etc/passwd"}}, "invalid", "policy.base_url"),
    ({"rows": ["?"], "policy": {"api_key": "sk-1"}}, "invalid", "policy.api_key"),
    ({"rows": ["?", "\ud800"]}, "invalid", "rows.1"),
    ({"rows": ["?"], "split": "eval"}, "no_split", "split"),
    ({"rows": ["ROW"], "sampling": {"temperature": "hot"}}, "request", "sampling"),
    ({"rows": ["ROW"], "sampling": {"colour": 1}}, "request", "sampling"),
    ({"rows": ["ROW"], "max_staleness": 1}, "no_version", "max_staleness"),
    ({"rows": ["ROW"], "policy": {"type": "nothing"}}, "policy", "policy"),
    ({"rows": ["ROW"], "policy": {"type": "vllm"}}, "policy", "policy"),
    ({"rows": ["ROW"], "policy": {"type": "vllm", "base_url": "http://127.0.0.1:1/v1"}}, "policy", "policy"),
    (
        {
            "rows": ["ROW"],
            "policy": {"base_url": "http://127.0.0.1:1/v1", "model": "m", "tokenizer": "/nowhere/at/all"},
        },
        "policy",
        "policy",
    ),
    (
        {"rows": ["ROW"], "policy": {"type": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "m"}},
        "inexact",
        "policy.type",
    ),
    (
        {
            "rows": ["ROW"],
            "policy": {"base_url": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": "SERVICE_TOKEN"},
        },
        "key_not_allowed",
        "policy.api_key_env",
    ),
    (
        {
            "rows": ["ROW"],
            "policy": {"base_url": "http://127.0.0.1:1", "model": "m", "version": 1, "weights_path": "/v"},
        },
        "policy",
        "policy.weights_path",
    ),
]


@pytest.mark.parametrize(("asked", "error", "place"), WRONG)
def test_a_wrong_batch_is_422_with_its_place(served: Served, asked: dict[str, Any], error: str, place: str) -> None:
    key = served.keys()[0]
    if asked.get("rows") == ["ROW"]:
        asked = {**asked, "rows": [key]}
    answer = served.ask("POST", "/v1/rollouts", asked)
    assert answer.status == 422, answer.body
    assert (answer.json["error"], answer.json["place"]) == (error, place)
    assert answer.json["detail"]
    assert "Traceback" not in served.said
    assert served.get("/v1/metrics")["in_flight"]["rollouts"] == 0


def test_unknown_rows_are_named(served: Served) -> None:
    key = served.keys()[0]
    answer = served.ask("POST", "/v1/rollouts", {"rows": [key, "none-such", "nor-this"]})
    assert (answer.status, answer.json["rows"]) == (422, ["none-such", "nor-this"])


def test_more_than_there_is_room_for_is_429_with_the_time_to_come_again(served: Served) -> None:
    answer = served.ask("POST", "/v1/rollouts", {"rows": served.keys(), "n": 17})
    assert (answer.status, answer.json["error"], answer.json["most"]) == (429, "too_many", 64)
    assert int(answer.headers["retry-after"]) > 0


def test_paths_and_methods_that_do_not_exist(served: Served) -> None:
    assert served.ask("GET", "/v1/nothing").status == 404
    assert served.ask("GET", "/v1/rollouts").status == 405
    assert served.ask("GET", "/v1/sessions/none").json["error"] == "no_session"
    assert served.ask("GET", "/v1/rows?split=eval").status == 422
    assert served.ask("GET", "/v1/rows?after=none").json["place"] == "after"


def test_rows_come_in_pages(served: Served) -> None:
    keys = served.keys()
    page = served.get(f"/v1/rows?after={keys[1]}")
    assert [row["key"] for row in page["rows"]] == keys[2:]
    assert page["after"] is None
    assert page["fingerprint"]
    assert len(page["rows"][0]["digest"]) == 64


MIB_8 = 8 << 20


LARGE: list[tuple[bytes, int, str]] = [
    (b'{"ids": [' + b"1," * (MIB_8 // 2 - 10) + b"1]}", 413, "400000 values"),
    (b"[" * (MIB_8 - 10), 413, "400000 values"),
    (b'{"message": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 422, "is not JSON"),
    (b'{"message": "' + b"x" * (MIB_8 - 100), 422, "is not JSON"),
    (json.dumps({"ids": ["a"] * 150_000}).encode(), 422, "ids.0"),
    (json.dumps({"ids": [1], "logprobs": ["a"] * 150_000}).encode(), 422, "logprobs.0"),
    (b'{"message": {"content": "' + b"x" * 3_000_000 + b'"}}', 422, "at most 2097152 characters"),
    (b'{"message": "' + b"x" * 3_000_000 + b'"}', 422, "message"),
    (json.dumps({f"key {number}": 1 for number in range(20_000)}).encode(), 413, "10000 keys"),
]


def test_a_large_body_is_read_within_bounds(served: Served) -> None:
    turn = served.post("/v1/sessions", {"row": served.keys()[0]})
    path = f"/v1/sessions/{turn['id']}"
    for body, status, detail in LARGE:
        answer = served.ask("POST", f"{path}/step", body)
        assert (answer.status, detail in answer.json["detail"]) == (status, True), answer.json
    assert served.post(f"{path}/step", {"message": "The sum is 3." + " " * (1 << 20)})["done"]
    served.ask("DELETE", path)


async def test_a_large_body_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from hermes_rl.service import app

    threads: list[bool] = []

    def watching(body: bytes, most: int) -> bool:
        threads.append(threading.current_thread() is threading.main_thread())
        return too_many_values(body, most)

    monkeypatch.setattr(app, "too_many_values", watching)
    service = app.bare_app("", token=False)

    @service.post("/step")
    async def step(asked: StepRequest) -> Any:
        return {"tokens": len(asked.ids or ())}

    for count in (10, 100_000):
        body = json.dumps({"ids": [7] * count}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            return messages.pop()  # noqa: B023 - called within this turn

        async def send(message: Any) -> None:
            sent.append(message)  # noqa: B023 - called within this turn

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/step", "headers": headers, "query_string": b""}
        await service({**scope, "raw_path": b"/step", "root_path": "", "http_version": "1.1"}, receive, send)
        assert json.loads(sent[1]["body"]) == {"tokens": count}
    assert threads == [False]
