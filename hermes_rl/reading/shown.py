"""A rollout as a page shows it: JSON whose texts are fit to be seen, and bounded.

Everything that an agent, a model, a reward or a dataset wrote goes through `Screen`, which shows controls of terminals
and of writing direction as escapes and cuts what is too long for a page, with a note that says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hermes_rl.agent.result import reasoning_of
from hermes_rl.errors import UserError
from hermes_rl.reading.record import EXPECTED, RolloutSummary, RunRecord, beginning, prompt_of, text_of
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.tokens.transcript import MASKED_LOGPROB, TokenSequence, unpacked
from hermes_rl.visible import visible

NUMBER = 24
"""Bytes that a number takes at most, but for few."""
DEEPEST = 40
"""Levels of a recorded value that are shown as such; what lies deeper is shown as text."""
FILES = 200
"""Files of an artifact that are listed."""
JOINED = 8
"""Tokens that together may make one character."""
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
        kept = text[: max(min(self.longest, self.room), 0)]
        seen, cut = visible(kept), len(text) - len(kept)
        self.room -= len(json.dumps(seen)) + 5 * sum(map(seen.count, "<>&"))  # as a page has them
        return seen + (f"\n[… {cut:,} more characters are in rollouts.jsonl]" if cut else "")

    def value(self, value: Any, depth: int = 0) -> Any:
        """Return any JSON value, its texts and keys made fit; numbers that JSON does not have become texts."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if depth >= DEEPEST and isinstance(value, dict | list):
            return self.text(json.dumps(value, ensure_ascii=False, default=str))
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return list(self._entries(value, depth + 1))
        self.room -= NUMBER
        return value

    def _entries(self, entries: Sequence[Any], depth: int) -> Iterator[Any]:
        for place, entry in enumerate(entries):
            if self.room <= 0:
                self.cut += len(entries) - place
                return
            yield self.value(entry, depth)


def shown_summary(rollout: RolloutSummary) -> dict[str, Any]:
    """Return a rollout as a line of a table."""
    return {
        "id": rollout.id,
        "row_key": rollout.row_key,
        "group": rollout.group,
        "epoch": rollout.epoch,
        "index": rollout.index,
        "attempt": rollout.attempt,
        "state": rollout.state,
        "score": rollout.score,
        "rewards": dict(rollout.rewards),
        "ending": rollout.ending,
        "error": (rollout.error or "")[:500] or None,
        "turns": rollout.turns,
        "prompt_tokens": rollout.prompt_tokens,
        "completion_tokens": rollout.completion_tokens,
        "calls": rollout.calls,
        "call_errors": rollout.call_errors,
        "seconds": rollout.seconds.get("total"),
    }


def shown_previews(record: RunRecord, rollouts: Sequence[RolloutSummary]) -> list[dict[str, Any]]:
    """Return rollouts as lines of a table, each with the beginnings of what was asked and answered."""
    rows = record.previews({rollout.row_key for rollout in rollouts}, PREVIEW)
    lines = []
    for rollout in rollouts:
        messages = [message for message in record.messages(rollout.id) if isinstance(message, dict)]
        # The row may lie in a line that was not written yet; what the model was asked is there.
        question = rows[rollout.row_key].question or prompt_of(messages)
        answer = _answer(messages) if rollout.turns else ""
        previews = {"question": beginning(question, PREVIEW), "answer": beginning(answer, PREVIEW)}
        lines.append({**shown_summary(rollout), **previews})
    return lines


def _answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what a model said last, or which tool it called where it said nothing."""
    empty: Mapping[str, Any] = {}
    last = next((message for message in reversed(messages) if message.get("role") == "assistant"), empty)
    calls = last.get("tool_calls") or ()
    return text_of(last.get("content")).strip() or " ".join(_call(call) for call in calls if isinstance(call, dict))


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    return f"{function.get('name')} {text_of(function.get('arguments'))}"


def shown_rows(record: RunRecord, row_keys: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the beginnings of what these rows ask and expect, by their keys."""
    return {key: asdict(preview) for key, preview in record.previews(row_keys, PREVIEW).items()}


