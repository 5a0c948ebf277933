"""How often Python looks for garbage while a run goes on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARE = (2_000, 5, 1_000)
"""Thresholds of the three generations. Young garbage is found as ever; all objects are looked at once in ten million
new ones, which is some ten thousand rollouts."""


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """Within it the event loop is not stopped by full collections, which find next to nothing here.

    Such a one looks at every object that there is. With thousands of rollouts in flight that takes half a second, and
    Python's own thresholds ask for it each time that a quarter more have begun. What is there already (the program
    itself) is never looked at.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
