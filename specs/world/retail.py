"""The order book of a small shop: what the agent may change, what the customer may see, and whether it ended well."""

from typing import Any


class Retail:
    """The orders of a shop, one object per rollout."""

    agent_tools = ("find_order", "cancel_order", "change_address")
    user_tools = ("look_at_receipt",)

    def __init__(self, item: dict[str, Any]) -> None:
        self.orders: dict[str, dict[str, str]] = {order_id: dict(order) for order_id, order in item["orders"].items()}
        self.receipt: str = item["receipt"]

    def find_order(self, number: str) -> dict[str, str]:
        """Look up an order.

        Args:
            number: Number of the order.
        """
        return self._order(number)

    def cancel_order(self, number: str) -> str:
        """Cancel an order that was not sent yet.

        Args:
            number: Number of the order.
        """
        order = self._order(number)
        if order["status"] == "sent":
            raise ValueError("it was sent already")
        order["status"] = "cancelled"
        return f"{number} is cancelled"

    def change_address(self, number: str, city: str) -> str:
        """Send an order to another city.

        Args:
            number: Number of the order.
            city: The new city.
        """
        self._order(number)["city"] = city
        return f"{number} goes to {city}"

    def look_at_receipt(self) -> str:
        """Read the receipt that lies on your table."""
        return self.receipt

    def _order(self, order_id: str) -> dict[str, str]:
        if order_id not in self.orders:
            raise ValueError(f"there is no order {order_id}")
        return self.orders[order_id]


def orders_equal(state: Retail, *, goal: dict[str, dict[str, str]]) -> bool:
    """Return 1 if the order book matches the customer's goal, else 0."""
    return state.orders == goal
