"""Questions about a small shop, without end."""

from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

FRUIT = ("apples", "pears", "plums")


def tasks(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield one question per number."""
    for index in count():
        random = Random(f"{seed}:{split}:{index}")
        boxes, each = random.randint(2, 9), random.randint(3, 12)
        fruit = random.choice(FRUIT)
        question = f"How many {fruit} are in {boxes} boxes of {each}?"
        yield {"question": question, "what": fruit, "boxes": boxes, "each": each, "answer": str(boxes * each)}
