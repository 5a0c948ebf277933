"""Data of a run's page, and of its entry in a list of runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hermes_rl.analysis.findings import Scoring, findings_of, to_read_first
from hermes_rl.analysis.record import RolloutSummary, RunRecord
from hermes_rl.analysis.rollout_view import PREVIEW, Screen, shown_summary
from hermes_rl.analysis.settings import scoring_of, success_in, weights_of
from hermes_rl.analysis.statistics import headline, numbers
from hermes_rl.errors import UserError
from hermes_rl.runs.directory import read_description
from hermes_rl.runs.label import RunLabel
from hermes_rl.runs.provenance import seconds_of
from hermes_rl.values import is_number

SHOWN_KEYS = (
    "fingerprint", "hermes_rl", "python", "started", "demo", "seed", "policy", "tokenizer", "dataset", "images",
    "failed", "quarantined", "retried", "failure_rates",
)  # fmt: skip
"""Keys of `run.json` that a page shows."""
HISTORY = 30
"""Earlier runs of the same spec that are shown."""
LONGEST, ROOM = 100_000, 3_000_000
"""Limits: characters of one text, such as the spec's, and bytes of everything together."""


def card(record: RunRecord, name: str, counting: Sequence[RolloutSummary] | None = None) -> dict[str, Any]:
    """Return the entry of a run in a list of runs, for the part that was read; its links call it `name`."""
    run_info = record.run_info
    counting = list(record.counting()) if counting is None else counting
    entry: dict[str, Any] = Screen(LONGEST, ROOM).value(
        {
            "run": name,
            "path": str(record.path),
            "spec": run_info.get("name") or record.path.parent.name,
            "mode": run_info.get("mode"),
            "label": asdict(RunLabel.read(record.path)),
            "fingerprint": run_info.get("fingerprint"),
            "running": running(record.path),
            "read": record.share_read,
            "torn": record.torn,
            **_run_times(record.path, run_info),
            **headline(counting, record.rollouts, record.usage, success_in(record)),
        }
    )
    return entry


def overview(record: RunRecord, name: str, others: Iterable[tuple[str, Path]] = ()) -> dict[str, Any]:
    """Return the content of a run's page, without its rollouts.

    Args:
        record: the loaded run.
        name: its name in links.
        others: names and directories of other runs, among which earlier ones of this spec are found.
    """
    run_info = record.run_info
    try:
        spec = record.spec_text
    except UserError as error:
        spec = str(error)
    counting, scoring = list(record.counting()), Scoring.of(record)
    read_first = to_read_first(counting, scoring)
    labels = record.previews([rollout.row_key for rollout in read_first], PREVIEW)
    more = {
        "said": {key: run_info[key] for key in SHOWN_KEYS if key in run_info},
        "spec_text": spec,
        "success": scoring.success,
        "weights": weights_of(run_info),
        "clamp": scoring.clamp,
        "combine": scoring_of(run_info).get("combine") or "sum",
        "findings": [finding.record() for finding in findings_of(record, counting)],
        "read_first": [{**shown_summary(each, scoring), "label": labels[each.row_key]["label"]} for each in read_first],
        "history": earlier_runs(run_info, others),
        **numbers(counting, record.rollouts, scoring, record.categories),
    }
    return {**card(record, name, counting), **Screen(LONGEST, ROOM).value(more)}


def earlier_runs(run_info: Mapping[str, Any], others: Iterable[tuple[str, Path]]) -> list[dict[str, Any]]:
    """Return the earlier runs of the same spec, mode and rows, the first one first, with their mean scores.

    The means are read from `run.json`, into which each run wrote its mean when it ended. A mean over other rows means
    something else.
    """
    earlier = []
    for name, path in others:
        try:
            other = read_description(path / "run.json")
        except (OSError, UserError):
            continue
        is_comparable = all(other.get(key) == run_info.get(key) for key in ("name", "mode", "demo", "dataset"))
        before = str(other.get("started") or "") < str(run_info.get("started") or "")
        score = other.get("score")
        if is_comparable and before and isinstance(score, dict) and is_number(score.get("mean")):
            label = RunLabel.read(path).name or path.name
            means = {key: score.get(key) if is_number(score.get(key)) else None for key in ("mean", "low", "high")}
            earlier.append({"run": name, "label": label, "started": other["started"], **means})
    return sorted(earlier, key=lambda run: str(run["started"]))[-HISTORY:]


def running(path: Path) -> bool:
    """Return True if a process has the run open, by the system's table of locks; it is only read."""
    try:
        lock = (path / ".lock").stat().st_ino
        with open("/proc/locks", encoding="ascii") as locks:  # noqa: PTH123 - no file of the run
            return any(line.split()[-3].rpartition(":")[2] == str(lock) for line in locks if "FLOCK" in line)
    except OSError:
        return False


def _run_times(path: Path, run_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the time of the first start, and the seconds of all starts; the last lasts until now if the run is in
    progress.

    All of it comes from the record: file times of a copied run are the times of the copy.
    """
    started, ended = seconds_of(run_info.get("started")), seconds_of(run_info.get("ended"))
    if ended is None and started is not None and running(path):
        ended = time.time()
    last = seconds_of(run_info.get("resumed")) or started
    seconds = max(ended - last, 0.0) + run_info.get("seconds_before", 0.0) if last is not None and ended else None
    return {"started": started, "seconds": seconds}
