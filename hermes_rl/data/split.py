"""Which rows are for evaluation: a function of the seed and the row's content, and of nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hermes_rl.data.hashing import fraction_of, seeded
from hermes_rl.data.rows import Row


def eval_digests(rows: Iterable[Row], fraction: float, seed: int) -> frozenset[str]:
    """The contents that are for evaluation, of finite data.

    Contents are ranked by a hash of seed and content; the first `max(1, round(fraction · rows))` rows are for
    evaluation, rounded up to whole contents, since duplicates stay together. At least one content stays.
    """
    counts = Counter(row.digest for row in rows)
    ranked = sorted(counts, key=lambda content: (seeded(seed, content), content))
    wanted = max(1, round(fraction * counts.total()))
    chosen: set[str] = set()
    taken = 0
    for content in ranked[:-1]:  # the last one stays, whatever the fraction
        if taken >= wanted:
            break
        chosen.add(content)
        taken += counts[content]
    return frozenset(chosen)


def is_eval(row: Row, fraction: float, seed: int) -> bool:
    """Whether a row is for evaluation, of data whose end is not known: the same hash against a threshold."""
    return fraction_of(seeded(seed, row.digest)) < fraction
