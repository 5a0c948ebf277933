"""Load the rows of a spec for training or evaluation, with `load_rows`.

This module owns the order of the steps: source, columns, filter, key, split, shuffle, order, limit. The split and the
shuffle depend only on the seed and the rows. The code is synchronous; callers with an event loop run it in a thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from random import Random
from typing import Literal, get_args

from hermes_rl.data.harbor import tasks_of
from hermes_rl.data.hub import HubOutOfReachError
from hermes_rl.data.rows import Row, Rows, combined_hash, derive, fraction_of, seeded
from hermes_rl.data.sources import Opened, is_on_hub, open_source, taken_for_local
from hermes_rl.errors import UserError
from hermes_rl.plugins import did_you_mean
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.spec.sections.dataset import Source

# --------------------------------------------------------------------------------------------- The order of rows

NO_ORDER = "dataset.order requires all rows in advance; it cannot change the order of a streamed or endless dataset"
WINDOW = 1000
"""Number of rows in the window in which endless data is shuffled."""


def shuffled(rows: Iterable[Row], seed: int) -> list[Row]:
    """Return finite rows in a random order; adding or removing a row does not move the others."""
    return sorted(rows, key=lambda row: (seeded(seed, f"{row.digest}:{row.key}"), row.index))


def ordered(rows: Iterable[Row], by: str) -> list[Row]:
    """Return finite rows sorted by a column: smallest first, or largest first with the prefix ``-``; stable.

    Raises:
        UserError: a row lacks the column, or its values cannot be compared.
    """
    column, largest_first = by.removeprefix("-"), by.startswith("-")
    rows = list(rows)
    for row in rows:
        if column not in row.columns:
            raise UserError(
                f"dataset.order: row {row.key} has no column {column!r}{did_you_mean(column, set(row.columns))}"
            )
    try:
        return sorted(rows, key=lambda row: row.columns[column], reverse=largest_first)
    except TypeError as error:
        raise UserError(f"dataset.order: the values of {column!r} cannot be compared: {error}") from error


def shuffled_stream(rows: Iterable[Row], seed: int) -> Iterator[Row]:
    """Yield endless rows, shuffled within a moving window of `WINDOW` rows."""
    random = Random(seed)
    waiting: list[Row] = []
    for row in rows:
        if len(waiting) < WINDOW:
            waiting.append(row)
            continue
        index = random.randrange(WINDOW)
        yield waiting[index]
        waiting[index] = row
    random.shuffle(waiting)
    yield from waiting


# --------------------------------------------------------------------------------- Rows for evaluation


def eval_digests(rows: Iterable[Row], fraction: float, seed: int) -> frozenset[str]:
    """Return the digests of the contents that are for evaluation, in finite data.

    Contents are ranked by a hash of seed and content. The first `max(1, round(fraction · rows))` rows are for
    evaluation, rounded up to complete contents, since duplicates stay together. At least one content remains for
    training.
    """
    counts = Counter(row.digest for row in rows)
    ranked = sorted(counts, key=lambda content: (seeded(seed, content), content))
    target_count = max(1, round(fraction * counts.total()))
    chosen: set[str] = set()
    rows_chosen = 0
    for content in ranked[:-1]:  # the last one remains for training, for any fraction
        if rows_chosen >= target_count:
            break
        chosen.add(content)
        rows_chosen += counts[content]
    return frozenset(chosen)


def is_eval(row: Row, fraction: float, seed: int) -> bool:
    """Return True if a row of data of unknown length is for evaluation: compare the same hash with the fraction."""
    return fraction_of(seeded(seed, row.digest)) < fraction


# ------------------------------------------------------------------------------------------------------- Loading

Split = Literal["train", "eval"]


def require_split(split: object) -> None:
    """Raise UserError if there is no such split."""
    if split not in get_args(Split):
        raise UserError(f"unknown split {split!r:.60}: the splits are train and eval")


def split_of(mode: Mode) -> Split:
    """Return the split of the rows that a mode uses."""
    return "eval" if mode == "evaluate" else "train"


Notify = Callable[[str], None]
FALLBACK_FRACTION = 0.25
"""Fraction of a fallback's rows for evaluation if the spec names a split that the fallback does not have."""
_SAMPLE = 100
"""Number of rows of endless data from which its fingerprint is computed."""

