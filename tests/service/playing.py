"""A token-level policy over HTTP that plays the small task, in the event loop of a test."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.api.summing import END, TEXT, write
from tests.servers.token_policy import TokenPolicy
from tests.service.served import Served, spec_in
from tests.waiting import BOUND, until


def policy(wrong: float = 0.0) -> TokenPolicy:
    """It is right, or wrong now and then."""

    def said(text: str, chance: random.Random) -> str:
        return write(text, right=chance.random() >= wrong) + END

    return TokenPolicy(load_tokenizer(), said)


def many(rows: int, text: str = TEXT) -> str:
    """The spec with so many rows, and no policy of its own."""
    items = json.dumps([{"a": number, "b": number % 7} for number in range(rows)])
    return text.replace("[{a: 1, b: 2}, {a: 3, b: 4}, {a: 5, b: 6}, {a: 7, b: 8}]", items)


def tokenizer() -> str:
    """The folder of the package's own tokenizer, which is the policy's."""
    return str(small_tokenizer_path())


def named(url: str, **more: Any) -> dict[str, Any]:
    """The policy as a request names it."""
    return {"type": "vllm", "base_url": url, "model": "tiny", "tokenizer": tokenizer(), **more}


async def served_in(folder: Path, rows: int, *options: str, more: str = "") -> Served:
    """A service without a policy of its own."""
    return await asyncio.to_thread(Served, spec_in(folder, many(rows) + more), *options)


async def holds(condition: Callable[[], bool], seconds: float = BOUND) -> None:
    """Wait until a condition that blocks is true, while the policy goes on."""
    await until(lambda: asyncio.to_thread(condition), seconds)