def shown_rollout(record: RunRecord, rollout: str, screen: Screen) -> dict[str, Any]:
    """Return all of a rollout but its tokens.

    Raises:
        UserError: there is none with this id, or its line cannot be read.
    """
    try:
        shown: dict[str, Any] = screen.value(_rollout(record, rollout))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the line of rollout {rollout} cannot be shown ({type(error).__name__}: {error})") from error
    return {**shown, "cut": screen.cut}


def _rollout(record: RunRecord, rollout: str) -> dict[str, Any]:
    line = record.line(rollout)
    summary = record.summary(rollout)
    members = record.members(summary.group)
    row = line.get("row") if line.get("row") is not None else record.row(summary.group)
    return {
        **shown_summary(summary),
        "error": line.get("error"),
        "timings": line.get("timings") or {},
        "usage": line.get("usage") or {},
        "policy": line.get("policy"),
        "image": line.get("image"),
        "rewards": [{"name": name, **reward} for name, reward in line["rewards"].items()],
        "messages": _messages(line),
        "row": row,
        "expected": [name for name in row or {} if name.lower() in EXPECTED],
        "artifacts": [_artifact(record.path, name, said) for name, said in (line.get("artifacts") or {}).items()],
        "tools": _schemas(record, line, members),
        "sequences": _lengths(line),
        "members": [shown_summary(member) for member in members],
        "attempts": [
            {"id": rollout.id, "attempt": rollout.attempt, "state": rollout.state, "ending": rollout.ending}
            for rollout in record.rollouts
            if rollout.group == summary.group and rollout.index == summary.index
        ],
    }