RowCount = int | Literal["all"]
"""Number of rows to check."""
ENDLESS = 100_000
"""Number of rows after which a source that has not ended counts as endless, if all rows are requested."""
ENDLESS_SECONDS = 60.0
"""Seconds after which such a source also counts as endless, since rows of a simulator may take long."""

__all__ = ["RowCount", "Rows", "Split", "counted_rows", "load_rows", "split_of"]


def counted_rows(spec: Spec, rows: Iterable[Row], count: RowCount, *, finite: bool) -> list[Row]:
    """Return the first `count` rows, or all of them.

    Raises:
        UserError: all rows are requested and they may be endless.
    """
    if count != "all":
        return list(islice(rows, count))
    collected_rows: list[Row] = []
    started_at = time.monotonic()
    for row in rows:
        collected_rows.append(row)
        if finite or (len(collected_rows) <= ENDLESS and time.monotonic() - started_at <= ENDLESS_SECONDS):
            continue
        name = "path" if spec.dataset.generator is None else "generator"
        raise UserError(
            f"dataset.{name}: {getattr(spec.dataset, name)} has given {len(collected_rows)} rows in "
            f"{time.monotonic() - started_at:.0f} s and not ended, so it may be endless; pass the number of rows to "
            "check (`--rows N`), or set dataset.limit"
        )
    return collected_rows


def load_rows(spec: Spec, split: Split, *, notify: Notify, lazily: bool = False) -> Rows:
    """Return the rows of one side of the split, in the order in which they are used.

    Args:
        spec: the spec.
        split: "train" or "eval".
        notify: called with a message if the fallback replaces the dataset, rows are excluded, or reading takes long.
        lazily: load rows on request if they keep the order of the source; their number is then unknown.

    Raises:
        SpecError: a column or the filter does not work for a row.
        UserError: the dataset cannot be loaded, or a key is not unique.
    """
    rule = spec.dataset.eval
    if (split == "eval") != (rule is not None and rule.only) and (rule is None or rule.only):
        return Rows.from_sequence((), fingerprint=combined_hash(()))
    source, opened = _choose_source(spec, notify)
    return _SplitFilter(spec, split, source, opened, notify).rows(lazily=lazily)


def _choose_source(spec: Spec, notify: Notify) -> tuple[Source, Opened]:
    """Return the dataset itself or its fallback, with the split for training rows."""
    dataset = spec.dataset
    if dataset.harbor is not None:
        tasks = tasks_of(spec)
        for note in tasks.notes:
            notify(note)
        return dataset, Opened(lambda: iter(tasks.rows), finite=True)
    if (warning := taken_for_local(spec)) is not None:
        notify(warning)
    if not spec.demo or not is_on_hub(dataset):
        try:
            return dataset, open_source(dataset, dataset.split, spec.seed, notify)
        except HubOutOfReachError as error:
            if not is_on_hub(dataset):
                raise
            if dataset.fallback is None:
                raise UserError(f"{error}; the spec has no `dataset.fallback`") from error
            notify(f"WARNING: {error}; using the spec's FALLBACK instead, so the results do not apply to the dataset")
    elif dataset.fallback is None:
        raise UserError(f"dataset {dataset.path} is on the hub; --demo needs a `fallback` in the spec's dataset")
    else:
        notify(f"demo: using the spec's fallback instead of the dataset {dataset.path}")
    return dataset.fallback, open_source(dataset.fallback, dataset.fallback.split, spec.seed)


