"""`RunRecord`: a run directory for readers, during the run and afterwards.

Owns finding runs, and an index of `rollouts.jsonl`: of each record it reads the few hundred bytes before and after the
conversation, stores the fields for tables and statistics, and reads a full record when a reader opens that rollout.
Everything blocks; on an event loop it must run in a thread.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from pathlib import Path
from sys import intern
from typing import Any, BinaryIO

from hermes_rl.errors import UserError
from hermes_rl.others_files import open_file, read_text
from hermes_rl.rollouts.rollout import RolloutState, cost_of
from hermes_rl.runs.directory import read_description
from hermes_rl.runs.journal import LONGEST_LINE, is_torn
from hermes_rl.runs.record_check import COMPLETE_KEYS, current_record, problem_of
from hermes_rl.runs.store import ROLLOUTS, Line
from hermes_rl.servers.base import POLICY
from hermes_rl.servers.usage import Usage
from hermes_rl.terminal_text import pluralize
from hermes_rl.values import NESTED, read_own_json, too_deep

MARKS = (
    (b',"messages":[', b'],"turns":', b',"sequences":'),
    (b', "messages": [', b'], "turns": ', b', "sequences": '),
)
"""Markers in a record of `runs.store.rollout_record`: the start and the end of the conversation, and the start of the
tokens; other programs put blanks in between.
"""
MAX_UNREADABLE_NAMED = 5
"""Maximum number of unreadable rollouts listed by name."""
FINAL = frozenset(str(state) for state in RolloutState if state.final)
"""States after which a rollout is not run or scored any more."""
GIVEN_UP = frozenset(state for state in RolloutState if state.abandoned)
MAX_SEARCH_DEPTH = 4
"""Directory levels below the given one that are searched for runs."""
ANSWER_COLUMNS = {
    "answer",
    "expected",
    "target",
    "solution",
    "reference",
    "label",
    "gold",
    "ground_truth",
    "goal_state",
}
"""Columns of a row that usually hold the expected answer."""
ToolUse = tuple[str, int, int]
"""A tool's name, how often a rollout called it, and how many of these calls failed."""


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """Fields of one record of `rollouts.jsonl` for tables and statistics; each attempt at a place has a record.

    Attributes:
        epoch: pass over the rows, from 0.
        index: index in its group.
        attempt: number of earlier attempts at this place.
        state: a `RolloutState`, as text.
        score: None also for a seat that no reward pays, whose state is `scored`.
        turns: model calls; tokens are the sum over all of them.
        cost: US dollars of the policy and of other models together, or None if the cost of a call is unknown.
        roles: use of models other than the policy: calls, tokens, and US dollars if they are known.
        calls: number of tool calls.
        seconds: seconds by phase (`total`, `generation`, `tools`, `sandbox`, `rewards`, `queue`).
        model: model of the policy's server; None if none replied.
        row_digest: digest of the row's content.
        seat: its seat, if an episode has several seats; else empty.
        episode: the group of its episode; for the first seat its group.
        begin: offset of the record in its file, in bytes.
        reasons: start of the reason of each reward whose value is not 1.
        started_at: time of its start in seconds since 1970; None if it was not recorded.
        version: version of the weights of its last call, if the server reported it.
        fallbacks: rewards whose fallback graded it, as their judge was unavailable.
    """

    id: str
    row_key: str
    group: str
    epoch: int
    index: int
    attempt: int
    state: str
    score: float | None
    rewards: Mapping[str, float | None]
    stop_reason: str
    error: str | None
    turns: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None
    roles: Mapping[str, Mapping[str, float]]
    calls: int
    call_errors: int
    tools: tuple[ToolUse, ...]
    seconds: Mapping[str, float]
    model: str | None
    row_digest: str
    seat: str
    episode: str
    begin: int
    reasons: Mapping[str, str] = field(default_factory=dict)
    started_at: float | None = None
    version: int | None = None
    fallbacks: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of all its model calls."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def policy_usage(self) -> Usage:
        """Use of the policy, whose cost counts as unknown if that of another model is."""
        usage = Usage(self.prompt_tokens, self.completion_tokens, self.turns)
        if self.cost is None:
            usage.unpriced = self.turns
        else:
            usage.known_cost = self.cost - sum(Usage.from_record(counts).known_cost for counts in self.roles.values())
        return usage

    @property
    def final(self) -> bool:
        """True if it is not run or scored any more."""
        return self.state in FINAL

    @property
    def given_up(self) -> bool:
        """True if infrastructure failures exhausted its retries."""
        return self.state in GIVEN_UP

    @property
    def total_seconds(self) -> float:
        """Seconds from its first phase to its last."""
        return self.seconds.get("total", 0.0)

    def passes(self, success: float) -> bool:
        """Return True if it is solved; a rollout without a score is not."""
        return self.score is not None and self.score >= success

    def failed(self, success: float) -> bool:
        """Return True if it does not pass, or could not be graded; an excluded or unpaid one has not failed."""
        if self.score is None:
            return self.state not in (RolloutState.EXCLUDED, RolloutState.SCORED)
        return self.score < success


