"""Mask secrets in texts that are shown or stored: failures, logs, and secrets that a server returns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote

EXCERPT = 300
"""Maximum characters of a server's response that are stored with a failure."""
MASK = "***"
_SHORTEST = 4
"""Shorter values ("x", a placeholder for servers that accept any key) would mask ordinary words."""
_LOOKS_SECRET = re.compile(r"\b(?:Bearer\s+\S+|sk-[A-Za-z0-9*_-]{8,}|hf_[A-Za-z0-9]{8,})")
UNGUESSABLE = 16
"""Minimum characters of a secret that is masked in a server's response. A shorter one may be a placeholder ("EMPTY"),
and the response an unrelated text with the same word.
"""


NAMED = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
"""Names of headers and query parameters whose values are secrets, and not settings such as a version."""


def keys_of(values: Mapping[str, str]) -> list[str]:
    """Return the values whose names denote secrets; of "Bearer abc" also the last word alone."""
    return [form for name, value in values.items() if NAMED.search(name) for form in (value, *value.split()[-1:])]


class Scrubber:
    """Mask the given secrets in all their encodings, and other texts that look like a key.

    Args:
        secrets: texts that must not be shown.
        keys: secrets that only the server knows.
    """

    def __init__(self, secrets: Iterable[str], keys: Iterable[str] = ()) -> None:
        keys = list(keys)
        secret_forms, key_forms = _secret_forms([*secrets, *keys], _SHORTEST), _secret_forms(keys, UNGUESSABLE)
        self._secret_pattern = re.compile("|".join(map(re.escape, secret_forms))) if secret_forms else None
        self._key_pattern = re.compile(b"|".join(re.escape(form.encode()) for form in key_forms)) if key_forms else None

    def scrub(self, text: str) -> str:
        """Return the text without secrets."""
        if self._secret_pattern is not None:
            text = self._secret_pattern.sub(MASK, text)
        return _LOOKS_SECRET.sub(MASK, text)

    def unechoed(self, raw: bytes) -> bytes:
        """Return a server's response without the keys that it received; short ones stay."""
        return raw if self._key_pattern is None else self._key_pattern.sub(MASK.encode(), raw)

    def excerpt(self, text: str) -> str:
        """Return one line of at most `EXCERPT` characters. It is scrubbed before it is cut, so no partial secret
        remains.
        """
        line = " ".join(self.scrub(text).split())
        return line if len(line) <= EXCERPT else line[: EXCERPT - 1] + "…"


def _secret_forms(secrets: Iterable[str], shortest: int) -> list[str]:
    """Return the forms of secrets in a text, the longest first."""
    bare = [secret.strip() for secret in secrets]
    forms = {form for secret in bare for form in (secret, json.dumps(secret)[1:-1], quote(secret, safe=""))}
    return sorted((form for form in forms if len(form) >= shortest), key=len, reverse=True)
