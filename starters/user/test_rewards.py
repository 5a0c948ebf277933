"""pytest test_rewards.py"""

import pytest
from world import Restaurant, booked


def test_the_book_decides() -> None:
    restaurant = Restaurant({"taken": {"19:00": "Chen"}})
    assert booked(restaurant, goal={"19:00": "Chen", "20:00": "Ada"}).value == 0
    restaurant.book("20:00", 2, "Ada")
    assert booked(restaurant, goal={"19:00": "Chen", "20:00": "Ada"}).value == 1


def test_what_is_taken_cannot_be_booked() -> None:
    with pytest.raises(ValueError, match="no free table"):
        Restaurant({"taken": {"19:00": "Chen"}}).book("19:00", 2, "Ada")
