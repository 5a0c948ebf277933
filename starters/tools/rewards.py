"""How good an answer is. A reward names what it wants: `result` is what the model said and did, `item` the row."""

from hermes_rl import AgentResult, Score


def names_currency(result: AgentResult, *, words: list[str]) -> Score:
    """1 if the answer names the currency."""
    found = [word for word in words if word in result.final_response]
    return Score(bool(found), reason=f"found {found}")
