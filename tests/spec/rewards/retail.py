"""Whether the world ended as it should."""

from typing import Any


def db_equal(state: Any, *, goal: dict[str, str]) -> float:
    """1 where the orders are those of the goal."""
    return float(state.orders == goal)
