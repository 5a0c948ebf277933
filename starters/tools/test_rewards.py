"""pytest test_rewards.py"""

from rewards import names_currency
from tools import price

from hermes_rl import AgentResult


def answer(text: str) -> AgentResult:
    return AgentResult(
        messages=[{"role": "assistant", "content": text}],
        turns_used=1, finished_naturally=True, reasoning_per_turn=[None], tool_errors=[],
    )  # fmt: skip


def test_the_currency_is_found() -> None:
    assert names_currency(answer("That is 3 Euro."), words=["Euro"]).value == 1
    assert names_currency(answer("That is 3."), words=["Euro"]).value == 0


def test_a_price_is_looked_up() -> None:
    assert price("tea") == 2.5
