"""Files for trainers and other tools, made from recorded rollouts: `process.format` and `hermes-rl export`.

TRL, Axolotl, OpenAI and LLaMA-Factory load these shapes (docs/tokens.md). Messages have the form that chat templates
accept: arguments are objects, and keys without a value are absent, since templates test which keys exist. A rollout of
several sequences becomes several rows. Tables belong to `runs.parquet`, trajectories to `runs.atif`.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hermes_rl.agent.result import text_of
from hermes_rl.data.rows import Row
from hermes_rl.errors import UserError
from hermes_rl.rollouts.rollout import Group, Rollout, RolloutKey
from hermes_rl.runs.atif import write_trajectories
from hermes_rl.runs.groups import messages_of
from hermes_rl.runs.journal import replaced
from hermes_rl.runs.parquet import of_row, table_rows, write_table
from hermes_rl.runs.store import Line, group_of_episode, other_seat, rollout_of
from hermes_rl.terminal_text import pluralize
from hermes_rl.tokens.rendering import for_template, history_named
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.values import read_bounded, write_json

FILES: Mapping[str, str] = {
    "sft": "sft.jsonl",
    "dpo": "dpo.jsonl",
    "kto": "kto.jsonl",
    "openai": "openai.jsonl",
    "sharegpt": "sharegpt.jsonl",
    "parquet": "rollouts.parquet",
    "jsonl": "table.jsonl",
    "atif": "atif",
}
"""The file of each format; for `atif` a directory."""
PAIRS_AS_TEXT = "dpo-text.jsonl"
CONTRASTING = ("dpo", "kto")
"""Formats that need the rollouts with low scores, which `min_score` and `keep_best` would exclude."""
_KEPT = ("role", "tool_call_id", "name", "reasoning_content")


@dataclass(frozen=True)
class RolloutChoice:
    """The rollouts that are written, at most the `keep_best` of a group; `success` is the score of a solved one."""

    min_score: float | None = None
    keep_best: int | None = None
    success: float = 1.0

    def of(self, scores: Sequence[float | None]) -> list[int]:
        """Return the indexes of a group's members that are written, by their scores."""
        threshold = self.min_score
        eligible_indexes = [
            index
            for index, score in enumerate(scores)
            if threshold is None or (score is not None and score >= threshold)
        ]  # fmt: skip
        if self.keep_best is None or len(eligible_indexes) <= self.keep_best:
            return eligible_indexes
        # Of equal ones the first: a sort keeps their order.
        scored = sorted((-score, index) for index in eligible_indexes if (score := scores[index]) is not None)
        return sorted(index for _, index in scored[: self.keep_best])


@dataclass(frozen=True)
class RecordedRollouts:
    """The rollouts of a run; each call reads them again.

    Attributes:
        groups: returns the groups to write, one for each trained seat.
        lines: returns the records of every group and seat, including seats that are not trained on.
        rewards: names of the rewards.
        tokenizer: the policy's tokenizer, if it is known.
        on_stop: the spec's `on_stop`.
    """

    groups: Callable[[], Iterator[Group]]
    lines: Callable[[], Iterator[list[Line]]]
    rewards: Sequence[str]
    tokenizer: Tokenizer | None
    on_stop: Mapping[str, Any]


def write_format(kind: str, path: Path, recorded: RecordedRollouts, choice: RolloutChoice) -> list[str]:
    """Write a format into its file, which for `atif` is a directory, and return a message about each file. Blocks.

    Raises `RunError` if a file cannot be written, and `UserError` if the directory contains other files.
    """
    return _WRITERS[kind](path, recorded, choice)


def _write_sft(path: Path, recorded: RecordedRollouts, choice: RolloutChoice) -> list[str]:
    """Write SFT rows and return a note. All rows have tokens or none has: trainers check only the first row."""
    has_tokens, scores = True, set()
    for group in recorded.groups():
        rollouts = _choose_trained(group, choice)
        has_tokens = has_tokens and all(rollout.sequences for rollout in rollouts)
        scores |= {rollout.score for rollout in rollouts if rollout.score is not None}
    mixed = ""
    if choice.min_score is choice.keep_best is None and len(scores) > 1:
        mixed = (
            f"; their scores are from {min(scores):g} to {max(scores):g}: `process.min_score` and "
            "`process.keep_best` (--min-score and --keep-best) exclude rollouts that a model should not learn from"
        )
    return [_write_rows(path, "sft", recorded, lambda group: sft_rows(group, tokens=has_tokens, choice=choice)) + mixed]