class RunRecord:
    """The run in a directory, or in the directory of a file; call `refresh` to read new records.

    Raises `UserError` if there is no run, or its files cannot be read.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise UserError(f"there is no run at {path}: no such directory")
        self.path = path if path.is_dir() else path.parent
        if not (self.path / "run.json").is_file():
            runs = ", ".join(map(str, [*find_runs(self.path)][:5]))
            if self.path != path:
                raise UserError(f"{path} is a file; a run is a directory{f': {runs}' if runs else ''}")
            below = f"; there are runs below it: {runs}" if runs else ""
            raise UserError(f"{path} is not a run directory: run.json not found{below}")
        self.rollouts: list[RolloutSummary] = []
        """All records, failed attempts included, in the order in which they ended."""
        self.torn = 0
        """Number of unreadable records."""
        self._torn_lines: list[int] = []
        self.unreadable: dict[str, str] = {}
        """Reasons for rollouts that are in the index but whose full record could not be read, if a reader tried."""
        self.categories: dict[str, dict[str, str]] = {}
        """By row, its columns with short values, by which rows can be grouped; without expected answers."""
        self.generation = 0
        """Number of times that the file was replaced: another number invalidates all data read from it."""
        self.size = 0
        """Size of the file in bytes at the last check."""
        self._read = 0
        """Bytes of the file that are in the index."""
        self._file: tuple[int, int] | None = None
        self._by_id: dict[str, int] = {}

    @property
    def share_read(self) -> float:
        """Fraction of the file that is in the index, from 0 to 1."""
        return self._read / self.size if self.size else 1.0

    @property
    def run_info(self) -> dict[str, Any]:
        """Current content of `run.json`."""
        try:
            return read_description(self.path / "run.json")
        except OSError as error:
            raise UserError(f"{self.path / 'run.json'} cannot be read: {error.strerror}") from error

    @property
    def usage(self) -> dict[str, Usage]:
        """Use of models by role in all starts of the run, from `run.json`; of a run that did not write it, the sum over
        its records.
        """
        if (counted := self.run_info.get("usage")) is not None:
            return {role: Usage.from_record(counts) for role, counts in counted.items()}
        used: dict[str, Usage] = {POLICY: Usage()}
        for rollout in self.rollouts:
            used[POLICY] += rollout.policy_usage
            for role, counts in rollout.roles.items():
                total = used.setdefault(role, Usage())
                total += Usage.from_record(counts)
        return used

    @property
    def group_size(self) -> float:
        """Rollouts per row that the last start of an evaluation requested; infinite if it is unknown."""
        return self._selection[0]

    @property
    def _selection(self) -> tuple[float, Set[str]]:
        """Rollouts per row that the last start of an evaluation requested, infinite if it is unknown, and the groups
        that its metrics do not count.
        """
        try:
            run_info = self.run_info
        except UserError:  # the caller that shows the run reports the error
            return inf, frozenset()
        size = run_info.get("group_size")
        if run_info.get("mode") != "evaluate" or not isinstance(size, int):
            size = inf
        return size, frozenset(run_info.get("uncounted") or ())

    @property
    def spec_text(self) -> str:
        """The resolved spec as it ran, as YAML."""
        try:
            return read_text(self.path / "spec.yaml")
        except OSError as error:
            raise UserError(f"{self.path / 'spec.yaml'} cannot be read: {error.strerror}") from error

    def refresh(self, max_lines: int | None = None) -> int:
        """Read new records, at most `max_lines` lines, and return their number.

        A rewritten file, as after regrading, is read from its start.
        """
        try:
            file = open_file(self.path / ROLLOUTS)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise UserError(f"{self.path / ROLLOUTS} cannot be read: {error.strerror}") from error
        with file:
            status = os.fstat(file.fileno())
            if self._file != (status.st_dev, status.st_ino) or status.st_size < self._read:
                self.rollouts, self._by_id, self._read, self.torn, self.unreadable = [], {}, 0, 0, {}
                self._torn_lines, self.categories = [], {}
                self._file = (status.st_dev, status.st_ino)
                self.generation += 1
            self.size = status.st_size
            if self._read:
                file.seek(self._read - 1)
                if file.read(1) != b"\n":  # the last line was read before its newline was there
                    self._read += len(file.readline())
            added = 0
            while max_lines is None or added < max_lines:
                line = bounded_line(file)
                if not line.endswith(b"\n") and is_torn(line):
                    break  # no more data, or an incomplete record
                try:
                    summary = summary_of(line, self._read)
                except (ValueError, KeyError, TypeError):
                    self.torn += 1
                    self._torn_lines.append(len(self.rollouts) + self.torn)
                else:
                    self._enter(summary, line)
                self._read = file.tell()
                added += 1
            return added

    def _enter(self, summary: RolloutSummary, line: bytes) -> None:
        self._by_id[summary.id] = len(self.rollouts)
        self.rollouts.append(summary)
        if summary.index == 0 and summary.row_key not in self.categories:
            self.categories[summary.row_key] = _short_columns(line)

    def has(self, rollout: str) -> bool:
        """Return True if a rollout with this id was read."""
        return rollout in self._by_id

    def summary(self, rollout: str) -> RolloutSummary:
        """Return the summary of a rollout; raises UserError if there is none with this id."""
        try:
            return self.rollouts[self._by_id[rollout]]
        except KeyError:
            raise UserError(f"{self.path} has no rollout {rollout!r}") from None

    def open(self) -> BinaryIO:
        """Open the file of rollouts in its state at the last check; raises UserError if it is another file now."""
        try:
            file = open_file(self.path / ROLLOUTS)
        except OSError as error:
            raise UserError(f"{self.path / ROLLOUTS} cannot be read: {error.strerror}") from error
        status = os.fstat(file.fileno())
        if self._file != (status.st_dev, status.st_ino):
            file.close()
            raise UserError(f"{self.path / ROLLOUTS} was rewritten; read it again")
        return file

    def line(self, rollout: str) -> Line:
        """Return the full record of a rollout, as `docs/runs.md` describes it."""
        start = self.summary(rollout).begin
        with self.open() as file:
            file.seek(start)
            try:
                line: Line = current_record(read_own_json(bounded_line(file)))
            except ValueError as error:
                location = f"{self.path / ROLLOUTS}: the line of rollout {rollout!r}"
                raise UserError(f"{location} cannot be read: {error}") from None
        problem = NESTED.replace("have", "has", 1) if too_deep(line) else problem_of(line, COMPLETE_KEYS)
        if problem is not None:
            raise UserError(f"{self.path / ROLLOUTS}: the line of rollout {rollout!r} cannot be read: it {problem}")
        return line

    def readable(self, rollout: str) -> Line | None:
        """Return the full record of a rollout, or None if it cannot be read.

        An error affects this rollout alone; `unreadable` contains the reason.
        """
        try:
            return self.line(rollout)
        except UserError as error:
            self.exclude(rollout, error)
            return None

    def exclude(self, rollout: str, error: UserError) -> None:
        """Record that a rollout cannot be shown, and why."""
        self.unreadable[rollout] = str(error).rpartition("cannot be read: ")[2]

    @property
    def excluded(self) -> str:
        """Sentence about the unreadable rollouts, with names and number; empty if all can be read."""
        descriptions = [f"{name} ({reason})" for name, reason in list(self.unreadable.items())[:MAX_UNREADABLE_NAMED]]
        more = len(self.unreadable) - len(descriptions)
        descriptions += [f"{more} more"] if more else []
        parts = [f"{pluralize(len(self.unreadable), 'rollout')}: {', '.join(descriptions)}"] if descriptions else []
        numbers = ", ".join(map(str, self._torn_lines[:MAX_UNREADABLE_NAMED])) + (
            ", …" if self.torn > MAX_UNREADABLE_NAMED else ""
        )
        parts += [f"{pluralize(self.torn, 'line')}: number {numbers}"] if self.torn else []
        return f"skipped unreadable records of {self.path / ROLLOUTS}: {'; '.join(parts)}" if parts else ""

    def line_of_group(self, rollout: str) -> Line:
        """Return the record with the row and the tools, which only the record of its group's first rollout contains."""
        line, group = self.line(rollout), self.summary(rollout).group
        first = next((other for other in self.rollouts if other.group == group and other.index == 0), None)
        if first is not None and (line.get("row") is None or line.get("tools") is None):
            shared = line if first.id == rollout else self.readable(first.id) or {}
            line |= {name: shared.get(name) if line.get(name) is None else line[name] for name in ("row", "tools")}
        return line

    def line_number(self, rollout: str) -> int:
        """Return the line number of a rollout in the file, from 1: a short name for it."""
        return self._by_id[rollout] + 1

    def matching(self, query: str) -> list[RolloutSummary]:
        """Return the rollouts with an id, a prefix of an id, or a line number; raises UserError if there are none."""
        if query in self._by_id:
            return [self.rollouts[self._by_id[query]]]
        line_number = query.removeprefix("#")
        if line_number.isdecimal() and 1 <= int(line_number) <= len(self.rollouts):
            return [self.rollouts[int(line_number) - 1]]
        if matches := [rollout for rollout in self.rollouts if rollout.id.startswith(query)]:
            return matches
        raise UserError(
            f"{self.path} has no rollout {query!r}: give an id, the start of an id, or a number from 1 to "
            f"{len(self.rollouts)}, as `hermes-rl show {self.path}` lists them"
        )

    def members(self, group: str) -> list[RolloutSummary]:
        """Return the rollouts of a group in their order, for each place the one that counts."""
        group_rollouts = [rollout for rollout in self.rollouts if rollout.group == group]
        return sorted(
            self.counting(group_rollouts, self.group_size, every_seat=True), key=lambda rollout: rollout.index
        )

    def seats(self, rollout: RolloutSummary) -> list[RolloutSummary]:
        """Return the rollouts of all seats of its episode, the first seat's first, or an empty list for a single
        agent.
        """
        if not rollout.seat:
            return []
        episode_key = rollout.episode, rollout.index, rollout.attempt
        seat_rollouts = [other for other in self.rollouts if (other.episode, other.index, other.attempt) == episode_key]
        return sorted(seat_rollouts, key=lambda other: other.group != other.episode)

    def counting(
        self,
        rollouts: Iterable[RolloutSummary] | None = None,
        size: float | None = None,
        *,
        every_seat: bool = False,
    ) -> Iterator[RolloutSummary]:
        """Yield for each place the rollout that counts: the final one, else the last attempt.


        For an episode with several seats it is the first seat's, unless `every_seat` is set.

        Args:
            rollouts: rollouts to select from, each place with all its attempts; None: all.
            size: size of a group; places beyond it do not count. None: what the metrics of the run's last start count,
                which for an evaluation are the rows that it has and the rollouts per row that it requested.
        """
        rollout_by_slot: dict[tuple[str, int], RolloutSummary] = {}
        size, uncounted = self._selection if size is None else (size, frozenset())
        for rollout in self.rollouts if rollouts is None else rollouts:
            slot = rollout.group, rollout.index
            if rollout.episode in uncounted or (rollout.group != rollout.episode and not every_seat):
                continue
            if rollout.index < size and (slot not in rollout_by_slot or not rollout_by_slot[slot].final):
                rollout_by_slot[slot] = rollout
        yield from rollout_by_slot.values()

    def columns(self) -> dict[str, dict[str, Any]]:
        """Return each recorded row, by its key: it is in the record of the first rollout of its group."""
        rows: dict[str, dict[str, Any]] = {rollout.row_key: {} for rollout in self.rollouts}
        with self.open() as file:
            for rollout in self.rollouts:
                if rollout.index == 0 and not rows[rollout.row_key]:
                    file.seek(rollout.begin)
                    with suppress(ValueError):
                        rows[rollout.row_key] = read_own_json(bounded_line(file)).get("row") or {}
        return rows

    def label(self, row_key: str, length: int = 50) -> str:
        """Return the name of a row for people: its key if the spec has `dataset.key`, else the start of its prompt.

        No column is read: it may hold hidden tests. Empty if the row was not recorded.
        """
        return self.previews([row_key], length)[row_key]["label"]

    def previews(self, row_keys: Iterable[str], length: int) -> dict[str, dict[str, str]]:
        """Return the `label` and the `question` (its prompt), cut to `length`, by row; empty if unknown."""
        recorded: dict[str, RolloutSummary | None] = dict.fromkeys(row_keys)
        digests = {rollout.row_key: rollout.row_digest for rollout in self.rollouts}
        for rollout in self.rollouts:
            first_seat = rollout.index == 0 and rollout.group == rollout.episode
            if first_seat and recorded.get(rollout.row_key, rollout) is None:
                recorded[rollout.row_key] = rollout
        previews = {key: {"label": "", "question": ""} for key in recorded}
        for key, first in recorded.items():
            texts = previews[key]
            line = self.readable(first.id) if first is not None else None
            if line is not None:
                texts["question"] = prompt_of(_prompt_messages(line))
            # Without `dataset.key` a key is the start of the content's hash, with a number for repeated content.
            texts["label"] = texts["question"] if key.startswith(digests.get(key, "")[:16]) else key
            previews[key] = {name: beginning(text, length) for name, text in texts.items()}
        return previews

    def messages(self, rollout: str) -> list[Any]:
        """Return the conversation of a rollout without reading its tokens; empty if it cannot be read."""
        with self.open() as file:
            file.seek(self.summary(rollout).begin)
            line = bounded_line(file)
        conversation, turns, sequences = marks_of(line)
        rest = line.partition(conversation)[2]
        end = rest.rfind(turns, 0, rest.rfind(sequences))
        try:
            messages = read_own_json(b"[" + rest[:end] + b"]")
        except ValueError:
            return []
        return messages if isinstance(messages, list) else []


