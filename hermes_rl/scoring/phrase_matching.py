"""Find word boundaries in text of any script, for rewards that search for words."""

from __future__ import annotations

import re
import unicodedata

SPACELESS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3041-\u3096\u309d-\u30fa\u30fc-\u30ff\u3400-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
"""Characters of scripts without spaces between words (Thai, Lao, Burmese, Khmer, Japanese, Chinese), for a set of a
regular expression.
"""
LETTER = rf"[^\W{SPACELESS}]"
"""Pattern for a letter, a digit or `_` of a script with spaces between words."""
_FIRST_SPACELESS, _LAST_SPACELESS = re.compile(f"[{SPACELESS}]"), re.compile(f"[{SPACELESS}]$")


def words_of(text: str) -> set[str]:
    """Split a text into words: runs of letters, digits, `_` and their marks, or single spaceless characters."""
    marks = "".join(char for char in set(text) if unicodedata.category(char).startswith("M"))
    return set(re.findall(f"[{SPACELESS}]|(?:{LETTER}{f'[{re.escape(marks)}]*' if marks else ''})+", text))


def pattern_of(phrase: str) -> str:
    """Return a pattern for a phrase that stands alone, not inside a word if its script has spaces."""
    before = "" if _FIRST_SPACELESS.match(phrase) else r"(?<!\w)"
    after = "" if _LAST_SPACELESS.search(phrase) else r"(?!\w)"
    return before + re.escape(phrase) + after