def _messages(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation; what the tools answered stands with the calls."""
    took = {(call["turn"], call["id"]): call for call in line.get("tool_calls") or ()}
    shown: list[dict[str, Any]] = []
    calls: dict[str, dict[str, Any]] = {}
    turn = 0
    for place, message in enumerate(line["messages"]):
        prompt = place < line.get("prompt_length", 0)
        if message["role"] == "tool" and message.get("tool_call_id") in calls:
            # An id may come again in a later turn, and then stands for the call of that turn.
            calls.pop(message["tool_call_id"])["result"] = text_of(message.get("content"))
            continue
        if message["role"] == "assistant" and not prompt:
            turn += 1
        made = []
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            known = took.get((turn, call.get("id")), {})
            told = {"name": str(function.get("name")), "arguments": text_of(function.get("arguments")), "result": None}
            told |= {"seconds": known.get("seconds"), "error": known.get("error")}
            made.append(told)
            calls[str(call.get("id"))] = told
        shown.append(
            {
                "role": str(message["role"]),
                "text": text_of(message.get("content")),
                "reasoning": reasoning_of(message),
                "calls": made,
                "prompt": prompt,
                "turn": turn if message["role"] == "assistant" and not prompt else None,
            }
        )
    return shown


def _schemas(record: RunRecord, line: Mapping[str, Any], members: Sequence[RolloutSummary]) -> Any:
    """Return the schemas of the tools that the model had; they are recorded once for each group."""
    if line.get("tools") is not None or not members or members[0].index or members[0].id == line["id"]:
        return line.get("tools")
    return record.line(members[0].id).get("tools")


def _lengths(line: Mapping[str, Any]) -> list[dict[str, int]]:
    """Return how many tokens the sequences have, and where a look at them begins."""
    sequences = [unpacked(one) for one in line.get("sequences") or ()]
    return [
        {"tokens": len(sequence), "trained": sequence.trained_length, "begin": first_shown(sequence)}
        for sequence in sequences
    ]


def first_shown(sequence: TokenSequence) -> int:
    """Return the token that is shown first: some way before what was sampled."""
    return max(sequence.spans[0].start - BEFORE, 0) if sequence.spans else 0


def _artifact(run: Path, name: str, said: Mapping[str, Any]) -> dict[str, Any]:
    if "path" not in said:
        return {"name": name, **said, "files": []}
    return {"name": name, **said, "files_count": said.get("files"), "files": _files(run / str(said["path"]), run)}


def _files(place: Path, run: Path) -> list[str]:
    """Return the files of an artifact, by their paths in the run directory."""
    paths = (path for path in (place, *place.rglob("*")) if artifact_file(run, path) is not None)
    return sorted(str(path.relative_to(run)) for path in islice(paths, FILES))


def artifact_file(run: Path, path: Path) -> Path | None:
    """Return where a file of an artifact lies; None where that is no file, or lies elsewhere than a run's artifacts."""
    place = path.resolve()
    return place if place.is_relative_to((run / "artifacts").resolve()) and place.is_file() else None


# ------------------------------------------------------------------------------------------------------- Tokens


def tokenizer_of(described: Mapping[str, Any]) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer that a run names, and why there is none; nothing is downloaded.

    Args:
        described: what run.json says.
    """
    name = (described.get("tokenizer") or {}).get("name")
    if not isinstance(name, str) or not name:
        return None, "the run names no tokenizer"
    try:
        return load_tokenizer(None if name == SMALL else name, local=True), ""
    except UserError as error:
        return None, str(error).splitlines()[0]


SMALL = "hermes-rl/small"


def shown_tokens(
    line: Mapping[str, Any], sequence: int, begin: int, most: int, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return tokens of a sequence: the text of each, whether it was sampled, in which turn, and how probable it was.

    Args:
        line: of the rollout.
        sequence: which of its sequences.
        begin: the first token.
        most: how many.
        tokenizer: that they are decoded by; None: their ids are shown.

    Raises:
        UserError: there is no such sequence.
    """
    packed = line.get("sequences") or []
    if not 0 <= sequence < len(packed):
        raise UserError(f"there is no sequence {sequence}; the rollout has {len(packed)}")
    whole = unpacked(packed[sequence])
    end = min(begin + most, len(whole))
    texts = _decoded(whole, begin, end, tokenizer)
    logprobs = whole.logprobs
    turns = whole.spread([span.turn for span in whole.spans for _ in range(span.start, span.stop)], -1)
    sampled = line.get("sampled") or []
    versions = [list(entry[4:6]) for entry in sampled]
    return {
        "sequence": sequence,
        "begin": begin,
        "end": end,
        "total": len(whole),
        "decoded": tokenizer is not None,
        "versions": versions,
        "tokens": [
            [texts[at - begin], int(turns[at]), _logprob(logprobs, at) if turns[at] >= 0 else None]
            for at in range(begin, end)
        ],
    }


def _logprob(logprobs: Sequence[float] | None, at: int) -> float | None:
    if logprobs is None or logprobs[at] == MASKED_LOGPROB or not math.isfinite(logprobs[at]):
        return None
    return round(logprobs[at], 4)


def _decoded(whole: TokenSequence, begin: int, end: int, tokenizer: Tokenizer | None) -> list[str]:
    """Return the text of each token. Where several make one character, the first of them has it."""
    if tokenizer is None:
        return [str(token) for token in whole.ids[begin:end]]
    texts, at = [], begin
    while at < end:
        size = 1
        text = tokenizer.decode(whole.ids[at : at + 1])
        while "\ufffd" in text and size < JOINED and at + size < end:
            size += 1
            text = tokenizer.decode(whole.ids[at : at + size])
        if "\ufffd" in text:
            size, text = 1, tokenizer.decode(whole.ids[at : at + 1])
        texts += [visible(text), *[""] * (size - 1)]
        at += size
    return texts


def shown_prompt(line: Mapping[str, Any], tokenizer: Tokenizer | None, screen: Screen) -> str | None:
    """Return the first prompt exactly as the model got it; None where the run did not record its tokens."""
    packed = line.get("sequences") or []
    if not packed or tokenizer is None:
        return None
    whole = unpacked(packed[0])
    if not whole.spans:
        return None
    return screen.text(tokenizer.decode(whole.ids[: whole.spans[0].start]))