def by_row(rollouts: Iterable[RolloutSummary]) -> dict[str, list[RolloutSummary]]:
    """Return the rollouts of each row, of all epochs, in the order of their places."""
    rows: dict[str, list[RolloutSummary]] = {}
    for rollout in rollouts:
        rows.setdefault(rollout.row_key, []).append(rollout)
    for row in rows.values():
        row.sort(key=lambda rollout: (rollout.epoch, rollout.index))
    return rows


def scores_of(rollouts: Iterable[RolloutSummary]) -> list[float]:
    """Return the existing scores of the rollouts."""
    return [rollout.score for rollout in rollouts if rollout.score is not None]


def prompt_of(messages: Iterable[Any]) -> str:
    """Return the first text of a user."""
    questions = (message for message in messages if isinstance(message, dict) and message.get("role") == "user")
    return text_of(next(questions, {}).get("content"))


def _prompt_messages(line: Line) -> list[Any]:
    """Return the messages from the question on: after examples that come before it in the prompt."""
    messages, length = line.get("messages") or [], line.get("prompt_length")
    user_indexes = [index for index, each in enumerate(messages[: length or None]) if each.get("role") == "user"]
    return messages[user_indexes[-1] :] if user_indexes else messages


PART = 200
"""Characters that are shown of a part of a message other than text; a picture may have millions."""


