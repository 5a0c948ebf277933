"""Data of a run's page, and of its entry in a list of runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hermes_rl.analysis.record import RolloutSummary, RunRecord
from hermes_rl.analysis.rollout_view import PREVIEW, Screen
from hermes_rl.analysis.settings import success_in
from hermes_rl.analysis.statistics import headline, numbers
from hermes_rl.errors import UserError
from hermes_rl.runs.provenance import seconds_of

SAID = (
    "fingerprint", "hermes_rl", "python", "started", "demo", "seed", "policy", "tokenizer", "dataset", "images",
    "failed", "quarantined", "retried", "failure_rates",
)  # fmt: skip
"""Keys of `run.json` that a page shows."""
LONGEST, ROOM = 100_000, 3_000_000
"""Limits: characters of one text, such as the spec's, and bytes of everything together."""


def card(record: RunRecord, name: str, counting: Sequence[RolloutSummary] | None = None) -> dict[str, Any]:
    """Return the entry of a run in a list of runs, for the part that was read; its links call it `name`."""
    described = record.described
    counting = list(record.counting()) if counting is None else counting
    first = [rollout.row_key for rollout in record.rollouts[:1]]
    shown: dict[str, Any] = Screen(LONGEST, ROOM).value(
        {
            "run": name,
            "path": str(record.path),
            "spec": described.get("name") or record.path.parent.name,
            "mode": described.get("mode"),
            "fingerprint": described.get("fingerprint"),
            "running": running(record.path),
            "read": record.share_read,
            "torn": record.torn,
            "question": next((row["question"] for row in record.previews(first, PREVIEW).values()), ""),
            **_times(record.path, described),
            **headline(counting, record.rollouts, record.usage),
        }
    )
    return shown


def overview(record: RunRecord, name: str) -> dict[str, Any]:
    """Return the content of a run's page, without its rollouts."""
    described = record.described
    try:
        spec = record.spec_text
    except UserError as error:
        spec = str(error)
    counting = list(record.counting())
    figures = numbers(counting, record.rollouts)
    by_row = figures["by_row"]["rows"]
    previews = record.previews([row["row_key"] for row in by_row], PREVIEW)
    figures["by_row"]["rows"] = [{**row, **previews[row["row_key"]]} for row in by_row]
    more = {
        "said": {key: described[key] for key in SAID if key in described},
        "spec_text": spec,
        "success": success_in(record),
        **figures,
    }
    return {**card(record, name, counting), **Screen(LONGEST, ROOM).value(more)}


def running(path: Path) -> bool:
    """Return True if a process has the run open, by the system's table of locks; it is only read."""
    try:
        lock = (path / ".lock").stat().st_ino
        with open("/proc/locks", encoding="ascii") as locks:  # noqa: PTH123 - no file of the run
            return any(line.split()[-3].rpartition(":")[2] == str(lock) for line in locks if "FLOCK" in line)
    except OSError:
        return False


def _times(path: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the time of the first start, and the seconds of all starts; the last lasts until now if the run is in
    progress.

    All of it comes from the record: file times of a copied run are the times of the copy.
    """
    started, ended = seconds_of(described.get("started")), seconds_of(described.get("ended"))
    if ended is None and started is not None and running(path):
        ended = time.time()
    last = seconds_of(described.get("resumed")) or started
    seconds = max(ended - last, 0.0) + described.get("seconds_before", 0.0) if last is not None and ended else None
    return {"started": started, "seconds": seconds}
