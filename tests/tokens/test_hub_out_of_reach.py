"""A hub that cannot be reached is found out once, and the cache is still looked at."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from hermes_rl.tokens.hub import HubTokenizer, hub_reachable
from hermes_rl.tokens.tokenizer import TokenizerUnavailable, small_tokenizer_path

MODEL = "acme/no-such-model"


class Hub(ThreadingHTTPServer):
    """Has nothing; listens from `open` on."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Nothing, bind_and_activate=False)
        self.server_bind()
        self.asked: list[str] = []

    def open(self) -> None:
        self.server_activate()
        Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def models_asked(self) -> bool:
        return any(MODEL in path for path in self.asked)


class Nothing(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.send_error(404)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        # The library has read its variables when it was imported, perhaps offline by choice.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.delenv(name, raising=False)
        hub_reachable.cache_clear()
        yield server
        hub_reachable.cache_clear()


def test_a_hub_that_was_out_of_reach_is_not_asked_for_models(hub: Hub) -> None:
    assert not hub_reachable()
    hub.open()
    with pytest.raises(TokenizerUnavailable, match=MODEL):
        HubTokenizer(MODEL)
    hub.shutdown()
    assert not hub.models_asked()


def test_a_hub_within_reach_is_asked(hub: Hub) -> None:
    hub.open()
    with pytest.raises(TokenizerUnavailable, match=MODEL):
        HubTokenizer(MODEL)
    hub.shutdown()
    assert hub.models_asked()


def test_a_folder_needs_no_hub(hub: Hub) -> None:
    assert HubTokenizer(str(small_tokenizer_path())).encode("hello")
    assert not hub.asked
