"""The end of an error message: what was probably meant, and what is possible."""

from __future__ import annotations

from collections.abc import Iterable

from hermes_rl.plugins import closest as closest
from hermes_rl.plugins import did_you_mean as did_you_mean

_MOST_CHOICES = 24


def choices(name: str, known: Iterable[str]) -> str:
    """`; did you mean x? Choices: a, b, c`, with the choices left out where they are too many."""
    names = list(dict.fromkeys(known))
    hint = did_you_mean(name, names)
    if not names or len(names) > _MOST_CHOICES:
        return hint
    return f"{hint or ';'} {'Choices' if hint else 'choices'}: {', '.join(names)}"
