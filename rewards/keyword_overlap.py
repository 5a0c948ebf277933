"""How many words of a reference the final answer has: cheap, and easily fooled by lists of words."""

from __future__ import annotations

from typing import Any

from hermes_rl.scoring.phrase_matching import words_of
from hermes_rl.scoring.reward_value import requires

FUNCTION_WORDS = frozenset(
    {
        "a", "an", "and", "are", "as", "at", "be", "by", "for", "from", "had", "has", "have", "he", "her", "his", "in",
        "is", "it", "its", "not", "of", "on", "or", "she", "that", "the", "their", "them", "they", "this", "to", "was",
        "were", "which", "who", "will", "with",
    }
)  # fmt: skip


@requires("reference | regex_search('\\\\w') is not none", "the reference has no words")
def keyword_overlap(result: Any, *, reference: str) -> float:
    """The share of the reference's words that stand in the last thing the policy said, from 0 to 1.

    Words are runs of letters, digits and `_`, in scripts without spaces single characters, compared by Unicode case
    folding, each once; English function words do not count, unless the reference has no others.

    Args:
        reference: the text whose words are wanted; it must have some.
    """
    wanted = words(reference)
    return len(wanted & words(result.final_response)) / len(wanted)


def words(text: str) -> set[str]:
    """The words of a text, without function words where it has others."""
    every = words_of(text.casefold())
    return every - FUNCTION_WORDS or every