def _write_openai(path: Path, recorded: RecordedRollouts, choice: RolloutChoice) -> list[str]:
    refused: Counter[str] = Counter()
    note = _write_rows(path, "openai", recorded, lambda group: openai_rows(group, choice, refused))
    if refused:
        reasons = ", ".join(f"{reason} ({rollout_count})" for reason, rollout_count in refused.most_common())
        note += f"; {pluralize(refused.total(), 'rollout')} excluded, which OpenAI would refuse: {reasons}"
    return [note]


def _write_kto(path: Path, recorded: RecordedRollouts, choice: RolloutChoice) -> list[str]:
    labels: Counter[bool] = Counter()
    note = _write_rows(path, "kto", recorded, lambda group: kto_rows(group, choice.success, labels))
    if len(labels) == 1:
        every = ", ".join(str(label).lower() for label in labels)
        note += f"; every label is {every}: a score from {choice.success:g} on (evaluate.success_threshold) is true"
    return [note]


def _write_dpo(path: Path, recorded: RecordedRollouts, choice: RolloutChoice) -> list[str]:
    texts = path.with_name(PAIRS_AS_TEXT)
    notes = [
        _write_rows(path, "dpo", recorded, dpo_rows),
        _write_rows(texts, "dpo", recorded, lambda group: dpo_text_rows(group, recorded.tokenizer)),
    ]
    if texts.stat().st_size == 0:
        texts.unlink()
        return notes[:1]
    return notes


def _write_sharegpt(path: Path, recorded: RecordedRollouts, choice: RolloutChoice) -> list[str]:
    return [_write_rows(path, "sharegpt", recorded, lambda group: sharegpt_rows(group, choice))]


def _write_jsonl(path: Path, recorded: RecordedRollouts, choice: RolloutChoice) -> list[str]:
    rewards = recorded.rewards
    return [_write_rows(path, "jsonl", recorded, lambda group: table_rows(_chosen_group(group, choice), rewards))]


def _write_parquet(path: Path, recorded: RecordedRollouts, choice: RolloutChoice) -> list[str]:
    count = write_table(path, (_chosen_group(group, choice) for group in recorded.groups()), recorded.rewards)
    return [f"{count} rows for parquet in {path}"]


def _write_atif(path: Path, recorded: RecordedRollouts, choice: RolloutChoice) -> list[str]:
    def trained(members: Sequence[Line]) -> set[str]:
        return {rollout.id for rollout in _trained_rollouts(group_of(members, recorded.on_stop, lambda *_: None))}

    count = write_trajectories(path, recorded.lines(), choice.of, trained)
    return [f"{pluralize(count, 'rollout')} for atif in {path}"]


_WRITERS: Mapping[str, Callable[[Path, RecordedRollouts, RolloutChoice], list[str]]] = {
    "sft": _write_sft,
    "dpo": _write_dpo,
    "kto": _write_kto,
    "openai": _write_openai,
    "sharegpt": _write_sharegpt,
    "parquet": _write_parquet,
    "jsonl": _write_jsonl,
    "atif": _write_atif,
}


def _write_rows(
    path: Path, kind: str, recorded: RecordedRollouts, make: Callable[[Group], Iterable[dict[str, Any]]]
) -> str:
    """Write the rows that are made of each group into a file; return a message about it."""
    count = 0
    with replaced(path) as unfinished, unfinished.open("wb") as file:
        for group in recorded.groups():
            for row in make(group):
                file.write(write_json(row) + b"\n")
                count += 1
    return f"{count} rows for {kind} in {path}"


