"""A shop's order book that an agent can change."""

from typing import Any


class Retail:
    """One world per rollout."""

    def __init__(self, item: dict[str, Any]) -> None:
        self.orders: dict[str, str] = dict(item["orders"])
        self.agent_tools = AgentTools(self.orders)


class AgentTools:
    """What the agent may do."""

    def __init__(self, orders: dict[str, str]) -> None:
        self._orders = orders

    def cancel_order(self, order_id: str) -> str:
        """Cancel an order.

        Args:
            order_id: number of the order.
        """
        self._orders[order_id] = "cancelled"
        return f"{order_id} is cancelled"
