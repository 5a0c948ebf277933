"""What can be checked without a judge."""

import re

from hermes_rl import AgentResult, Score


def few_sentences(result: AgentResult, *, most: int) -> Score:
    """1 for one sentence up to `most`; 0 for none or more."""
    count = len(re.findall(r"[^.!?]+[.!?]", result.final_response))
    return Score(1 <= count <= most, reason=f"{count} sentences")