def _chosen_group(group: Group, choice: RolloutChoice) -> Group:
    """Return the group with the rollouts of the choice, including those that are not trained on."""
    chosen = choice.of([rollout.score for rollout in group.rollouts])
    return replace(group, rollouts=[group.rollouts[index] for index in chosen])


def _choose_trained(group: Group, choice: RolloutChoice) -> list[Rollout]:
    """Return the rollouts of the choice that are trained on."""
    return _chosen_group(replace(group, rollouts=_trained_rollouts(group)), choice).rollouts


def _trained_rollouts(group: Group) -> list[Rollout]:
    return [rollout for rollout in group.rollouts if rollout.trainable]


# ------------------------------------------------------------------------------------------------ Supervised training


def sft_rows(group: Group, *, tokens: bool, choice: RolloutChoice = RolloutChoice()) -> Iterator[dict[str, Any]]:
    """Yield a row per sequence of each rollout that is chosen; without `tokens` a row of messages per rollout."""
    for rollout in _choose_trained(group, choice):
        row = {"messages": _rollout_messages(rollout), "tools": _tools(rollout), **_row_fields(group, rollout)}
        for sequence in rollout.sequences or () if tokens else ():
            attended = [1] * len(sequence)
            yield {**row, "input_ids": sequence.tokens, "attention_mask": attended, "labels": sequence.masks}
        if not tokens:
            yield row


