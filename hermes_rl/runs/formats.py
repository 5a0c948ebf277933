"""Files for supervised and preference training, made from the rollouts of a run of process mode.

The shapes are those that TRL and Axolotl load (docs/tokens.md). Everything that differs from row to row in its keys is
JSON as text, since the loaders of both merge the keys of all rows. Tokens are there where they are known for every row
of the file; a rollout of several sequences is several rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.endings import Ending
from hermes_rl.rollouts.rollout import Group, Rollout, Seat
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.kept import Kept
from hermes_rl.runs.records import GROUP_KEYS, atropos_messages
from hermes_rl.runs.restore import rollout_of
from hermes_rl.tokens.sequence import Sequence

FILES: Mapping[str, str] = {"sft": "sft.jsonl", "dpo": "dpo.jsonl"}
_KEPT = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")


def sft_rows(group: Group) -> Iterator[dict[str, Any]]:
    """A row per sequence of each rollout that is trained on: messages, and tokens with labels where they are known."""
    for rollout in group.rollouts:
        if rollout.masked or rollout.result is None:
            continue
        row = {**_conversation(rollout), "score": rollout.score, "group": group.id, "rollout": rollout.id}
        if not rollout.sequences:
            yield row
        yield from ({**row, **_labelled(sequence)} for sequence in rollout.sequences or ())


def dpo_rows(group: Group) -> Iterator[dict[str, Any]]:
    """The best and the worst rollout of a group as a pair; nothing where they are equal."""
    scored = [one for one in group.rollouts if one.score is not None and one.result is not None and not one.masked]
    if not scored:
        return
    best, worst = max(scored, key=_score), min(scored, key=_score)
    if _score(best) == _score(worst):
        return
    assert best.result is not None and worst.result is not None
    prompt = best.result.prompt_length
    yield {
        "prompt": [_message(one) for one in atropos_messages(best)[:prompt]],
        "chosen": [_message(one) for one in atropos_messages(best)[prompt:]],
        "rejected": [_message(one) for one in atropos_messages(worst)[prompt:]],
        "tools": _tools(best),
        "chosen_score": best.score,
        "rejected_score": worst.score,
        "group": group.id,
    }


def write_format(kind: str, directory: RunDirectory, kept: Kept, groups: Journal) -> tuple[Path, int]:
    """Write the file anew from the groups that are there; returns it and its number of rows. Blocks."""
    path = directory.path / FILES[kind]
    make = sft_rows if kind == "sft" else dpo_rows
    partial = path.with_suffix(".partial")
    count = 0
    with partial.open("w", encoding="utf-8") as file:
        for name in dict.fromkeys(line["group"] for line in groups.read(*GROUP_KEYS)):
            for row in make(_group(name, kept)):
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
                count += 1
    partial.replace(path)
    return path, count


def _group(name: str, kept: Kept) -> Group:
    """A group as its lines have it; each member with the tools that the first was told of."""
    (lines,) = kept.lines([name])
    row = Row(key=lines[0]["row_key"], columns={}, index=0, digest="")
    rollouts = [
        rollout_of(line, Seat(row, name, place, len(lines)), 0, masked=kept.treatment(Ending(line["ending"])) == "mask")
        for place, line in enumerate(lines)
    ]
    for rollout in rollouts:
        if rollout.result is not None:
            rollout.result.tool_schemas = list(lines[0].get("tools") or ())
    return Group(name, row, rollouts)


def _conversation(rollout: Rollout) -> dict[str, Any]:
    return {"messages": [_message(one) for one in atropos_messages(rollout)], "tools": _tools(rollout)}


def _labelled(sequence: Sequence) -> dict[str, Any]:
    return {
        "input_ids": sequence.tokens,
        "attention_mask": [1] * len(sequence),
        "labels": sequence.masks,
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with every key, so that all rows have one shape; arguments of calls are JSON as text already."""
    kept = {key: message.get(key) for key in _KEPT}
    return {**kept, "content": _text(kept["content"]), "tool_calls": [_call(one) for one in kept["tool_calls"] or ()]}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": call.get("id"), "type": "function", "function": dict(call["function"])}


def _text(content: Any) -> Any:
    return "" if content is None else content


def _tools(rollout: Rollout) -> str:
    assert rollout.result is not None
    return json.dumps(list(rollout.result.tool_schemas), ensure_ascii=False)


def _score(rollout: Rollout) -> float:
    assert rollout.score is not None
    return rollout.score
