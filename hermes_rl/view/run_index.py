"""Index of the runs in a viewer: found below directories, read in parts, and bounded in memory.

An index takes about 1 kB per rollout. The indexes of the runs that were viewed last stay in memory, up to
`MOST_INDEXED` rollouts together; of other runs only the entries of the list stay. Everything here blocks, and is
thread-safe.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_rl.analysis.compare import compare_runs, rows_compared
from hermes_rl.analysis.findings import Scoring
from hermes_rl.analysis.overview import card, overview, running
from hermes_rl.analysis.record import RunRecord, find_runs
from hermes_rl.analysis.rollout_view import Screen, shown_previews, shown_rollout
from hermes_rl.analysis.rows import rows_page
from hermes_rl.analysis.settings import success_in
from hermes_rl.analysis.tokens import prompt_text, shown_tokens, tokenizer_of
from hermes_rl.errors import UserError
from hermes_rl.runs.label import FILE as LABEL_FILE
from hermes_rl.runs.label import RunLabel
from hermes_rl.runs.store import ROLLOUTS, Line
from hermes_rl.service.refusals import wrong
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.view.query import RolloutQuery

PAGE = 50
"""Rollouts of a page."""
SLICE = 2_000
"""Lines that are read between two checks of the clock."""
READING = 0.25
"""Seconds for which a request reads new records of a run, or the time that its numbers took; the next one continues."""
MOST_INDEXED = 250_000
"""Maximum rollouts, of all runs together, whose index stays in memory, besides the index of the viewed run."""
MOST_LISTED = 500
"""Maximum runs of a list."""
RESCAN = 5.0
"""Seconds after which directories are searched again for new runs."""
CHANGED = 250
"""Rows at either end of a comparison that are shown."""
LABEL = 80
"""Characters of a row's label."""
ORDERED = 8
"""Query results that stay in memory for their next pages: 8 bytes for each matching rollout."""
NUMBERS_AGAIN = 10
"""The numbers of a growing run are computed again after this many times their last computing time."""


@dataclass
class OpenRun:
    """A run that is being viewed."""

    name: str
    path: Path
    lock: threading.Lock = field(default_factory=threading.Lock)
    record: RunRecord | None = None
    cached_card: tuple[tuple[int, ...], dict[str, Any]] | None = None
    """Entry of the list, and the state of the files from which it was made."""
    overview: tuple[str, float, float, dict[str, Any]] | None = None
    """The page: its version, when it was made, how long that took, and its content."""
    ordered: OrderedDict[tuple[int, int, RolloutQuery], array[int]] = field(default_factory=OrderedDict)
    tokenizer: tuple[Tokenizer | None, str] | None = None

    def read(self) -> RunRecord:
        """Return the index, with the new records that could be read in time."""
        if self.record is None:
            self.record = RunRecord(self.path)
        until = time.monotonic() + max(READING, self.overview[2] if self.overview is not None else 0.0)
        while self.record.refresh(SLICE) == SLICE and time.monotonic() < until:
            pass
        return self.record

    def state(self) -> tuple[int, ...]:
        """Return values that change whenever the files of the run do."""
        parts = []
        for name in ("run.json", LABEL_FILE, ROLLOUTS):
            try:
                stat = (self.path / name).stat()
                parts += [stat.st_ino, stat.st_size, stat.st_mtime_ns]
            except OSError:
                parts += [0, 0, 0]
        return (*parts, running(self.path))

    @property
    def indexed(self) -> int:
        """Rollouts in the index."""
        return len(self.record.rollouts) if self.record is not None else 0


