"""`load_rows`: the rows of a spec for training or evaluation.

Owns the order of the steps: source, columns, filter, key, split, shuffle, order, limit. Everything here is plain
synchronous code; callers with an event loop run it in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Literal

from hermes_rl.data.derive import derive
from hermes_rl.data.hashing import combined
from hermes_rl.data.hub import HubOutOfReachError
from hermes_rl.data.order import ordered, shuffled, shuffled_stream
from hermes_rl.data.rows import Row, Rows
from hermes_rl.data.sources import Opened, is_on_hub, open_source, taken_for_local
from hermes_rl.data.split import eval_digests, is_eval
from hermes_rl.errors import UserError
from hermes_rl.spec.model import Source, Spec

Split = Literal["train", "eval"]
Notify = Callable[[str], None]
FALLBACK_FRACTION = 0.25
"""Share of a fallback's rows for evaluation where the spec names a split that the fallback does not have."""
_SAMPLE = 100
"""Rows of endless data that its fingerprint is made of."""

__all__ = ["Rows", "Split", "load_rows"]


def load_rows(spec: Spec, split: Split, *, notify: Notify) -> Rows:
    """The rows of one side of the split, in the order they are played.

    Args:
        spec: what to load.
        split: train, or eval.
        notify: told aloud when the fallback stands in for the dataset, or rows are left out.

    Raises:
        SpecError: a column or the filter does not work for a row.
        UserError: the dataset cannot be loaded, or a key is not unique.
    """
    rule = spec.dataset.eval
    if (split == "eval") != (rule is not None and rule.only) and (rule is None or rule.only):
        return Rows.of((), fingerprint=combined(()))
    source, opened = _source(spec, notify)
    return _Side(spec, split, source, opened, notify).rows()


def _source(spec: Spec, notify: Notify) -> tuple[Source, Opened]:
    """The dataset itself or its fallback, with the split that training rows come from."""
    dataset = spec.dataset
    if not is_on_hub(dataset):
        if (taken := taken_for_local(spec)) is not None:
            notify(taken)
        return dataset, open_source(dataset, dataset.split, spec.seed)
    if spec.demo:
        if dataset.fallback is None:
            raise UserError(f"dataset {dataset.path} is on the hub; --demo needs a `fallback` in the spec's dataset")
        notify(f"demo: the spec's fallback stands in for the dataset {dataset.path}")
        return _fallback(spec, dataset.fallback)
    try:
        return dataset, open_source(dataset, dataset.split, spec.seed)
    except HubOutOfReachError as error:
        if dataset.fallback is None:
            raise UserError(f"{error}; the spec has no `dataset.fallback`") from error
        notify(f"WARNING: {error}; the spec's FALLBACK stands in for it, results are not those of the dataset")
        return _fallback(spec, dataset.fallback)


def _fallback(spec: Spec, source: Source) -> tuple[Source, Opened]:
    return source, open_source(source, source.split, spec.seed)


class _Side:
    """One side of the split of one source."""

    def __init__(self, spec: Spec, split: Split, source: Source, opened: Opened, notify: Notify) -> None:
        self.spec = spec
        self.split: Split = split
        self.source = source
        self.opened = opened
        self.fallback = source is not spec.dataset
        self.notify = notify

    def rows(self) -> Rows:
        named = self._named_split()
        opened = open_source(self.source, named, self.spec.seed) if named else self.opened
        if opened.finite:
            return self._finite(list(derive(self.spec, opened.read())))
        return self._endless(opened)

    def _named_split(self) -> str | None:
        """The split that evaluation rows come from, where this is that side."""
        rule = self.spec.dataset.eval
        if self.split == "train" or rule is None or not self._has_splits():
            return None
        return rule.split

    def _has_splits(self) -> bool:
        """False for a fallback without splits: then a share of its rows is for evaluation."""
        return not self.fallback or isinstance(self.source.data_files, dict)

    def _fraction(self) -> float | None:
        rule = self.spec.dataset.eval
        if rule is None or rule.only:
            return None
        return rule.fraction if rule.split is None or self._has_splits() else FALLBACK_FRACTION

    def _finite(self, rows: list[Row]) -> Rows:
        fraction = self._fraction()
        if fraction is not None:
            kept = eval_digests(rows, fraction, self.spec.seed)
            rows = [row for row in rows if (row.digest in kept) == (self.split == "eval")]
        elif self.split == "train":
            rows = self._without_eval_split(rows)
        if self.spec.dataset.shuffle is not None:
            rows = shuffled(rows, self.spec.dataset.shuffle)
        if self.spec.dataset.order is not None and self.split == "train":
            rows = ordered(rows, self.spec.dataset.order)
        rows = rows[: self._limit()]
        fingerprint = combined(f"{row.key} {row.digest}" for row in rows)
        return Rows.of(rows, fingerprint=fingerprint, fallback=self.fallback)

    def _without_eval_split(self, rows: list[Row]) -> list[Row]:
        """Rows that are also in the evaluation split are not trained on."""
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
        kept = [row for row in rows if row.digest not in theirs]
        if len(kept) < len(rows):
            self.notify(f"{len(rows) - len(kept)} training rows are also in split {rule.split} and are left out")
        return kept

    def _limit(self) -> int | None:
        if self.split == "train":
            return self.spec.dataset.limit
        rule = self.spec.dataset.eval
        limits = [self.spec.evaluate.limit, rule.limit if rule else None]
        if rule is not None and rule.only:  # then there are no training rows that `limit` could be about
            limits.append(self.spec.dataset.limit)
        return min((limit for limit in limits if limit is not None), default=None)

    def _endless(self, opened: Opened) -> Rows:
        if self.spec.dataset.order is not None:
            raise UserError(
                "dataset.order needs rows that are all there; a streamed or endless dataset has an order of its own"
            )

        def make() -> Iterator[Row]:
            rows = self._mine(derive(self.spec, opened.read()))
            if self.spec.dataset.shuffle is not None:
                rows = shuffled_stream(rows, self.spec.dataset.shuffle)
            return islice(rows, self._limit())

        sample = combined(f"{row.key} {row.digest}" for row in islice(make(), _SAMPLE))
        return Rows(make, length=None, fingerprint=sample, fallback=self.fallback)

    def _mine(self, rows: Iterator[Row]) -> Iterator[Row]:
        fraction = self._fraction()
        bound = self.spec.dataset.limit if self._limit() is None else None
        others = 0
        for row in rows:
            mine = fraction is None or is_eval(row, fraction, self.spec.seed) == (self.split == "eval")
            if mine:
                yield row
                continue
            others += 1
            if bound is not None and others >= bound:
                return  # as many evaluation rows as lie between the training rows that are played
