"""`Row` and `Rows`: the input of a rollout, and the sequence of rows that a run draws from.

A row's key and digest are the same in every process and on every machine. `derive` makes rows from raw records: it adds
derived columns, applies the filter, and computes the key. A sequence of rows may be endless.
"""

from __future__ import annotations

import hashlib
import json
import math
import time as clock
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice
from typing import Any, overload
from uuid import UUID

from hermes_rl.errors import SpecError, UserError
from hermes_rl.plugins import did_you_mean
from hermes_rl.spec.model import Spec
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.section import FrozenDict
from hermes_rl.spec.templates import TemplateError, evaluate, render
from hermes_rl.values import replace_surrogates, write_message

# --------------------------------------------------------------------------- Hashes: SHA-256 over canonical JSON


def digest(columns: Mapping[str, Any]) -> str:
    """Return 64 hex digits that identify a row's content; the order of its columns does not matter.

    Raises:
        UserError: a value has a type without a stable form.
    """
    try:
        text = json.dumps(_canonical_value(columns), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or too deep nesting
        raise UserError(f"a row holds a value that cannot be stored: {error}") from None
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def seeded(seed: int, text: str) -> str:
    """Return 64 hex digits of a hash of seed and text, by which rows are put in a random but reproducible order."""
    return hashlib.sha256(f"{seed}:{text}".encode()).hexdigest()


def fraction_of(digits: str) -> float:
    """Return a hash, given as hex digits, as a number from 0 (included) to 1 (excluded)."""
    return int(digits[:13], 16) / 16**13


def combined_hash(parts: Iterable[str]) -> str:
    """Return one hash of several texts, as 64 hex digits."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode() + b"\n")
    return total.hexdigest()


def _canonical_value(value: Any) -> Any:
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (dict, Mapping)):
        return {str(key): _canonical_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical_value(item) for item in value]
    return _canonical_other(value)


def _canonical_other(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return {"bytes": hashlib.sha256(value).hexdigest()}
    if isinstance(value, date | time | timedelta | Decimal | UUID):
        return {type(value).__name__: str(value)}
    if hasattr(value, "tobytes") and hasattr(value, "size"):  # arrays and images
        shape = getattr(value, "shape", value.size)
        return {"array": [str(shape), hashlib.sha256(value.tobytes()).hexdigest()]}
    if isinstance(value, set | frozenset):
        return {"set": sorted(json.dumps(_canonical_value(item), sort_keys=True) for item in value)}
    raise UserError(
        f"a row holds a {type(value).__name__}, which cannot be stored; give text, numbers, lists or mappings"
    )


# ------------------------------------------------------------------------------------- Readable form of a row

LONGEST = 1 << 16
"""Maximum number of characters of a text in the readable form of a row."""


def readable_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's values as JSON values for display: cut long texts, and describe values that JSON lacks."""
    with suppress(TypeError):
        text = write_message(columns)
        # Nearly all rows are short and consist of JSON values. Values that JSON lacks, such as NaN, become null.
        if len(text) <= LONGEST and b"null" not in text:
            return dict(columns)
    return {str(name): _readable_value(value) for name, value in columns.items()}


def _readable_value(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= LONGEST else f"{value[:LONGEST]}… ({len(value)} characters)"
    if value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    # Test the concrete types first: rows may have thousands of values, and tests of abstract classes are slow.
    if isinstance(value, (dict, Mapping)):
        return {str(key): _readable_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_readable_value(item) for item in value]
    if isinstance(value, bytes | bytearray):
        return f"({len(value)} bytes)"
    return _readable_value(str(value)) if isinstance(value, _SHOWN) else f"({type(value).__name__})"


_SHOWN = (float, date, time, timedelta, Decimal, UUID, set, frozenset)

# ---------------------------------------------------------------------------------------------------------- Rows


@dataclass(frozen=True)
class Row:
    """One row of the dataset.

    Attributes:
        key: its identifier, the same in every run.
        columns: its values by name, the derived ones included; must not be changed.
        index: its position in the source, from 0.
        digest: hash of its content in the source (64 hex digits).
    """

    key: str
    columns: Mapping[str, Any]
    index: int
    digest: str


class Rows:
    """Rows in the order in which they are used; every iteration starts at the first row.

    Attributes:
        length: number of rows, or None if it is unknown or infinite.
        fingerprint: hash of keys and contents, for the run's record.
        fallback: True if the spec's fallback replaces the dataset.
    """

    def __init__(
        self, make: Callable[[], Iterator[Row]], *, length: int | None, fingerprint: str, fallback: bool = False
    ) -> None:
        self._make, self.length, self.fingerprint, self.fallback = make, length, fingerprint, fallback

    @classmethod
    def from_sequence(cls, rows: Sequence[Row], *, fingerprint: str, fallback: bool = False) -> Rows:
        """Return `Rows` of a complete sequence."""
        return cls(lambda: iter(rows), length=len(rows), fingerprint=fingerprint, fallback=fallback)

    def __iter__(self) -> Iterator[Row]:
        return self._make()

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("these rows may be without end; look at `length`")
        return self.length

    def __bool__(self) -> bool:
        return self.length != 0

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            if self.length is not None:
                return [*self][index]
            if index.stop is None or min(index.start or 0, index.stop, index.step or 1) < 0:
                raise UserError("these rows may be endless: give the number of rows, such as rows[:100]")
            return list(islice(self, index.start, index.stop, index.step))
        if index < 0:
            index += len(self)
        for row in islice(self, index, index + 1) if index >= 0 else ():
            return row
        raise IndexError("there are fewer rows")


# -------------------------------------------------------------------------------------- From raw records to rows


PATIENCE = 2.0
"""Seconds between progress reports while rows are read."""
LOOKED_AFTER = 10_000
"""Number of rows after which the clock is checked."""


def derive(spec: Spec, raw: Iterable[Mapping[str, Any]], notify: Callable[[str], None] | None = None) -> Iterator[Row]:
    """Yield the rows that pass the filter, each with its derived columns and its key.

    Args:
        spec: the spec.
        raw: the records of the source.
        notify: called with the number of rows read so far, if reading takes long.

    Raises:
        SpecError: a column or the filter does not work for a row; the error has the template's location.
        UserError: the key column is missing, empty or not unique.
    """
    key_counts: Counter[str] = Counter()
    notified_at = clock.monotonic()
    for index, source in enumerate(raw):
        if notify is not None and index and index % LOOKED_AFTER == 0 and clock.monotonic() - notified_at >= PATIENCE:
            notified_at = clock.monotonic()
            notify(f"read {index:,} rows so far")
        content = digest(source)
        columns, row = dict(source), str(index + 1)
        node_path: NodePath = ()
        try:
            for name, template in spec.dataset.columns.items():
                node_path = ("dataset", "columns", name)
                columns[name] = render(template, columns, location=".".join(node_path), key=row)
            node_path = ("dataset", "filter")
            is_included = spec.dataset.filter is None or evaluate(
                spec.dataset.filter, columns, location=".".join(node_path), key=row
            )
        except TemplateError as error:
            raise SpecError([spec.template_problem(node_path, error)]) from None
        if not is_included:
            continue
        if spec.dataset.key is None:
            key_counts[content] += 1
            key = content[:16] if key_counts[content] == 1 else f"{content[:16]}-{key_counts[content]}"
        else:
            key = _named_key(spec.dataset.key, columns, index, key_counts)
        yield Row(key, FrozenDict(columns), index, content)


def _named_key(name: str, columns: Mapping[str, Any], index: int, key_counts: Counter[str]) -> str:
    if name not in columns:
        raise UserError(f"dataset.key: row {index + 1} has no column `{name}`{did_you_mean(name, columns)}")
    if columns[name] is None or columns[name] == "":
        raise UserError(f"dataset.key: column `{name}` of row {index + 1} is empty")
    key = str(columns[name])
    if key != replace_surrogates(key):
        raise UserError(f"dataset.key: column `{name}` of row {index + 1} contains an unpaired surrogate: {key!r}")
    key_counts[key] += 1
    if key_counts[key] > 1:
        raise UserError(f"dataset.key: `{key}` of row {index + 1} occurs twice; a key names one row")
    return key
