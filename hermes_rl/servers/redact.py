"""What of a server's address and answers may be shown.

Owns the removal of secrets from texts that end up in exceptions, records and logs. Everything that a
transport wants to say about a failure goes through a `Scrubber` first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from urllib.parse import quote, urlsplit, urlunsplit

EXCERPT = 300
"""Characters of a server's answer that are kept with a failure."""

_MASK = "***"
_SHORTEST = 4
"""Shorter values ("x", a placeholder for servers that want any key) would mask ordinary words."""
_LOOKS_SECRET = re.compile(r"\b(?:Bearer\s+\S+|sk-[A-Za-z0-9*_-]{8,}|hf_[A-Za-z0-9]{8,})")


class Scrubber:
    """Masks the given secrets, however they are encoded, and whatever else looks like a key."""

    def __init__(self, secrets: Iterable[str]) -> None:
        variants = {form for secret in secrets for form in _variants(secret) if len(form) >= _SHORTEST}
        longest_first = sorted(variants, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if variants else None

    def scrub(self, text: str) -> str:
        """The text without secrets."""
        if self._known is not None:
            text = self._known.sub(_MASK, text)
        return _LOOKS_SECRET.sub(_MASK, text)

    def excerpt(self, text: str) -> str:
        """One line of at most `EXCERPT` characters; scrubbed before it is cut, so no half secret stays."""
        line = " ".join(self.scrub(text).split())
        return line if len(line) <= EXCERPT else line[: EXCERPT - 1] + "…"


def _variants(secret: str) -> set[str]:
    bare = secret.strip()
    return {bare, json.dumps(bare)[1:-1], quote(bare, safe="")}


def public_url(url: str) -> str:
    """The address without user, password and query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))
