"""Select rollouts of a run for a viewer, and their order.

Owns the filters, the order, and the search in texts, which reads lines of the file and is therefore done in parts.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Self

from hermes_rl.analysis.record import ROW_MARKS, RolloutSummary, RunRecord, bounded_line, marks_of
from hermes_rl.analysis.settings import success_in
from hermes_rl.service.refusals import wrong

REWARD = "reward:"
"""Prefix of an order by the value of a reward, before its name."""
_NAMES = ("row", "rewards")
_SEARCHED = ("id", "messages", "row_key", "row", "rewards", "error", "tool_calls", "tool_errors")
"""Fields that are searched for a text: neither tokens nor the schemas of tools, which are the same in each rollout."""
PATIENCE = 1.0
"""Seconds of reading records for a text, after which the results so far are returned."""
_ORDERS: dict[str, Callable[[RolloutSummary], float | None]] = {
    "score": lambda rollout: rollout.score,
    "turns": lambda rollout: rollout.turns,
    "tokens": lambda rollout: rollout.prompt_tokens + rollout.completion_tokens,
    "calls": lambda rollout: rollout.calls,
    "tool_errors": lambda rollout: rollout.call_errors,
    "seconds": lambda rollout: rollout.seconds.get("total"),
}
ORDERS = ("ended", *_ORDERS)


@dataclass(frozen=True)
class RolloutQuery:
    """A query; empty texts and None select everything.

    Attributes:
        row: key of a row.
        where: rows with a value of a column, as `column=value`.
        unsolved: only rollouts of rows without a pass.
        first_epoch, last_epoch: epochs, from 0.
        tool: name of a called tool.
        tool_errors: only rollouts in which a tool failed, or the named tool did.
        reward: reward to which `least` and `most` apply; without one they apply to the score.
        text: text in the conversation, in its row, rewards or error; ASCII case is ignored.
        sort: one of `ORDERS`, or `reward:<name>`.
        descending: the last, or the highest, first.
    """

    state: str = ""
    stop_reason: str = ""
    row: str = ""
    where: str = ""
    unsolved: bool = False
    first_epoch: float | None = None
    last_epoch: float | None = None
    group: str = ""
    tool: str = ""
    tool_errors: bool = False
    reward: str = ""
    least: float | None = None
    most: float | None = None
    text: str = ""
    sort: str = "ended"
    descending: bool = False

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        """Read it from the parameters of an address.

        Raises `Refused` if one of them is unknown, or is an invalid number.
        """
        field_names = {field.name for field in fields(cls)}
        if unknown := sorted(set(parameters) - field_names):
            raise wrong("filter", unknown[0], f"rollouts are filtered by {', '.join(sorted(field_names))}")
        values: dict[str, Any] = {name: value for name, value in parameters.items() if value}
        for name in ("least", "most", "first_epoch", "last_epoch"):
            if name in values:
                values[name] = _parse_number(name, values[name])
        for name in ("tool_errors", "descending", "unsolved"):
            if name in values:
                values[name] = values[name] in ("1", "true", "on")
        sort = values.get("sort", "ended")
        if sort not in ORDERS and not sort.startswith(REWARD):
            raise wrong("filter", "sort", f"rollouts are sorted by {', '.join(ORDERS)}, {REWARD}<name>")
        return cls(**values)

    def chosen(self, record: RunRecord, record_count: int | None = None) -> array[int]:
        """Return the positions of the matching rollouts, in the requested order; texts are not searched.

        Rollouts without the number that is sorted by come last in both directions.

        Args:
            record: the loaded run.
            record_count: number of records to select from; None: all.
        """
        rollouts, rows = record.rollouts[:record_count], self._matching_rows(record)
        fits = (position for position, rollout in enumerate(rollouts) if self._is_selected(rollout, rows))
        positions = array("l", fits)
        if self.sort == "ended":
            return positions[::-1] if self.descending else positions
        name, sign = self.sort.removeprefix(REWARD), -1 if self.descending else 1
        value_of = _ORDERS[name] if name == self.sort else lambda rollout: rollout.rewards.get(name)

        def order(index: int) -> tuple[bool, float]:
            value = value_of(rollouts[index])
            return value is None, 0.0 if value is None else sign * value

        return array("l", sorted(positions, key=order))

    def _matching_rows(self, record: RunRecord) -> Set[str] | None:
        """Return the keys of the rows whose rollouts are selected, or None for all."""
        rows: set[str] | None = None
        if self.where:
            column, _, value = self.where.partition("=")
            rows = {key for key, columns in record.categories.items() if columns.get(column) == value}
        if self.unsolved:
            success = success_in(record)
            solved = {rollout.row_key for rollout in record.rollouts if rollout.passes(success)}
            keys = {rollout.row_key for rollout in record.rollouts} - solved
            rows = keys if rows is None else rows & keys
        return rows

    def _is_selected(self, rollout: RolloutSummary, rows: Set[str] | None) -> bool:
        epochs = self.first_epoch or 0.0, math.inf if self.last_epoch is None else self.last_epoch
        if (rows is not None and rollout.row_key not in rows) or not epochs[0] <= rollout.epoch <= epochs[1]:
            return False
        conditions = (
            (self.state, rollout.state),
            (self.stop_reason, rollout.stop_reason),
            (self.row, rollout.row_key),
            (self.group, rollout.group),
        )
        if any(expected and expected != actual for expected, actual in conditions):
            return False
        if self.tool or self.tool_errors:
            uses = [use for use in rollout.tools if not self.tool or use[0] == self.tool]
            if not uses or (self.tool_errors and not any(errors for _, _, errors in uses)):
                return False
        value = rollout.rewards.get(self.reward) if self.reward else rollout.score
        if value is None:
            return not self.reward and self.least is None and self.most is None
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def page(self, record: RunRecord, positions: Sequence[int], start: int, size: int) -> tuple[list[int], int]:
        """Return the next matching positions, text included, and where to continue among `positions`.

        There may be fewer than `size`, or none, and more to come: reading for a text ends after `PATIENCE` seconds.
        """
        if not self.text:
            page_places = list(positions[start : start + size])
            return page_places, start + len(page_places)
        spellings, page_places, index = _json_spellings(self.text), [], start
        until = time.monotonic() + PATIENCE
        with record.open() as file:
            while index < len(positions) and len(page_places) < size and (index == start or time.monotonic() < until):
                file.seek(record.rollouts[positions[index]].begin)
                line = bounded_line(file)
                # Most records are decided by their bytes, much faster than by parsing them; tokens are base64, and the
                # schemas of tools are the same in each rollout.
                end, row = line.rfind(marks_of(line)[2]), max(map(line.rfind, ROW_MARKS))
                text = line[: end if end > 0 else None].lower() + (line[row:].lower() if row > end > 0 else b"")
                if any(word in text for word in spellings) and _record_has_text(line, self.text.lower()):
                    page_places.append(positions[index])
                index += 1
        return page_places, index


def _json_spellings(text: str) -> set[bytes]:
    """Return the possible spellings of a text in a record: characters outside ASCII raw or escaped, once or twice.

    The arguments of a call are JSON in a text of the record, and so are escaped twice.
    """
    once = {json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)}
    twice = {json.dumps(spelling, ensure_ascii=ascii_only)[1:-1] for spelling in once for ascii_only in (True, False)}
    return {spelling.encode("utf-8", "replace").lower() for spelling in once | twice}


def _record_has_text(line: bytes, text: str) -> bool:
    """Return True if a text in lower case occurs in a rollout's record, in any JSON spelling."""
    try:
        rollout = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return any(text in value.lower() for key in _SEARCHED for value in _texts_in(rollout.get(key), names=key in _NAMES))


def _texts_in(value: object, *, names: bool) -> Iterator[str]:
    """Yield the texts in a value; `names`: with the keys of mappings, which are the user's or the model's."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item, names=names)
    elif isinstance(value, dict):
        if names:
            yield from value
        for key, item in value.items():
            with suppress(ValueError, RecursionError):
                item = json.loads(item) if key == "arguments" and isinstance(item, str) else item
            yield from _texts_in(item, names=names or key == "arguments")


def _parse_number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise wrong("filter", name, f"{text!r} is not a number")
    return value
