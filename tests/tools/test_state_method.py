"""`{state: take}` where `take` is a method of the state object itself: that one tool."""

from __future__ import annotations

from hermes_rl.tools.python_tools import state_tools


class Shelf:
    """A state with two methods, of which one is named."""

    def take(self, count: int) -> int:
        """Take books.

        Args:
            count: how many
        """
        return count

    @staticmethod
    def look(place: str) -> str:
        """Look."""
        return place


def test_a_method_of_the_state_is_one_tool() -> None:
    (tool,) = state_tools(Shelf(), "take")
    assert tool.name == "take"
    assert list(tool.parameters["properties"]) == ["count"]
    assert [each.name for each in state_tools(Shelf(), "look")] == ["look"]