_OPENAI_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def openai_rows(group: Group, choice: RolloutChoice, refused: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield a row per rollout for OpenAI's fine-tuning of chat models, which accepts no further keys.

    The text after the last assistant message is cut off. Messages that the policy did not write have the weight 0. A
    rollout that the rules exclude is counted in `refused`, by the reason, since one of them makes OpenAI refuse the
    file.
    """
    for rollout in _choose_trained(group, choice):
        result = rollout.result
        assert result is not None
        messages = [_openai_message(message, is_prewritten) for message, is_prewritten in _with_origin(rollout)]
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        tools = list(result.tool_schemas)
        if reason := _broken_rule(messages, tools):
            refused[reason] += 1
        else:
            yield {"messages": messages, **({"tools": tools} if tools else {})}


def _with_origin(rollout: Rollout) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield each message, and True if it is an assistant message that the policy did not write in this rollout."""
    prompt = rollout.result.prompt_length if rollout.result is not None else 0
    for index, message in enumerate(messages_of(rollout)):
        yield message, message["role"] == "assistant" and (index < prompt or bool(message.get("context")))


def _openai_message(message: Mapping[str, Any], is_prewritten: bool) -> dict[str, Any]:
    role, content = message["role"], message["content"]
    if role == "user" and isinstance(content, list):
        return {"role": role, "content": content}
    text = text_of(content)
    if role == "tool":
        return {"role": role, "tool_call_id": message.get("tool_call_id") or "", "content": text}
    if role != "assistant":
        return {"role": "system" if role == "developer" else role, "content": text}
    calls = [
        {"id": call.get("id") or "", "type": "function", "function": _call_object(call["function"])}
        for call in message.get("tool_calls") or ()
    ]
    return {
        "role": role,
        **({"content": text} if text or not calls else {}),
        **({"tool_calls": calls} if calls else {}),
        **({"weight": 0} if is_prewritten else {}),
    }


def _call_object(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": function["arguments"] or "{}"}


def _broken_rule(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the rule that a conversation does not follow; empty if it follows all."""
    if not any(message["role"] == "assistant" and message.get("weight") != 0 for message in messages):
        return "no assistant message"
    if any(message["role"] not in ("system", "user", "assistant", "tool") for message in messages):
        return "an unknown role"
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    names = [*(tool["function"]["name"] for tool in tools), *(call["name"] for call in calls)]
    if not all(_OPENAI_NAME.fullmatch(name) for name in names):
        return "a tool with a name beyond letters, digits, _ and -"
    if not all(_is_object(call["arguments"]) for call in calls):
        return "a call whose arguments are not a JSON object"
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                return "a tool result without its call"
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            return "a call without a result"
        waiting = [call["id"] for call in message.get("tool_calls") or ()]
    return ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(read_bounded(text), dict)
    except ValueError:
        return False


SPEAKERS = {"system": "system", "developer": "system", "user": "human", "assistant": "gpt", "tool": "tool"}


def sharegpt_rows(group: Group, choice: RolloutChoice = RolloutChoice()) -> Iterator[dict[str, Any]]:
    """Yield a row per rollout in the form of ShareGPT, with calls, results and reasoning as Hermes models write them.

    Successive tool results are one entry, since readers expect speakers to alternate. Messages that the policy did not
    write have the weight 0. An image is the text `<image>`, with its address in `images`.
    """
    for rollout in _choose_trained(group, choice):
        entries: list[dict[str, Any]] = []
        images: list[str] = []
        origins = [is_prewritten for _, is_prewritten in _with_origin(rollout)]
        for message, is_prewritten in zip(_rollout_messages(rollout), origins, strict=True):
            speaker = SPEAKERS.get(message["role"], message["role"])
            value = _hermes_text(message, images)
            if speaker == "tool" and entries and entries[-1]["from"] == "tool":
                entries[-1]["value"] += f"\n{value}"
            else:
                entries.append({"from": speaker, "value": value, **({"weight": 0} if is_prewritten else {})})
        row = {"conversations": entries, "tools": _tools(rollout), **_row_fields(group, rollout)}
        yield {**row, "images": images} if images else row


def _hermes_text(message: Mapping[str, Any], images: list[str]) -> str:
    content = message["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    urls = [part["image_url"]["url"] for part in parts if part.get("type") == "image_url"]
    images += urls
    text = "".join("<image>" if part.get("type") == "image_url" else text_of([part]) for part in parts)
    if message["role"] == "tool":
        return f"<tool_response>\n{text}\n</tool_response>"
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    thought = message.get("reasoning_content")
    spoken = "\n".join(filter(None, (text, *calls)))
    return f"<think>\n{thought}\n</think>\n{spoken}" if thought else spoken


# ------------------------------------------------------------------------------------------------ Preferences


def kto_rows(group: Group, success: float, labels: Counter[bool]) -> Iterator[dict[str, Any]]:
    """Yield a prompt, a completion and a label per rollout: true from the score `success` on.

    The labels are counted in `labels`.
    """
    for rollout in _trained_rollouts(group):
        assert rollout.result is not None
        messages, prompt = _rollout_messages(rollout), rollout.result.prompt_length
        label = _score_of(rollout) >= success
        labels[label] += 1
        row = {"prompt": messages[:prompt], "completion": messages[prompt:], "label": label, "tools": _tools(rollout)}
        yield {**row, **_row_fields(group, rollout)}


def dpo_rows(group: Group) -> Iterator[dict[str, Any]]:
    """Yield the best and the worst rollout of a group as a pair of messages; yield nothing if they are equal.

    Tokens and labels of both sides are None unless each of the two rollouts is one sequence.
    """
    for best, worst in _best_and_worst(group):
        assert best.result is not None
        prompt = best.result.prompt_length
        sequences = {"chosen": best.sequence, "rejected": worst.sequence}
        has_tokens = None not in sequences.values()
        yield {
            "prompt": _rollout_messages(best)[:prompt],
            "chosen": _rollout_messages(best)[prompt:],
            "rejected": _rollout_messages(worst)[prompt:],
            "tools": _tools(best),
            **_pair_fields(best, worst),
            **{f"{side}_input_ids": seq.tokens if has_tokens and seq else None for side, seq in sequences.items()},
            **{f"{side}_labels": seq.masks if has_tokens and seq else None for side, seq in sequences.items()},
        }


def dpo_text_rows(group: Group, tokenizer: Tokenizer | None) -> Iterator[dict[str, Any]]:
    """Yield the rows as texts, control tokens included, as the model saw and wrote them.

    Yields nothing if tokens are not known, or if a rollout is several sequences.
    """
    for best, worst in _best_and_worst(group):
        chosen, rejected = _prompt_and_rest(best), _prompt_and_rest(worst)
        if tokenizer is None or chosen is None or rejected is None or chosen[0] != rejected[0]:
            continue
        texts = map(tokenizer.decode, (*chosen, rejected[1]))
        yield {**dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)), **_pair_fields(best, worst)}


def _best_and_worst(group: Group) -> Iterator[tuple[Rollout, Rollout]]:
    """Yield the best and the worst rollout; nothing if they are equal."""
    if trained := _trained_rollouts(group):
        best, worst = max(trained, key=_score_of), min(trained, key=_score_of)
        if _score_of(best) > _score_of(worst):
            yield best, worst


def _pair_fields(best: Rollout, worst: Rollout) -> dict[str, Any]:
    scores = {"chosen_score": best.score, "rejected_score": worst.score}
    return {**scores, "group": best.key.group, **of_row(best.key.row)}


def _prompt_and_rest(rollout: Rollout) -> tuple[array[int], array[int]] | None:
    """Return the ids of the prompt and of all tokens after it, if they are one sequence."""
    line = rollout.sequence
    if line is None or not line.spans:
        return None
    start = line.spans[0].start
    return line.ids[:start], line.ids[start:]


# ------------------------------------------------------------------------------------------------ Shared by all


def _row_fields(group: Group, rollout: Rollout) -> dict[str, Any]:
    return {"score": rollout.score, "group": group.id, "rollout": rollout.id, **of_row(rollout.key.row)}


def _rollout_messages(rollout: Rollout) -> list[dict[str, Any]]:
    return [_template_message(for_template(message)) for message in history_named(messages_of(rollout))]


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message as templates accept it; a call that could not be parsed becomes its original text."""
    calls: list[dict[str, Any]] = []
    content = message["content"] or ""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        if isinstance(function["arguments"], dict):
            calls.append({"id": call.get("id"), "type": "function", "function": dict(function)})
        else:
            content = "\n".join(filter(None, (content, function["arguments"])))
    fields = {key: message[key] for key in _KEPT if message.get(key) or key == "role"}
    return {**fields, "content": content, **({"tool_calls": calls} if calls else {})}


def _tools(rollout: Rollout) -> str | None:
    """Return the tools as text, since their schemas have varying keys, or None if there are none.

    Templates test for None.
    """
    assert rollout.result is not None
    return json.dumps(list(rollout.result.tool_schemas), ensure_ascii=False) if rollout.result.tool_schemas else None


def _score_of(rollout: Rollout) -> float:
    assert rollout.score is not None
    return rollout.score


# ------------------------------------------------------------------------------------------------ Groups of records


def seats_of(lines: Sequence[Line]) -> list[list[Line]]:
    """Return the records of a group's members for each seat if several agents share the group; else all."""
    seats = zip(*((line, *line.get("others", ())) for line in lines), strict=True)
    return [[{**line, "others": ()} for line in seat] for seat in seats]


def is_trained(members: Sequence[Line]) -> bool:
    """Return True if the seat of these records is trained, or a single agent runs."""
    return "seat" not in members[0] or bool(members[0]["seat"]["trained"])


def group_of(
    lines: Sequence[Line], on_stop: Mapping[str, Any], omit: Callable[[str, UserError], None] | None = None
) -> Group:
    """Return a group from the records of its members; the spec's `on_stop` tells which of them are masked.

    Only the record of the first rollout contains the row and the tools. `omit` is called with the id of a record that
    cannot be read; None: the error is raised.
    """
    row = Row(key=lines[0]["row_key"], columns=lines[0].get("row") or {}, index=0, digest="")
    tools = next((line["tools"] for line in lines if line.get("tools")), ())
    rollouts = []
    for line in lines:
        episode, seat = group_of_episode(line), other_seat(line)
        key = RolloutKey(row, episode, line["index"], len(lines), line["attempt"], seat=seat)
        try:
            rollout = rollout_of(line, replace(key, id_marker=line["id"].removeprefix(key.id)))
        except UserError as error:
            if omit is None:
                raise
            omit(line["id"], error)
            continue
        rollout.masked = on_stop.get(rollout.stop_reason) == "mask"
        if rollout.result is not None:
            rollout.result.tool_schemas = list(tools)
        rollouts.append(rollout)
    return Group(lines[0]["group"], row, rollouts)
