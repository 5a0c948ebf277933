"""Count the reference words in the final response: cheap, and easily fooled by lists of words."""

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


@requires("reference | regex_search('\\\\w') is not none", "the reference does not contain a word")
def keyword_overlap(result: Any, *, reference: str) -> float:
    """Return the share of the reference's words that the final response contains, from 0 to 1.

    Words are runs of letters, digits and `_`, or single characters in scripts without spaces. They are compared by
    Unicode case folding, each once. English function words do not count, unless the reference has no others.

    Args:
        reference: the text with the expected words; it must have at least one.
    """
    reference_words = words(reference)
    return len(reference_words & words(result.final_response)) / len(reference_words)


def words(text: str) -> set[str]:
    """Return the set of words in a text, without function words unless it has no others."""
    every = words_of(text.casefold())
    return every - FUNCTION_WORDS or every
