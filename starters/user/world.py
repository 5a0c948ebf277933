"""The book of a restaurant, and whether it ended as the guest wanted."""

from typing import Any

from hermes_rl import Score

LARGEST = 6


class Restaurant:
    """One world for each rollout."""

    agent_tools = ("free_times", "book")

    def __init__(self, item: dict[str, Any]) -> None:
        self.tables: dict[str, str] = dict(item["taken"])

    def free_times(self) -> list[str]:
        """Look up at which times a table is free."""
        return [f"{hour}:00" for hour in range(12, 23) if f"{hour}:00" not in self.tables]

    def book(self, time: str, guests: int, name: str) -> str:
        """Book a table.

        Args:
            time: The full hour, such as 20:00.
            guests: How many people come.
            name: In whose name.
        """
        if guests > LARGEST:
            raise ValueError(f"a table seats {LARGEST}")
        if time not in self.free_times():
            raise ValueError(f"at {time} there is no free table")
        self.tables[time] = name
        return f"booked at {time} for {name}"


def booked(state: Restaurant, *, goal: dict[str, str]) -> Score:
    """1 where the book is as the guest wanted it, else 0."""
    return Score(state.tables == goal, reason=f"the book has {state.tables}")