class RunIndex:
    """Runs in some directories.

    Args:
        folders: run directories, or directories with runs below them.

    Raises:
        UserError: one of them holds no run.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, OpenRun] = OrderedDict()
        """Open runs; the one that was viewed last comes last."""
        self._scanned = -RESCAN
        for folder in self._folders:
            if next(find_runs(folder), None) is None:
                raise UserError(f"{folder} holds no run: name a run directory, or a folder with runs below it")
        self._scan()

    def _scan(self) -> list[str]:
        """Return the names of the existing runs, the latest first."""
        with self._lock:
            if time.monotonic() - self._scanned >= RESCAN or not self._runs:
                paths = list(dict.fromkeys(path for folder in self._folders for path in find_runs(folder)))
                self._order = [_run_link_name(path) for path in paths]
                paths_by_name = dict(zip(self._order, paths, strict=True))
                for name, path in paths_by_name.items():
                    self._runs.setdefault(name, OpenRun(name, path))
                for name in set(self._runs) - set(paths_by_name):
                    del self._runs[name]
                self._scanned = time.monotonic()
            return list(self._order)

    @contextmanager
    def _hold_run(self, name: str) -> Iterator[OpenRun]:
        """Hold a run, and drop the least recently used indexes if there are too many."""
        self._scan()
        with self._lock:
            run = self._runs.get(name)
            if run is None:
                raise UserError(f"there is no run {name!r} here")
            self._runs.move_to_end(name)
        with run.lock:
            yield run
        with self._lock:
            others = [other for other in self._runs.values() if other is not run]
            too_many = sum(other.indexed for other in others) - MOST_INDEXED
            for other in others:
                # An index that another request holds stays; that request checks the limit when it ends.
                if too_many > 0 and other.indexed and other.lock.acquire(blocking=False):
                    too_many -= other.indexed
                    other.record, other.overview, other.ordered = None, None, OrderedDict()
                    other.lock.release()

    # ------------------------------------------------------------------ requests

    def runs(self) -> dict[str, Any]:
        """Return the list of runs; unread runs follow later, as `reading` shows."""
        names = self._scan()
        until, cards, reading = time.monotonic() + READING, [], False
        for name in names[:MOST_LISTED]:
            try:
                with self._hold_run(name) as run:
                    cards.append(self._run_card(run, read=time.monotonic() < until))
            except UserError as error:
                cards.append({"run": name, "error": str(error), "read": 1.0})
            reading = reading or cards[-1]["read"] < 1
        return {"runs": cards, "reading": reading, "more": max(len(names) - MOST_LISTED, 0)}

    def _run_card(self, run: OpenRun, *, read: bool) -> dict[str, Any]:
        state = run.state()
        if run.cached_card is not None and run.cached_card[0] == state:
            return run.cached_card[1]
        if not read:
            last_card = run.cached_card[1] if run.cached_card is not None else {"run": run.name, "path": str(run.path)}
            return {**last_card, "read": 0.0}
        card_now = card(run.read(), run.name)
        if card_now["read"] >= 1:
            run.cached_card = state, card_now
        return card_now

    def overview(self, name: str) -> tuple[str, dict[str, Any]]:
        """Return the page of a run, and its version."""
        with self._hold_run(name) as run:
            before = run.state()
            record = run.read()
            version = _state_version(record, before)
            if run.overview is not None and run.overview[0] != version:
                _, created_at, took, page = run.overview
                if page["read"] >= 1 and time.monotonic() - created_at < NUMBERS_AGAIN * took:
                    return run.overview[0], page
            if run.overview is None or run.overview[0] != version:
                started_at = time.monotonic()
                overview_now = {**overview(record, name, self._other_runs(name)), "generation": record.generation}
                run.overview = version, time.monotonic(), time.monotonic() - started_at, overview_now
            return version, run.overview[3]

    def _other_runs(self, name: str) -> list[tuple[str, Path]]:
        """Return the names and directories of the other runs."""
        with self._lock:
            return [(other.name, other.path) for other in self._runs.values() if other.name != name]

    def compare(self, a: str, b: str) -> dict[str, Any]:
        """Return the differences of run `b` from run `a`, for which both are read to their ends.

        Raises `UserError` if one of them does not exist, or nothing can be compared.
        """
        with ExitStack() as stack:
            # In one order, so that no two comparisons wait for each other.
            runs = {name: stack.enter_context(self._hold_run(name)) for name in sorted({a, b})}
            first, second = records = [runs[name].read() for name in (a, b)]
            for record in records:
                record.refresh()
            comparison = {**compare_runs(first, second).record(), "run_a": a, "run_b": b}
            differences = comparison["found"]
            rows = rows_compared(first, second, differences["success"])
            counts = {kind: len(differences.pop(kind)) for kind in ("fixed", "broken")}
            shown_rows = [*rows[:CHANGED], *rows[CHANGED:][-CHANGED:]]
            labels = second.previews([row["row_key"] for row in shown_rows], LABEL)
            labelled_rows = [{**row, "label": labels[row["row_key"]]["label"]} for row in shown_rows]
            names = {side: RunLabel.read(record.path).name for side, record in zip("ab", records, strict=True)}
        view: dict[str, Any] = Screen().value(
            {**comparison, **counts, "rows": labelled_rows, "graded": len(rows), "names": names}
        )
        return view

    def rows(self, name: str, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Return a page of the rows of a run.

        Raises `UserError` if the run does not exist, `Refused` for an invalid query.
        """
        parameters = dict(parameters)
        start = parameters.pop("start", "")
        if start and not (start.isascii() and start.isdigit() and len(start) < 10):
            raise wrong("filter", "start", "it is not a number")
        if unknown := sorted(set(parameters) - {"where", "unsolved", "sort"}):
            raise wrong("filter", unknown[0], "rows are filtered by where and unsolved, and sorted by sort")
        with self._hold_run(name) as run:
            record = run.record if run.record is not None else run.read()
            return rows_page(
                record,
                Scoring.of(record),
                column_filter=parameters.get("where", ""),
                unsolved=bool(parameters.get("unsolved")),
                sort=parameters.get("sort") or "solved",
                start=int(start or 0),
            )

    def rollouts(self, name: str, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Return a page of the matching rollouts.

        Raises `UserError` if the run does not exist, `Refused` for an invalid query.
        """
        parameters = dict(parameters)
        cursor = parameters.pop("cursor", "")
        query = RolloutQuery.from_parameters(parameters)
        with self._hold_run(name) as run:
            record = run.read() if run.indexed == 0 or run.record is None else run.record
            if record.share_read == 1:
                record.refresh(SLICE)  # requests for its numbers read the rest of a partly read run
            generation, total, start = _parse_cursor(cursor) or (record.generation, len(record.rollouts), 0)
            if generation != record.generation or total > len(record.rollouts):
                total, start = len(record.rollouts), 0  # the run was graded again
            positions = self._select_positions(run, record, query, total)
            rollouts_page, looked = query.page(record, positions, start, PAGE)
            more = f"{record.generation}-{total}-{looked}" if looked < len(positions) else None
            previews = Screen().value(shown_previews(record, [record.rollouts[position] for position in rollouts_page]))
        return {"rollouts": previews, "fit": len(positions), "looked": looked, "total": total, "cursor": more}

    def _select_positions(self, run: OpenRun, record: RunRecord, query: RolloutQuery, total: int) -> array[int]:
        key = record.generation, total, query
        if key not in run.ordered:
            run.ordered[key] = query.chosen(record, total)
        run.ordered.move_to_end(key)
        while len(run.ordered) > ORDERED:
            run.ordered.popitem(last=False)
        return run.ordered[key]

    def neighbour(self, name: str, rollout: str, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Return the rollout that comes after one in a list, and where to continue if none was found yet.

        If `rollout` is not in the list, that is its first. `parameters` has the filter and the order of the list, and
        `backwards` for the one before it, `failed` for the next one that did not pass, and `cursor`, where an earlier
        response ended. Raises `UserError` if the run, or the rollout, does not exist; `Refused` for an invalid query.
        """
        parameters = dict(parameters)
        backwards, failed, cursor = (parameters.pop(key, "") for key in ("backwards", "failed", "cursor"))
        if cursor and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 15):
            raise wrong("filter", "cursor", "expected a cursor from an earlier response")
        query = RolloutQuery.from_parameters(parameters)
        with self._hold_run(name) as run:
            record = self._index_with(run, rollout)
            positions = self._select_positions(run, record, query, len(record.rollouts))
            rollout_position = record.line_number(rollout) - 1 if record.has(rollout) else -1
            index = positions.index(rollout_position) if rollout_position in positions else None
            if backwards:
                positions = positions[:index][::-1] if index is not None else array("l")
            elif index is not None:
                positions = positions[index + 1 :]
            if failed:
                success = success_in(record)
                positions = array(
                    "l", (position for position in positions if record.rollouts[position].failed(success))
                )
            chosen, looked = query.page(record, positions, int(cursor or 0), 1)
            following = record.rollouts[chosen[0]].id if chosen else None
        more = str(looked) if following is None and looked < len(positions) else None
        return {"id": following, "cursor": more}

    def rollout(self, name: str, rollout: str) -> dict[str, Any]:
        """Return a rollout."""
        with self._hold_run(name) as run:
            record, screen = self._index_with(run, rollout), Screen()
            view = shown_rollout(record, rollout, screen)
            line = record.line(rollout)
            prompt = prompt_text(line, self._tokenizer(run, line))
            return {**view, "prompt_text": None if prompt is None else screen.text(prompt)}

    def tokens(self, name: str, rollout: str, sequence: int, start: int, max_tokens: int) -> dict[str, Any]:
        """Return tokens of a rollout."""
        with self._hold_run(name) as run:
            line = self._index_with(run, rollout).line(rollout)
            tokenizer = self._tokenizer(run, line)
            reason = run.tokenizer[1] if run.tokenizer is not None else ""
            return {**shown_tokens(line, sequence, max(start, 0), max_tokens, tokenizer), "why": reason}

    def line(self, name: str, rollout: str) -> tuple[Path, Line]:
        """Return the directory of a run, and the full record of a rollout."""
        with self._hold_run(name) as run:
            return run.path, self._index_with(run, rollout).line(rollout)

    def _index_with(self, run: OpenRun, rollout: str) -> RunRecord:
        """Return the index of a run, read at least up to this rollout."""
        record = run.read()
        while not record.has(rollout) and record.share_read < 1 and record.refresh(SLICE):
            pass
        return record

    def _tokenizer(self, run: OpenRun, line: Line) -> Tokenizer | None:
        if not line.get("sequences"):
            return None
        if run.tokenizer is None:
            assert run.record is not None
            run.tokenizer = tokenizer_of(run.record.run_info)
        return run.tokenizer[0]


def _run_link_name(path: Path) -> str:
    """Return the name of a run in links: the same in each viewer, and a different one for each directory."""
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:6]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', path.name)}-{digest}"


def _state_version(record: RunRecord, state: tuple[int, ...]) -> str:
    state_text = repr((record.generation, len(record.rollouts), record.torn, record.share_read >= 1, state))
    return f'"{hashlib.sha256(state_text.encode()).hexdigest()[:16]}"'


def _parse_cursor(text: str) -> tuple[int, int, int] | None:
    if not text:
        return None
    parts = text.split("-")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 15 for part in parts):
        raise wrong("filter", "cursor", "expected a cursor from an earlier response")
    return int(parts[0]), int(parts[1]), int(parts[2])
