"""What every request has to pass."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from pathlib import Path

import pytest
import uvicorn

from hermes_rl.service import gate
from hermes_rl.service.gate import BODY, HEADERS, Gate, TimedProtocol
from tests.service.served import Served, raw, spec_in


@pytest.mark.parametrize("path", ["/v1/health", "/v1/rows", "/openapi.json", "/nowhere"])
@pytest.mark.parametrize(
    "sent", [None, "Bearer wrong", "Bearer ", "Basic a-long-random-value", "Bearer a-long-random-value2", "Bearer \xff"]
)
def test_without_the_token_there_is_no_answer_but_401(served: Served, path: str, sent: str | None) -> None:
    connection = served.connect()
    connection.request("GET", path, headers={} if sent is None else {"Authorization": sent})
    response = connection.getresponse()
    assert response.status == 401
    assert b"unauthorized" in response.read()


def test_the_token_is_asked_for_before_a_body_is_read(served: Served) -> None:
    head = b"POST /v1/rollouts HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
    assert raw(served.port, head + b"{").startswith(b"HTTP/1.1 401 ")


def test_the_token_is_never_written(served: Served) -> None:
    assert served.token is not None
    assert served.ask("GET", "/v1/health", headers={"Authorization": f"Bearer {served.token}x"}).status == 401
    folder = served.log.parent
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert [file for file in files if served.token.encode() in file.read_bytes()] == []


def test_a_body_that_is_too_large_is_413(served: Served) -> None:
    assert served.ask("POST", "/v1/rollouts", b"[" + b" " * BODY).status == 413
    announced = {"Content-Length": str(2**40), "Content-Type": "application/json"}
    connection = served.connect()
    connection.putrequest("POST", "/v1/rollouts")
    for name, value in {**served.headers(), **announced}.items():
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == 413


def test_a_body_in_pieces_is_bounded_too(served: Served) -> None:
    connection = served.connect()

    def pieces() -> object:
        for _ in range(BODY // 2**20 + 1):
            yield b" " * 2**20

    with contextlib.suppress(ConnectionError):  # it is told before all is sent
        connection.request("POST", "/v1/rollouts", pieces(), served.headers({}), encode_chunked=True)  # type: ignore[arg-type]
    assert connection.getresponse().status == 413


def test_body_that_is_not_json_gets_status_415_or_422(served: Served) -> None:
    plain = served.ask("POST", "/v1/rollouts", b"{}", {"Content-Type": "text/plain"})
    assert plain.status == 415
    for body in (b"{", b"", b"\xff\xfe", b"[" * 100_000, b"1" * 10_000, b'"\\ud800"', b"null"):
        answer = served.ask("POST", "/v1/rollouts", body)
        assert answer.status == 422, (body[:20], answer.body)
        assert answer.json["error"] in ("not_json", "invalid")


def test_too_many_headers_are_431_and_too_long_ones_400(served: Served) -> None:
    many = {f"X-{number}": "1" for number in range(HEADERS + 1)}
    assert served.ask("GET", "/v1/health", headers=many).status == 431
    long = b"GET /v1/health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n"
    assert raw(served.port, long)[:13] in (b"HTTP/1.1 400 ", b"")


def test_bytes_that_are_not_http_are_answered_without_harm(served: Served) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\x01\x00", b"HELLO\r\n\r\n", b"\0" * 100 + b"\r\n\r\n"):
        assert raw(served.port, sent, 2.0)[:13] in (b"HTTP/1.1 400 ", b"")
    assert served.get("/v1/health")["status"] == "ok"


def test_a_service_without_a_token_answers_to_this_machine_alone(tmp_path: Path) -> None:
    """A page in a browser of this machine may ask any address, under a name of its own."""
    with Served(spec_in(tmp_path)) as service:
        assert service.get("/v1/health")["status"] == "ok"
        for host in ("evil.example", "evil.example:8600", "127.0.0.1.evil.example", "", "[::", "10.0.0.1"):
            answer = service.ask("GET", "/v1/health", headers={"Host": host})
            assert (answer.status, answer.json["error"]) == (403, "foreign_host")
        for host in ("localhost:1", "127.0.0.1", "[::1]:8600"):
            assert service.ask("GET", "/v1/health", headers={"Host": host}).status == 200
        assert service.terminate() == 0


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET"])
async def test_client_that_sends_no_complete_request_times_out(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on a new connection nor on one that was answered before."""
    monkeypatch.setattr(gate, "PATIENCE", 0.5)

    async def app(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b""})  # type: ignore[operator]

    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        Gate(app, None, lambda: False),  # type: ignore[arg-type]
        http=TimedProtocol, ws="none", lifespan="off", log_config=None, timeout_keep_alive=60,
    )  # fmt: skip
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        started = time.monotonic()
        got = await asyncio.to_thread(raw, listener.getsockname()[1], sent, 20.0)
        assert time.monotonic() - started < 15
        assert got.count(b"204") == sent.count(b"\r\n\r\n")
    finally:
        server.should_exit = True
        await serving
