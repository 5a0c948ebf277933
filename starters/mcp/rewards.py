"""How the tools were used."""

from hermes_rl import AgentResult, Score


def kept_before_found(result: AgentResult) -> Score:
    """1 where something was kept, and looked for afterwards."""
    names = [call.name for call in result.tool_calls if call.error is None]
    right = "keep" in names and "find" in names[names.index("keep") :]
    return Score(right, reason=f"called {names}")