class _SplitFilter:
    """One side of the split of one source."""

    def __init__(self, spec: Spec, split: Split, source: Source, opened: Opened, notify: Notify) -> None:
        self.spec, self.source, self.opened, self.notify = spec, source, opened, notify
        self.split: Split = split
        self.fallback = source is not spec.dataset
        rule = spec.dataset.eval
        # If a fallback has no splits, a fraction of its rows is for evaluation.
        has_splits = not self.fallback or isinstance(source.data_files, dict)
        self.eval_split = rule.split if rule is not None and has_splits else None
        """Name of the source's split with the evaluation rows, or None."""
        self.fraction: float | None = None
        """Fraction of the rows for evaluation, or None."""
        if rule is not None and not rule.only:
            self.fraction = FALLBACK_FRACTION if rule.split is not None and not has_splits else rule.fraction

    def rows(self, *, lazily: bool) -> Rows:
        opened = self.opened
        if self.split == "eval" and self.eval_split is not None:
            opened = open_source(self.source, self.eval_split, self.spec.seed)
        if opened.finite and lazily and self._keeps_order():
            read, spec, limit = opened.read, self.spec, self._limit()
            make = lambda: islice(derive(spec, read(), self.notify), limit)  # noqa: E731
            return Rows(make, length=None, fingerprint="", fallback=self.fallback)
        if opened.finite:
            return self._finite(list(derive(self.spec, opened.read(), self.notify)))
        return self._endless(opened)

    def _keeps_order(self) -> bool:
        """Return True if the rows keep the order of the source, so that the first ones do not depend on the others."""
        dataset = self.spec.dataset
        if self.split == "train":
            compared = dataset.eval is not None and dataset.eval.split is not None
            return self.fraction is None and dataset.shuffle is None and dataset.order is None and not compared
        return self.fraction is None and dataset.shuffle is None

    def _finite(self, rows: list[Row]) -> Rows:
        if self.fraction is not None:
            for_eval = eval_digests(rows, self.fraction, self.spec.seed)
            rows = [row for row in rows if (row.digest in for_eval) == (self.split == "eval")]
        elif self.split == "train":
            rows = self._without_eval_split(rows)
        if self.spec.dataset.shuffle is not None:
            rows = shuffled(rows, self.spec.dataset.shuffle)
        if self.spec.dataset.order is not None and self.split == "train":
            rows = ordered(rows, self.spec.dataset.order)
        rows = rows[: self._limit()]
        fingerprint = combined_hash(f"{row.key} {row.digest}" for row in rows)
        return Rows.from_sequence(rows, fingerprint=fingerprint, fallback=self.fallback)

    def _without_eval_split(self, rows: list[Row]) -> list[Row]:
        """Return the rows whose contents are not in the evaluation split."""
        rule = self.spec.dataset.eval
        if rule is None or rule.split is None:
            return rows
        try:
            other = open_source(self.source, rule.split, self.spec.seed)
        except HubOutOfReachError:
            self.notify(f"split {rule.split} is out of reach; it was not compared with the training rows")
            return rows
        if not other.finite:
            return rows
        theirs = {row.digest for row in derive(self.spec, other.read())}
        others = [row for row in rows if row.digest not in theirs]
        if len(others) < len(rows):
            self.notify(f"{len(rows) - len(others)} training rows are also in split {rule.split} and are excluded")
        return others

    def _limit(self) -> int | None:
        if self.split == "train":
            return self.spec.dataset.limit
        rule = self.spec.dataset.eval
        limits = [self.spec.evaluate.limit, rule.limit if rule else None]
        if rule is not None and rule.only:  # there are no training rows to which `limit` could apply
            limits.append(self.spec.dataset.limit)
        return min((limit for limit in limits if limit is not None), default=None)

    def _endless(self, opened: Opened) -> Rows:
        if self.spec.dataset.order is not None:
            raise UserError(NO_ORDER)

        def make() -> Iterator[Row]:
            rows = self._split_rows(derive(self.spec, opened.read()))
            if self.spec.dataset.shuffle is not None:
                rows = shuffled_stream(rows, self.spec.dataset.shuffle)
            return islice(rows, self._limit())

        sample = combined_hash(f"{row.key} {row.digest}" for row in islice(make(), _SAMPLE))
        return Rows(make, length=None, fingerprint=sample, fallback=self.fallback)

    def _split_rows(self, rows: Iterator[Row]) -> Iterator[Row]:
        bound = self.spec.dataset.limit if self._limit() is None else None
        others = 0
        for row in rows:
            if self.fraction is None or is_eval(row, self.fraction, self.spec.seed) == (self.split == "eval"):
                yield row
                continue
            others += 1
            if bound is not None and others >= bound:
                return  # evaluation uses only the rows between the first `limit` training rows
