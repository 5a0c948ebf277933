"""`report.html`: a run in one file, which needs no network, no server and no other file.

It is the page of `hermes-rl view` with its data inside: the numbers of the full run, and a sample of its rollouts. The
page may load nothing and run only its own script, whose hash is in its policy; the data are JSON that cannot open a
tag.
"""

from __future__ import annotations

import hashlib
import json
import logging
from base64 import b64encode
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from hermes_rl.analysis.findings import Scoring, findings_of
from hermes_rl.analysis.overview import overview
from hermes_rl.analysis.record import RolloutSummary, RunRecord
from hermes_rl.analysis.rollout_view import Screen, shown_previews, shown_rollout
from hermes_rl.analysis.rows import rows_page
from hermes_rl.analysis.statistics import Interval
from hermes_rl.analysis.tokens import prompt_text, shown_tokens, tokenizer_of
from hermes_rl.errors import UserError
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.journal import write_atomically

logger = logging.getLogger(__name__)

NAME = "report.html"
MAX_ROLLOUTS = 250_000
"""Maximum number of rollouts in a report; an index takes about 1 kB for each."""
SAMPLED = 60
"""Rollouts with full content in a report."""
LISTED, ROWS = 1_000, 300
"""Rollouts, and rows, that are listed in a report."""
OF_EACH = 8
"""Number of failed, best and worst rollouts among them, each."""
LONGEST, OF_ROLLOUT, ROOM = 20_000, 400_000, 12_000_000
"""Limits: characters of one text, bytes of a rollout, and bytes of all rollouts together."""
TOKENS, WITH_TOKENS = 4_000, 8
"""Tokens that are shown of a sequence, and rollouts of which tokens are shown."""
POLICY = (
    "default-src 'none'; {}; img-src data:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
)


def write_report(path: Path, say: Callable[[str], None] = lambda _: None) -> Path:
    """Write the report of a run directory and return its path; raises UserError or RunError.

    `say` is called with the rollouts that cannot be read, which are omitted.
    """
    return _write_report(_load_record(path), say)


def _load_record(path: Path) -> RunRecord:
    record = RunRecord(path)
    record.refresh(MAX_ROLLOUTS)
    return record


def _write_report(record: RunRecord, say: Callable[[str], None]) -> Path:
    path = record.path / NAME
    write_atomically(path, report(record).encode("utf-8", "backslashreplace"))
    if record.excluded:
        say(record.excluded)
    return path


def write_report_or_say(path: Path, say: Callable[[str], None]) -> None:
    """Write the report of a finished run, and its findings into run.json; a failure is reported and does not fail the
    run.
    """
    try:
        record = _load_record(path)
        findings = [finding.record() for finding in findings_of(record)]
        RunDirectory(path).add({"score": asdict(Interval.from_rollouts(record.counting())), "findings": findings})
        _write_report(record, say)
    except Exception as error:  # an error of the page must not affect the finished run
        logger.debug("the report was not written", exc_info=error)
        say(f"{NAME} was not written ({type(error).__name__}: {error}); `hermes-rl report {path}` tries again")


def report(record: RunRecord) -> str:
    """Return the page of a loaded run."""
    chosen = sample(list(record.counting(every_seat=True)))
    tokenizer, reason = None, ""
    room = ROOM
    details: dict[str, Any] = {}
    for rollout in chosen:
        screen = Screen(LONGEST, min(OF_ROLLOUT, room))
        room -= screen.room
        try:
            view = shown_rollout(record, rollout.id, screen)
        except UserError as error:
            record.exclude(rollout.id, error)
            continue
        if view.get("sequences") and len(details) < WITH_TOKENS:
            line = record.line(rollout.id)
            if tokenizer is None and not reason:
                tokenizer, reason = tokenizer_of(record.run_info)
            prompt = prompt_text(line, tokenizer)
            view["prompt_text"] = None if prompt is None else screen.text(prompt)
            start = view["sequences"][0]["start"]
            view["tokens"] = [{**shown_tokens(line, 0, start, TOKENS, tokenizer), "why": reason}]
        room += screen.room
        details[rollout.id] = view
    path = record.path.resolve()
    siblings = [(other.parent.name, other.parent) for other in path.parent.glob("*/run.json") if other.parent != path]
    page_data = overview(record, path.name, siblings) | {"running": False, "excluded": record.excluded}
    if len(details) < len(record.rollouts):
        page_data["sampled"] = (
            f"This file has the conversations of {len(details)} of the run's rollouts: failures, the best and the "
            f"worst, one of each stop reason, and others. All of them: hermes-rl view {page_data['path']}"
        )
    listed_rollouts = [rollout for rollout in record.rollouts if rollout.id not in record.unreadable]
    ids = {rollout.id for rollout in chosen}
    if len(listed_rollouts) > LISTED:
        listed_rollouts = [
            rollout
            for rollout in listed_rollouts
            if rollout.id in ids or record.line_number(rollout.id) <= LISTED - len(ids)
        ]
    return page(
        {
            "overview": page_data,
            "rollouts": Screen().value(shown_previews(record, listed_rollouts)),
            "categories": Screen().value(record.categories),
            "rows": rows_page(record, Scoring.of(record), size=ROWS),
            "details": details,
        }
    )


def sample(rollouts: Iterable[RolloutSummary], max_rollouts: int = SAMPLED) -> list[RolloutSummary]:
    """Return the rollouts that are worth a look: one of each stop reason, failures, the worst, the best, then
    others.
    """
    rollouts = list(rollouts)
    by_score = sorted((each for each in rollouts if each.score is not None), key=lambda rollout: rollout.score or 0.0)
    first_of_stop_reason = {rollout.stop_reason: rollout for rollout in reversed(rollouts)}.values()
    failures = [rollout for rollout in rollouts if rollout.given_up]
    worth = (*first_of_stop_reason, *failures[:OF_EACH], *by_score[:OF_EACH], *by_score[::-1][:OF_EACH])
    groups = {rollout.group for rollout in worth}
    # The other members of the selected groups allow comparisons; then others from all over the run.
    worth += tuple(rollout for rollout in rollouts if rollout.group in groups)
    worth += tuple(rollouts[:: max(len(rollouts) // max_rollouts, 1)])
    ids = set(list(dict.fromkeys(rollout.id for rollout in worth))[:max_rollouts])
    return [rollout for rollout in rollouts if rollout.id in ids]


def page(data: Any) -> str:
    """Return the complete file with its data."""
    html, style, script = asset("view.html"), asset("view.css"), asset("view.js")
    allowed = f"script-src 'sha256-{_script_hash(script)}'; style-src 'sha256-{_script_hash(style)}'"
    parts = {
        "<!--policy-->": f'<meta http-equiv="Content-Security-Policy" content="{POLICY.format(allowed)}">',
        '<link rel="stylesheet" href="view.css">': f"<style>{style}</style>",
        '<script type="module" src="view.js"></script>': (
            f'<script type="application/json" id="data">{embedded(data)}</script>\n'
            f'<script type="module">{script}</script>'
        ),
    }
    for marker, part in parts.items():
        before, marked, after = html.partition(marker)
        assert marked, f"view.html has no {marker}"
        html = before + part + after
    return html


def embedded(data: Any) -> str:
    """Return JSON to embed in a page: it cannot open or close a tag, a comment or a line of a script."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def asset(name: str) -> str:
    """Return a file of the page."""
    return (files("hermes_rl.analysis") / "pages" / name).read_text(encoding="utf-8")


def _script_hash(text: str) -> str:
    return b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
