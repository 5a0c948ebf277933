"""A hub that cannot be reached is found out at once, and the cache is still looked at."""

from __future__ import annotations

import time

import pytest

from hermes_rl.tokens.hub import HubTokenizer, hub_reachable
from hermes_rl.tokens.tokenizer import TokenizerUnavailable, small_tokenizer_path


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    hub_reachable.cache_clear()


def test_a_tokenizer_that_is_nowhere_is_refused_quickly() -> None:
    started = time.monotonic()
    with pytest.raises(TokenizerUnavailable, match="acme/no-such-model"):
        HubTokenizer("acme/no-such-model")
    assert time.monotonic() - started < 10


def test_a_folder_needs_no_hub() -> None:
    assert HubTokenizer(str(small_tokenizer_path())).encode("hello")
