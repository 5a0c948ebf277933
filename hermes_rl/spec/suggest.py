"""Build the end of an error message: the probable intention, and the possible values."""

from __future__ import annotations

from collections.abc import Iterable

from hermes_rl.plugins import did_you_mean

_MOST_CHOICES = 24


def choices(name: str, known_names: Iterable[str]) -> str:
    """Return `; did you mean x? Choices: a, b, c`, without the choices if there are too many."""
    names = list(dict.fromkeys(known_names))
    hint = did_you_mean(name, names)
    if not names or len(names) > _MOST_CHOICES:
        return hint
    return f"{hint or ';'} {'Choices' if hint else 'choices'}: {', '.join(names)}"
