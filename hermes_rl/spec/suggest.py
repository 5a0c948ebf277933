"""The end of an error message: what was probably meant, and what is possible."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST_CHOICES = 24


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that this one is a misspelling of, if it is like one."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean x?` or nothing."""
    meant = closest(name, known)
    return f"; did you mean `{meant}`?" if meant else ""


def choices(name: str, known: Iterable[str]) -> str:
    """`; did you mean x? Choices: a, b, c`, with the choices left out where they are too many."""
    names = list(dict.fromkeys(known))
    hint = did_you_mean(name, names)
    if not names or len(names) > _MOST_CHOICES:
        return hint
    return f"{hint or ';'} {'Choices' if hint else 'choices'}: {', '.join(names)}"
