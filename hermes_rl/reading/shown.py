"""A rollout as a page shows it: JSON whose texts are fit to be seen, and bounded.

Everything that an agent, a model, a reward or a dataset wrote goes through `Screen`, which shows controls of terminals
and of writing direction as escapes and cuts what is too long for a page, with a note that says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any

from hermes_rl.agent.result import reasoning_of
from hermes_rl.errors import UserError
from hermes_rl.reading.record import EXPECTED, RolloutSummary, RunRecord, beginning, prompt_of, text_of
from hermes_rl.tokens.transcript import unpacked
from hermes_rl.visible import visible

NUMBER = 24
"""Bytes that a number takes at most, but for few."""
DEEPEST = 40
"""Levels of a recorded value that are shown as such; what lies deeper is shown as text."""
LOOKED_AT = 20_000
"""Files and directories of an artifact that are looked at."""
FILES = 200
"""Files of an artifact that are listed."""
BEFORE = 100
"""Tokens of the prompt that are shown before the first sampled one."""
PREVIEW = 160
"""Characters of a question, and of an answer, in a line of a table."""


@dataclass
class Screen:
    """Makes recorded values fit for a page.

    Attributes:
        longest: characters of one text that are shown.
        room: bytes of JSON that are left for everything.
        cut: entries of lists that found no room.
    """

    longest: int = 200_000
    room: int = 16_000_000
    cut: int = 0

    def text(self, text: str) -> str:
        """Return a text without control characters, cut where it is too long."""
        beginning = text[: max(min(self.longest, self.room), 0)]
        seen, cut = visible(beginning), len(text) - len(beginning)
        self.room -= len(encode_basestring_ascii(seen))  # as a page has it, where three more characters are escaped
        self.room -= 5 * (seen.count("<") + seen.count(">") + seen.count("&"))
        return seen + (f"\n[… {cut:,} more characters are in rollouts.jsonl]" if cut else "")

    def value(self, value: Any, depth: int = 0) -> Any:
        """Return any JSON value, its texts and keys made fit; numbers that JSON does not have become texts."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if depth >= DEEPEST and isinstance(value, (dict, list)):
            return self.text(json.dumps(value, ensure_ascii=False, default=str))
        if isinstance(value, (dict, Mapping)):
            return {self.text(str(key)): self.value(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return list(self._entries(value, depth + 1))
        self.room -= NUMBER
        return value

    def _entries(self, entries: Sequence[Any], depth: int) -> Iterator[Any]:
        for place, entry in enumerate(entries):
            if self.room <= 0:
                self.cut += len(entries) - place
                return
            yield self.value(entry, depth)


COLUMNS = (
    "id", "row_key", "group", "epoch", "index", "attempt", "state", "score", "ending", "turns", "prompt_tokens",
    "completion_tokens", "calls", "call_errors", "seat",
)  # fmt: skip
"""Of a `RolloutSummary`, as they are in a line of a table."""


def shown_summary(rollout: RolloutSummary) -> dict[str, Any]:
    """Return a rollout as a line of a table."""
    return {
        **{name: getattr(rollout, name) for name in COLUMNS},
        "rewards": dict(rollout.rewards),
        "error": (rollout.error or "")[:500] or None,
        "seconds": rollout.seconds.get("total"),
    }


def shown_previews(record: RunRecord, rollouts: Sequence[RolloutSummary]) -> list[dict[str, Any]]:
    """Return rollouts as lines of a table, each with its row's name and the start of its answer."""
    rows = record.previews({rollout.row_key for rollout in rollouts}, PREVIEW)
    lines = []
    for rollout in rollouts:
        messages = [message for message in record.messages(rollout.id) if isinstance(message, dict)]
        # The row may lie in a line that was not written yet; what the model was asked is there.
        label = rows[rollout.row_key]["label"] or prompt_of(messages)
        answer = _answer(messages) if rollout.turns else ""
        previews = {"label": beginning(label, PREVIEW), "answer": beginning(answer, PREVIEW)}
        lines.append({**shown_summary(rollout), **previews})
    return lines


def _answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what a model said last, or which tool it called where it said nothing."""
    empty: Mapping[str, Any] = {}
    last = next((message for message in reversed(messages) if message.get("role") == "assistant"), empty)
    functions = [call.get("function") or {} for call in last.get("tool_calls") or () if isinstance(call, dict)]
    calls = (f"{function.get('name')} {text_of(function.get('arguments'))}" for function in functions)
    return text_of(last.get("content")).strip() or " ".join(calls)


def shown_rollout(record: RunRecord, rollout: str, screen: Screen) -> dict[str, Any]:
    """Return all of a rollout but its tokens; raises UserError where there is none, or its line cannot be read."""
    try:
        shown: dict[str, Any] = screen.value(_rollout(record, rollout))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the line of rollout {rollout} cannot be shown ({type(error).__name__}: {error})") from error
    return {**shown, "cut": screen.cut}


def _rollout(record: RunRecord, rollout: str) -> dict[str, Any]:
    line = record.line_of_group(rollout)
    summary = record.summary(rollout)
    row, sequences = line.get("row"), [unpacked(packed) for packed in line.get("sequences") or ()]
    return {
        **shown_summary(summary),
        "error": line.get("error"),
        "timings": line.get("timings") or {},
        "usage": line.get("usage") or {},
        "policy": line.get("policy"),
        "image": line.get("image"),
        "rewards": [{"name": name, **reward} for name, reward in line["rewards"].items()],
        "messages": conversation(line),
        "program": program(line),
        "row": row,
        "expected": [name for name in row or {} if name.lower() in EXPECTED],
        "artifacts": [
            _artifact(record.path, name, artifact) for name, artifact in (line.get("artifacts") or {}).items()
        ],
        "tools": line.get("tools"),
        "sequences": [
            {
                "tokens": len(sequence),
                "trained": sequence.trained_length,
                "begin": max(sequence.spans[0].start - BEFORE, 0) if sequence.spans else 0,
            }
            for sequence in sequences
        ],
        "members": [shown_summary(member) for member in record.members(summary.group)],
        "seats": [shown_summary(seat) for seat in record.seats(summary)],
        "attempts": [
            {"id": rollout.id, "attempt": rollout.attempt, "state": rollout.state, "ending": rollout.ending}
            for rollout in record.rollouts
            if rollout.group == summary.group and rollout.index == summary.index
        ],
    }


def conversation(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a rollout; what the tools answered stands with the calls, as do the tools' errors."""
    known = {(call["turn"], call["id"]): call for call in line.get("tool_calls") or ()}
    # A call whose arguments cannot be read is an error without a call.
    errors = {(error["turn"], error["tool_name"]): error["error"] for error in line.get("tool_errors") or ()}
    messages: list[dict[str, Any]] = []
    calls: dict[str, dict[str, Any]] = {}
    turn = 0
    for place, message in enumerate(line["messages"]):
        prompt = place < line.get("prompt_length", 0)
        if message["role"] == "tool" and message.get("tool_call_id") in calls:
            # An id may come again in a later turn, and then stands for the call of that turn.
            calls.pop(message["tool_call_id"])["result"] = text_of(message.get("content"))
            continue
        sampled = message["role"] == "assistant" and not prompt
        turn += sampled
        shown_calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            name = str(function.get("name"))
            record = known.get((turn, call.get("id")), {"error": errors.get((turn, name))})
            entry = {"name": name, "arguments": text_of(function.get("arguments")), "result": None}
            # A program does not say how long its own tools take.
            shown_calls.append(entry | {"seconds": record.get("seconds") or None, "error": record.get("error")})
            calls[str(call.get("id"))] = shown_calls[-1]
        messages.append(
            {
                "role": str(message["role"]),
                "text": text_of(message.get("content")),
                "reasoning": reasoning_of(message),
                "calls": shown_calls,
                "prompt": prompt,
                "turn": turn if sampled else None,
            }
        )
    return messages


def program(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what is known of the agent program of a rollout, its calls as `program_lines`; None where none has played.

    In place of `sampling`, a mapping, there is a text.
    """
    known = line.get("program")
    if known is None:
        return None
    rest = {name: known[name] for name in ("exit_code", "output", "requests", "refused", "left_out")}
    rest["refusal"] = known.get("refusal", "")
    settings = ", ".join(f"{name} {value}" for name, value in known["sampling"].items())
    return {**rest, "sampling": settings, "lines": list(program_lines(known["calls"]))}


def program_lines(calls: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the calls of a program as a tree, from its top: calls of one kind that go on from each other are a line.

    A line has its `kind`, its `depth`, the `turns` of its calls in words, from 1, which turn it goes on `from` where it
    branches off, how many tokens were sampled (`tokens`) and are `trained`, and its `calls`, each with its `turn`.
    Conversations beside the main one are below it.
    """
    further: dict[int | None, list[int]] = {}
    for number, call in enumerate(calls):
        before = call["continues"]
        further.setdefault(before if before is not None and before < number else None, []).append(number)
    roots = sorted(further.get(None, ()), key=lambda number: (calls[number]["kind"] != "main", number))
    waiting = [(number, int(calls[number]["kind"] != "main")) for number in reversed(roots)]
    while waiting:
        first, depth = waiting.pop()
        line, branches = [first], list[int]()
        while line[-1] in further:
            following = further[line[-1]]
            same = [number for number in following if calls[number]["kind"] == calls[first]["kind"]]
            branches += [number for number in following if number not in same[:1]]
            if not same:
                break
            line.append(same[0])
        waiting += [(number, depth + 1) for number in reversed(branches)]
        before = calls[first]["continues"]
        yield {
            "kind": calls[first]["kind"],
            "depth": depth,
            "turns": _ranges([number + 1 for number in line]),
            "from": None if before is None else before + 1,
            "tokens": sum(calls[number]["tokens"] for number in line),
            "trained": sum(calls[number]["tokens"] for number in line if calls[number]["trained"]),
            "calls": [{**calls[number], "turn": number + 1} for number in line],
        }


def _ranges(numbers: Sequence[int]) -> str:
    """Write rising numbers, those that follow each other as a range."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("–".join(map(str, ends)) for ends in ranges)


def _artifact(run: Path, name: str, artifact: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of an artifact, with its files by their paths in the run directory."""
    if "path" not in artifact:
        return {"name": name, **artifact, "files": []}
    place = run / str(artifact["path"])
    paths = (path for path in islice(_below(run, place), LOOKED_AT) if artifact_file(run, path) is not None)
    files = sorted(str(path.relative_to(run)) for path in islice(paths, FILES))
    return {"name": name, **artifact, "files_count": artifact.get("files"), "files": files}


def _below(run: Path, place: Path) -> Iterator[Path]:
    """Yield what lies at a place among the artifacts of a run, and below it; nothing where it lies elsewhere."""
    if place.resolve().is_relative_to((run / "artifacts").resolve()):
        yield place
        yield from place.rglob("*")


def artifact_file(run: Path, path: Path) -> Path | None:
    """Return where a file of an artifact lies; None where that is no file, or lies elsewhere than a run's artifacts."""
    place = path.resolve()
    return place if place.is_relative_to((run / "artifacts").resolve()) and place.is_file() else None
