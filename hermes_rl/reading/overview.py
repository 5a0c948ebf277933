"""A run as a page shows it: what a list of runs says of it, and its own page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.reading.record import RolloutSummary, RunRecord
from hermes_rl.reading.shown import Screen
from hermes_rl.reading.statistics import headline, numbers
from hermes_rl.runs.store import ROLLOUTS

SAID = (
    "fingerprint", "hermes_rl", "python", "started", "demo", "seed", "policy", "tokenizer", "dataset", "images",
    "failed", "quarantined", "retried", "lost",
)  # fmt: skip
"""What of `run.json` a page shows."""
LONGEST, ROOM = 100_000, 3_000_000
"""Characters of one text, such as the spec's, and bytes of everything together."""


def card(record: RunRecord, name: str, counting: Sequence[RolloutSummary] | None = None) -> dict[str, Any]:
    """Return what a list of runs says of one.

    Args:
        record: of the run, as far as it was read.
        name: by which its links name it.
        counting: its rollouts that count, where they are known.
    """
    described = record.described
    counting = list(record.counting()) if counting is None else counting
    found: dict[str, Any] = Screen(LONGEST, ROOM).value(
        {
            "run": name,
            "path": str(record.path),
            "spec": described.get("name") or record.path.parent.name,
            "mode": described.get("mode"),
            "fingerprint": described.get("fingerprint"),
            "running": running(record.path),
            "read": record.share_read,
            "torn": record.torn,
            **_times(record.path, described),
            **headline(counting, len(record.rollouts)),
        }
    )
    return found


def overview(record: RunRecord, name: str) -> dict[str, Any]:
    """Return what the page of a run shows beside its rollouts."""
    described = record.described
    try:
        spec = record.spec_text
    except UserError as error:
        spec = str(error)
    counting = list(record.counting())
    more = {
        "said": {key: described[key] for key in SAID if key in described},
        "spec_text": spec,
        **numbers(counting, record.rollouts),
    }
    return {**card(record, name, counting), **Screen(LONGEST, ROOM).value(more)}


def running(path: Path) -> bool:
    """Whether a process has the run open, as the system's table of locks says; it is only read."""
    try:
        lock = (path / ".lock").stat().st_ino
        with open("/proc/locks", encoding="ascii") as locks:  # noqa: PTH123 - no file of the run
            return any(line.split()[-3].rpartition(":")[2] == str(lock) for line in locks if "FLOCK" in line)
    except OSError:
        return False


def _times(path: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """Return when the run was last started, when it last wrote a rollout, and the seconds between."""
    started, written = None, None
    with suppress(ValueError, TypeError, KeyError):
        started = datetime.fromisoformat(described["started"]).timestamp()
    with suppress(OSError):
        written = os.stat(path / ROLLOUTS).st_mtime  # noqa: PTH116 - the same for both
    seconds = max(written - started, 0.0) if started is not None and written is not None else None
    return {"started": started, "written": written, "seconds": seconds}
