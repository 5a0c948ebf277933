"""Rows, tools and rewards of the spec that the tiny model was trained for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


def rows(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    chance = random.Random(seed)
    for _ in range(400):
        a, b, c = (chance.randrange(10) for _ in range(3))
        yield {"a": a, "b": b, "c": c, "want": a + b * c}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def right(item: Any, result: Any) -> float:
    return float(result.final_response.strip().endswith(f"is {item['want']}."))


def called(item: Any, result: Any) -> float:
    return min(1.0, len(result.tool_calls) / 2)
