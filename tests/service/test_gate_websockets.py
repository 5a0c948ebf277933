"""Who may open a WebSocket: this machine without a token, but no web page; with one, whoever has it."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_rl.service.gate import Gate

LOCAL = (b"host", b"localhost:8000")


async def opened(token: str | None, *headers: tuple[bytes, bytes], closed: bool = False) -> tuple[bool, list[Any]]:
    """Whether the application was reached, and what was sent instead."""
    reached: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/ws", "method": "GET", "headers": list(headers)}
    await Gate(app, token, lambda: closed)(scope, receive, send)
    return reached == ["websocket"], sent


async def test_this_machine_is_let_in() -> None:
    assert await opened(None, LOCAL) == (True, [])


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ([(b"host", b"evil.example")], "localhost alone"),
        ([LOCAL, (b"origin", b"https://evil.example")], "web pages"),
    ],
)
async def test_web_pages_are_not(headers: list[tuple[bytes, bytes]], why: str) -> None:
    reached, (refused,) = await opened(None, *headers)
    assert not reached
    assert refused["type"] == "websocket.close"
    assert why in refused["reason"]


async def test_a_token_is_asked_for() -> None:
    assert (await opened("abc", LOCAL, (b"authorization", b"Bearer abc")))[0]
    assert not (await opened("abc", LOCAL, (b"authorization", b"Bearer abd")))[0]
    assert not (await opened("abc", LOCAL))[0]


async def test_websocket_is_refused_while_the_service_stops() -> None:
    assert not (await opened(None, LOCAL, closed=True))[0]
