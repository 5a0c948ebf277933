"""Distributions: which toolsets a group of rollouts gets, drawn by chance from a seed.

Owns the named distributions, with the probabilities that hermes-agent gives them, and the draw. What the
name of a toolset stands for is `catalogue`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping

from hermes_rl.errors import UserError
from hermes_rl.plugins import did_you_mean

logger = logging.getLogger(__name__)

DISTRIBUTIONS: dict[str, dict[str, float]] = {
    "default": {"web": 1, "vision": 1, "image_gen": 1, "terminal": 1, "file": 1, "browser": 1},
    "image_gen": {"image_gen": 0.9, "vision": 0.9, "web": 0.55, "terminal": 0.45},
    "research": {"web": 0.9, "browser": 0.7, "vision": 0.5, "terminal": 0.1},
    "science": {"web": 0.94, "terminal": 0.94, "file": 0.94, "vision": 0.65, "browser": 0.5, "image_gen": 0.15},
    "development": {"terminal": 0.8, "file": 0.8, "web": 0.3, "vision": 0.1},
    "safe": {"web": 0.8, "browser": 0.7, "vision": 0.6, "image_gen": 0.6},
    "balanced": {"web": 0.5, "vision": 0.5, "image_gen": 0.5, "terminal": 0.5, "file": 0.5, "browser": 0.5},
    "minimal": {"web": 1},
    "terminal_only": {"terminal": 1, "file": 1},
    "terminal_web": {"terminal": 1, "file": 1, "web": 1},
    "creative": {"image_gen": 0.9, "vision": 0.9, "web": 0.3},
    "reasoning": {"web": 0.9, "file": 0.6, "terminal": 0.2},
    "browser_use": {"browser": 1, "web": 0.8, "vision": 0.7},
    "browser_only": {"browser": 1},
    "browser_tasks": {"browser": 0.97, "vision": 0.12, "terminal": 0.15},
    "terminal_tasks": {
        "terminal": 0.97,
        "file": 0.97,
        "web": 0.97,
        "browser": 0.75,
        "vision": 0.5,
        "image_gen": 0.1,
    },
    "mixed_tasks": {
        "browser": 0.92,
        "terminal": 0.92,
        "file": 0.92,
        "web": 0.35,
        "vision": 0.15,
        "image_gen": 0.15,
    },
}
"""Name → toolset → probability."""


def find_distribution(name: str) -> Mapping[str, float]:
    """A named distribution; raises `UserError` where there is none."""
    if name not in DISTRIBUTIONS:
        choices = ", ".join(sorted(DISTRIBUTIONS))
        hint = did_you_mean(name, set(DISTRIBUTIONS))
        raise UserError(f"no distribution is named {name!r}{hint} (there are {choices})")
    return DISTRIBUTIONS[name]


def draw(chances: Mapping[str, float], seed: int | str) -> tuple[str, ...]:
    """One draw: each toolset by itself with its probability; the same for the same seed.

    A draw that leaves none takes the most probable one instead, since a group without tools would be
    another task.
    """
    if any(not 0 <= chance <= 1 for chance in chances.values()):
        raise UserError("the probabilities of a distribution of toolsets must be between 0 and 1")
    if not any(chances.values()):
        raise UserError("the distribution of toolsets is empty: no toolset has a probability above 0")
    source = random.Random(f"toolsets {seed}")
    drawn = tuple(name for name, chance in chances.items() if source.random() < chance)
    if drawn:
        return drawn
    likeliest = max(chances, key=lambda name: chances[name])
    logger.info("the draw from the distribution was empty: taking %s, the most probable toolset", likeliest)
    return (likeliest,)