def text_of(content: Any) -> str:
    """Return the content of a message as one text; of a part other than text, such as a picture, the first characters
    as JSON.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            str(part["text"]) if isinstance(part, dict) and isinstance(part.get("text"), str) else text_of(part)[:PART]
            for part in content
        )
    return json.dumps(content, ensure_ascii=False, indent=1, default=str)


def beginning(text: str, length: int) -> str:
    """Return the start of a text, in one line of at most `length` characters."""
    one_line = " ".join(text[: 8 * length].split())
    return one_line if len(one_line) <= length else one_line[: length - 1] + "…"


def marks_of(line: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the `MARKS` of a line."""
    return next((marks for marks in MARKS if marks[0] in line), MARKS[0])


def summary_of(line: bytes, start: int) -> RolloutSummary:
    """Return the summary of a record without parsing its conversation; raises ValueError, KeyError or TypeError."""
    conversation, turns, sequences = marks_of(line)
    head, _, rest = line.partition(conversation)
    # Quotation marks within a JSON text are escaped, so that these are keys of the record, or of a tool's schema.
    tokens = rest.rfind(sequences)
    end = rest.rfind(turns, 0, tokens)
    try:
        head_fields = current_record(read_own_json(head + b"}"))
        tail_fields = current_record(read_own_json(b"{" + rest[end + 2 : tokens] + b"}"))
        usage, timings = tail_fields["usage"], tail_fields["timings"]
    except (ValueError, KeyError):
        head_fields = tail_fields = current_record(read_own_json(line))
        usage, timings = head_fields["usage"], head_fields["timings"]
    if (problem := problem_of({**head_fields, **tail_fields})) is not None:
        raise ValueError(problem)
    return RolloutSummary(
        id=head_fields["id"],
        row_key=intern(head_fields["row_key"]),
        group=intern(head_fields["group"]),
        epoch=head_fields["epoch"],
        index=head_fields["index"],
        attempt=head_fields["attempt"],
        state=intern(head_fields["state"]),
        score=None if _is_unpaid(head_fields) else head_fields["score"],
        rewards={intern(name): record["value"] for name, record in head_fields["rewards"].items()},
        fallbacks=tuple(intern(name) for name, record in head_fields["rewards"].items() if is_fallback(record)),
        stop_reason=intern(head_fields["stop_reason"]),
        error=intern(head_fields["error"]) if head_fields["error"] else None,
        turns=tail_fields["turns"],
        prompt_tokens=usage.get("prompt_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
        cost=cost_of(usage, tail_fields.get("roles") or NO_ROLES),
        roles=tail_fields.get("roles") or NO_ROLES,
        calls=len(tail_fields["tool_calls"]),
        call_errors=len(tail_fields["tool_errors"]),
        tools=_tool_uses(tail_fields),
        seconds={intern(name): seconds for name, seconds in timings.items()},
        model=intern(tail_fields["policy"].get("model") or "") or None if tail_fields["policy"] else None,
        row_digest=tail_fields["row_digest"],
        seat=intern(head_fields["seat"]["name"]) if "seat" in head_fields else "",
        episode=intern(head_fields["seat"]["of"] if "seat" in head_fields else head_fields["group"]),
        begin=start,
        reasons={
            intern(name): intern(beginning(record["reason"], SHORT_REASON))
            for name, record in head_fields["rewards"].items()
            if record.get("reason") and record["value"] != 1
        },
        started_at=head_fields.get("started_at"),
        version=version
        if tail_fields["policy"] and type(version := tail_fields["policy"].get("version")) is int
        else None,
    )


def is_fallback(reward: Mapping[str, Any]) -> bool:
    """Return True if the record of a reward is of its fallback, which graded the group instead of a judge."""
    return bool((reward.get("metrics") or {}).get("fallback"))


ROW_MARKS = (b',"row":{', b', "row": {')
"""Start of the row in the record of a group's first rollout, like `MARKS`."""
SHORT_REASON, SHORT_VALUE, MOST_COLUMNS = 160, 40, 20
"""Characters of a reason and of a column's value that are in the index, and columns of a row."""


def _short_columns(line: bytes) -> dict[str, str]:
    """Return the columns of the row in a record that have a short value, without expected answers."""
    end = len(line)
    while (start := max(line.rfind(marker, 0, end) for marker in ROW_MARKS)) >= 0:
        # A tool or a row may contain this name too; then the rest of the line is not the end of a record.
        with suppress(ValueError):
            row = read_own_json(b"{" + line[start + 1 :]).get("row")
            short = {
                str(name): str(value)
                for name, value in row.items()
                if isinstance(value, str | int | bool)
                and len(str(value)) <= SHORT_VALUE
                and name.lower() not in ANSWER_COLUMNS
            }
            return {intern(name): intern(value) for name, value in islice(short.items(), MOST_COLUMNS)}
        end = start
    return {}


def _is_unpaid(head: Mapping[str, Any]) -> bool:
    """Return True if no reward pays this seat, such as a judge's: its 0 is not a score."""
    other = "seat" in head and head["seat"]["of"] != head["group"]
    return other and not head["rewards"] and bool(head["state"] == RolloutState.SCORED)


NO_ROLES: Mapping[str, Mapping[str, float]] = {}
"""Shared by all rollouts that called only the policy; never changed."""
_known_tools: dict[tuple[ToolUse, ...], tuple[ToolUse, ...]] = {}
"""Most rollouts of a run use the same tools equally often, so they share one entry."""
MOST_KNOWN = 10_000


def _tool_uses(tail_fields: Mapping[str, Any]) -> tuple[ToolUse, ...]:
    calls = Counter(str(call["name"]) for call in tail_fields["tool_calls"])
    errors = Counter(str(error["tool_name"]) for error in tail_fields["tool_errors"])
    # A call without a tool name, or with unreadable arguments, is an error without a call.
    uses = tuple((name, calls[name], errors[name]) for name in sorted({*calls, *errors}))
    if len(_known_tools) > MOST_KNOWN:
        _known_tools.clear()
    return _known_tools.setdefault(uses, uses)


def bounded_line(file: BinaryIO) -> bytes:
    """Return the next line; of a line that is too long only its end, which no run writes as a record."""
    line = file.readline(LONGEST_LINE)
    while len(line) == LONGEST_LINE and not line.endswith(b"\n"):
        line = file.readline(LONGEST_LINE)
    return line


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run directories in a directory and below it, the latest first; the content of a run is not searched."""
    runs = []
    for name, folders, files in os.walk(folder):
        directory = Path(name)
        if "run.json" in files:
            with suppress(OSError):  # it is gone
                runs.append(((directory / "run.json").stat().st_mtime, directory))
        if "run.json" in files or len(directory.relative_to(folder).parts) == MAX_SEARCH_DEPTH:
            folders.clear()
    yield from (path for _, path in sorted(runs, reverse=True))
