"""Sizes such as ``2GiB`` and durations such as ``1h30m``, read into bytes and seconds."""

from __future__ import annotations

import re

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "ki": 2**10, "kib": 2**10, "mi": 2**20, "mib": 2**20, "gi": 2**30, "gib": 2**30,
    "ti": 2**40, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


def parse_size(text: str) -> int:
    """Bytes of ``512``, ``2GiB`` (powers of 1024) or ``2GB`` (powers of 1000)."""
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write bytes, or 512MiB, 2GiB, 2GB")
    return int(float(match[1]) * factor)


def parse_duration(text: str) -> float:
    """Seconds of ``90s``, ``15m``, ``1h30m`` or ``2d``."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not match[0]:
        raise ValueError(f"{text!r} is not a duration; write seconds, or 90s, 15m, 1h30m, 2d")
    parts = zip(match.groups(), _SECONDS.values(), strict=True)
    return sum(float(number) * seconds for number, seconds in parts if number)
