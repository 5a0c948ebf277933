"""Hashes of rows that are the same in every process, on every machine: SHA-256 over canonical JSON."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from hermes_rl.errors import UserError


def digest(columns: Mapping[str, Any]) -> str:
    """64 hex digits of a row's content; the order of its columns does not matter.

    Raises:
        UserError: a value is of a kind that has no stable form.
    """
    text = json.dumps(_canonical(columns), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def seeded(seed: int, text: str) -> str:
    """64 hex digits that put rows in an order of chance, the same for the same seed."""
    return hashlib.sha256(f"{seed}:{text}".encode()).hexdigest()


def fraction_of(digits: str) -> float:
    """A hash as a number from 0 to 1 (1 excluded)."""
    return int(digits[:13], 16) / 16**13


def combined(parts: Iterable[str]) -> str:
    """One hash of many."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode() + b"\n")
    return total.hexdigest()


def _canonical(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
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
        return {"set": sorted(json.dumps(_canonical(item), sort_keys=True) for item in value)}
    raise UserError(
        f"a row holds a {type(value).__name__}, which cannot be kept; give text, numbers, lists or mappings"
    )
