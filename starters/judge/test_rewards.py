"""pytest test_rewards.py"""

import pytest
from rewards import few_sentences

from hermes_rl import AgentResult


@pytest.mark.parametrize(("text", "value"), [("One. Two.", 1), ("One. Two. Three. Four.", 0), ("", 0)])
def test_sentences_are_counted(text: str, value: int) -> None:
    result = AgentResult(
        messages=[{"role": "assistant", "content": text}],
        turns_used=1, finished_naturally=True, reasoning_per_turn=[None], tool_errors=[],
    )  # fmt: skip
    assert few_sentences(result, most=3).value == value
