"""Files for supervised and preference training, made from the rollouts of a run of process mode.

The shapes are those that TRL and Axolotl load (docs/tokens.md). Messages are what chat templates take: arguments are
objects, and there are no keys without a value, since templates ask which keys are there. A rollout of several sequences
is several rows.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.rollouts.environment import Environment
from hermes_rl.rollouts.rollout import Group, Rollout, RolloutKey
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.group_lines import GROUP_KEYS, messages_of
from hermes_rl.runs.journal import Journal, cannot_write
from hermes_rl.runs.records import rollout_of
from hermes_rl.runs.store import RolloutStore
from hermes_rl.tokens.messages import for_template, history_named
from hermes_rl.tokens.sequence import TokenSequence
from hermes_rl.tokens.tokenizer import Tokenizer

FILES: Mapping[str, tuple[str, ...]] = {"sft": ("sft.jsonl",), "dpo": ("dpo.jsonl", "dpo-text.jsonl")}
_KEPT = ("role", "tool_call_id", "name", "reasoning_content")


def sft_rows(group: Group, *, tokens: bool) -> Iterator[dict[str, Any]]:
    """A row per sequence of each rollout that is trained on; without `tokens` a row per rollout, messages alone."""
    for rollout in _trained(group):
        conversation = {"messages": _messages(rollout), "tools": _tools(rollout)}
        row = {**conversation, "score": rollout.score, "group": group.id, "rollout": rollout.id}
        yield from ({**row, **_labelled(one)} for one in rollout.sequences or ()) if tokens else (row,)


def dpo_rows(group: Group) -> Iterator[dict[str, Any]]:
    """The best and the worst rollout of a group as a pair of messages; nothing where they are equal."""
    for best, worst in _pair(group):
        assert best.result is not None
        prompt = best.result.prompt_length
        yield {
            "prompt": _messages(best)[:prompt],
            "chosen": _messages(best)[prompt:],
            "rejected": _messages(worst)[prompt:],
            "tools": _tools(best),
            **_told(best, worst),
        }


def dpo_text_rows(group: Group, tokenizer: Tokenizer | None) -> Iterator[dict[str, Any]]:
    """The same as texts, control tokens included, as the model saw and wrote them.

    Nothing where tokens are not known, or where a rollout is several sequences.
    """
    for best, worst in _pair(group):
        chosen, rejected = _parts(best), _parts(worst)
        if tokenizer is None or chosen is None or rejected is None or chosen[0] != rejected[0]:
            continue
        texts = map(tokenizer.decode, (*chosen, rejected[1]))
        yield {**dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)), **_told(best, worst)}


def write_format(
    kind: str,
    directory: RunDirectory,
    store: RolloutStore,
    environment: Environment,
    groups: Journal,
    tokenizer: Tokenizer | None,
) -> list[tuple[Path, int]]:
    """Write the files anew from the groups that are there; returns each and its number of rows. Blocks."""
    names = dict.fromkeys(line["group"] for line in groups.read(*GROUP_KEYS))
    makers: list[Callable[[Group], Iterator[dict[str, Any]]]]
    if kind == "sft":
        # A trainer asks the first row whether there are tokens, and takes the others for the same.
        known = all(rollout.sequences for name in names for rollout in _trained(_group(name, store, environment)))
        makers = [partial(sft_rows, tokens=known)]
    else:
        makers = [dpo_rows, partial(dpo_text_rows, tokenizer=tokenizer)]
    return [
        _written(directory.path / file, (row for name in names for row in make(_group(name, store, environment))))
        for file, make in zip(FILES[kind], makers, strict=True)
    ]


def _written(path: Path, rows: Iterable[dict[str, Any]]) -> tuple[Path, int]:
    count = 0
    unfinished = path.with_suffix(".partial")
    with cannot_write(path):
        with unfinished.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
                count += 1
        unfinished.replace(path)
    return path, count


def _trained(group: Group) -> list[Rollout]:
    return [rollout for rollout in group.rollouts if not rollout.masked and rollout.result is not None]


def _group(name: str, store: RolloutStore, environment: Environment) -> Group:
    """A group as its lines have it; each member with the tools that the first was told of."""
    (lines,) = store.lines([name])
    row = Row(key=lines[0]["row_key"], columns={}, index=0, digest="")
    rollouts = [rollout_of(line, RolloutKey(row, name, place, len(lines))) for place, line in enumerate(lines)]
    for rollout in rollouts:
        rollout.masked = environment.treatment(rollout.ending) == "mask"
        if rollout.result is not None:
            rollout.result.tool_schemas = list(lines[0].get("tools") or ())
    return Group(name, row, rollouts)


def _labelled(sequence: TokenSequence) -> dict[str, Any]:
    return {
        "input_ids": sequence.tokens,
        "attention_mask": [1] * len(sequence),
        "labels": sequence.masks,
    }


def _messages(rollout: Rollout) -> list[dict[str, Any]]:
    return [_message(for_template(message)) for message in history_named(messages_of(rollout))]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates take it; a call that could not be read is the text that it was."""
    calls: list[dict[str, Any]] = []
    content = message["content"] or ""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        if isinstance(function["arguments"], dict):
            calls.append({"id": call.get("id"), "type": "function", "function": dict(function)})
        else:
            content = "\n".join(filter(None, (content, function["arguments"])))
    kept = {key: message[key] for key in _KEPT if message.get(key)}
    return {**kept, "content": content, **({"tool_calls": calls} if calls else {})}


def _pair(group: Group) -> Iterator[tuple[Rollout, Rollout]]:
    """The best and the worst; none where they are equal."""
    scored = [one for one in _trained(group) if one.score is not None]
    if scored:
        best, worst = max(scored, key=_score), min(scored, key=_score)
        if _score(best) > _score(worst):
            yield best, worst


def _told(best: Rollout, worst: Rollout) -> dict[str, Any]:
    return {"chosen_score": best.score, "rejected_score": worst.score, "group": best.key.group}


def _parts(rollout: Rollout) -> tuple[array[int], array[int]] | None:
    """Ids of the prompt and of all behind it, where they are one sequence."""
    line = rollout.sequence
    if line is None or not line.spans:
        return None
    start = line.spans[0].start
    return line.ids[:start], line.ids[start:]


def _tools(rollout: Rollout) -> str | None:
    """As text, since their schemas have keys of their own; None where there are none, as templates ask for that."""
    assert rollout.result is not None
    return json.dumps(list(rollout.result.tool_schemas), ensure_ascii=False) if rollout.result.tool_schemas else None


def _score(rollout: Rollout) -> float:
    assert rollout.score is not None
    return rollout.score
