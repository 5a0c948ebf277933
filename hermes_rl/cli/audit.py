"""`hermes-rl audit`: list rollouts that may have passed their tests in another way than by solving the task."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType

from hermes_rl.analysis.audit import CERTAIN, Suspect, audit, serialize_suspects
from hermes_rl.analysis.record import RunRecord
from hermes_rl.cli.echo import echo
from hermes_rl.cli.screen import BAD, DIM, HEAD, indented, safe, show
from hermes_rl.terminal_text import pluralize

MAX_REASONS = 8
"""Maximum number of reasons listed per rollout."""


def audit_run(run: Path, *, as_json: bool, limit: int, pager: bool) -> int:
    """List the suspicious rollouts of a run; return the exit status."""
    record = RunRecord(run)
    record.refresh()
    suspects = audit(record)
    if record.excluded:
        echo(record.excluded, err=True)
    looked_at = sum(1 for _ in record.counting(every_seat=True))
    if as_json:
        entries = serialize_suspects(record, suspects)
        echo(json.dumps({"rollouts": looked_at, "suspects": entries}, indent=2, ensure_ascii=False))
        return 0
    show(_parts(record, suspects, looked_at, limit), pager=pager)
    return 0


def _parts(record: RunRecord, suspects: Sequence[Suspect], looked_at: int, limit: int) -> Iterator[RenderableType]:
    passed = sum((suspect.rollout.score or 0.0) > 0 for suspect in suspects)
    yield safe(f"{pluralize(looked_at, 'rollout')}; {len(suspects)} to look at, of which {passed} score above 0")
    for suspect in suspects[: limit or None]:
        rollout = suspect.rollout
        score = "no score" if rollout.score is None else f"score {rollout.score:g}"
        yield safe(f"#{record.line_number(rollout.id)}  {score}  {rollout.id}", HEAD)
        for reason in suspect.reasons[:MAX_REASONS]:
            turn = "kept at the end" if reason.turn is None else f"turn {reason.turn}"
            location = "" if reason.file is None else f"  ({turn}, {reason.file}:{reason.line})"
            yield indented(safe(f"{reason.what}{location}", BAD if reason.weight == CERTAIN else ""))
        if len(suspect.reasons) > MAX_REASONS:
            yield indented(safe(f"… and {len(suspect.reasons) - MAX_REASONS} more (--json lists all)", DIM))
    if 0 < limit < len(suspects):
        yield safe(f"… and {len(suspects) - limit} more (--limit 0 lists all)", DIM)
    if suspects:
        line_number = record.line_number(suspects[0].rollout.id)
        yield safe(f"next: hermes-rl show {shlex.quote(str(record.path))} {line_number}", DIM)
