"""`groups.jsonl`: the records of it that belong to this run and match the run's rollouts."""

from __future__ import annotations

import asyncio
import gzip
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.errors import UserError
from hermes_rl.rollouts.advantages import of_tokens
from hermes_rl.rollouts.environment import Environment
from hermes_rl.rollouts.rollout import Group, Rollout, RolloutKey, RolloutState
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.journal import Journal, replaced
from hermes_rl.runs.parquet import of_row, write_table
from hermes_rl.runs.store import Line, RolloutStore, group_of_episode, other_seat, rollout_of
from hermes_rl.spec.model import Process
from hermes_rl.stop_reasons import StopReason
from hermes_rl.threads import run_exclusively
from hermes_rl.tokens.rendering import for_template, history_named
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.tokens.transcript import MASKED, MASKED_LOGPROB, TokenLogprobs, TokenSequence, ids, numbers
from hermes_rl.values import write_json, write_message

# ----------------- Files for other tools and trainers, made from the rollouts of a run of process mode
# TRL and Axolotl load these shapes (docs/tokens.md). Messages have the form that chat templates accept: arguments are
# objects, and keys without a value are absent, since templates test which keys exist. A rollout of several sequences
# becomes several rows.

FILES: Mapping[str, tuple[str, ...]] = {"sft": ("sft.jsonl",), "dpo": ("dpo.jsonl", "dpo-text.jsonl")}
TABLE = "rollouts.parquet"
_KEPT = ("role", "tool_call_id", "name", "reasoning_content")


def sft_rows(
    group: Group, *, tokens: bool, min_score: float | None = None, best: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row per sequence of each rollout that is chosen; without `tokens` a row of messages per rollout."""
    for rollout in _chosen(group, min_score, best):
        conversation = {"messages": _messages(rollout), "tools": _tools(rollout)}
        row = {**conversation, "score": rollout.score, "group": group.id, "rollout": rollout.id, **of_row(group.row)}
        for sequence in rollout.sequences or () if tokens else ():
            attended = [1] * len(sequence)
            yield {**row, "input_ids": sequence.tokens, "attention_mask": attended, "labels": sequence.masks}
        if not tokens:
            yield row


def dpo_rows(group: Group) -> Iterator[dict[str, Any]]:
    """Yield the best and the worst rollout of a group as a pair of messages; yield nothing if they are equal.

    Tokens and labels of both sides are None unless each of the two rollouts is one sequence.
    """
    for best, worst in _pair(group):
        assert best.result is not None
        prompt = best.result.prompt_length
        sequences = {"chosen": best.sequence, "rejected": worst.sequence}
        known = None not in sequences.values()
        yield {
            "prompt": _messages(best)[:prompt],
            "chosen": _messages(best)[prompt:],
            "rejected": _messages(worst)[prompt:],
            "tools": _tools(best),
            **_pair_fields(best, worst),
            **{f"{side}_input_ids": seq.tokens if known and seq else None for side, seq in sequences.items()},
            **{f"{side}_labels": seq.masks if known and seq else None for side, seq in sequences.items()},
        }


def dpo_text_rows(group: Group, tokenizer: Tokenizer | None) -> Iterator[dict[str, Any]]:
    """Yield the rows as texts, control tokens included, as the model saw and wrote them.

    Yields nothing if tokens are not known, or if a rollout is several sequences.
    """
    for best, worst in _pair(group):
        chosen, rejected = _parts(best), _parts(worst)
        if tokenizer is None or chosen is None or rejected is None or chosen[0] != rejected[0]:
            continue
        texts = map(tokenizer.decode, (*chosen, rejected[1]))
        yield {**dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)), **_pair_fields(best, worst)}


def write_format(
    section: Process,
    directory: RunDirectory,
    store: RolloutStore,
    environment: Environment,
    groups: Journal,
    tokenizer: Tokenizer | None,
    rewards: Sequence[str],
) -> list[str]:
    """Write the files that `section` requests again from the existing groups. Blocks.

    Returns each file with its number of rows, as a message.
    """
    kind, best, least = section.format, section.keep_best, section.min_score

    names = dict.fromkeys(line["group"] for line in groups.read(*GROUP_KEYS))

    def written() -> Iterator[Group]:
        for lines in store.lines(names):
            for members in seats_of(lines):
                name = members[0]["group"]
                yield group_of(name, members, lambda stop_reason: environment.on_stop_policy(stop_reason) == "mask")

    if kind == "parquet":
        table = directory.path / TABLE
        count = write_table(table, written(), rewards)
        return [f"{count} rows for {kind} in {table}"]
    makers: list[Callable[[Group], Iterator[dict[str, Any]]]]
    mixed = ""
    if kind == "sft":
        # A trainer checks only the first row for tokens, and assumes the same for the others.
        known, scores = True, set()
        for group in written():
            rollouts = _chosen(group, least, best)
            known = known and all(rollout.sequences for rollout in rollouts)
            scores |= {rollout.score for rollout in rollouts if rollout.score is not None}
        makers = [partial(sft_rows, tokens=known, min_score=least, best=best)]
        if least is best is None and len(scores) > 1:
            mixed = (
                f"; their scores are from {min(scores):g} to {max(scores):g}: `process.min_score` and "
                "`process.keep_best` leave out rollouts that a model should not learn from"
            )
    else:
        makers = [dpo_rows, partial(dpo_text_rows, tokenizer=tokenizer)]
    notes = []
    for file, make in zip(FILES[kind], makers, strict=True):
        path = directory.path / file
        count = _write(path, (row for group in written() for row in make(group)))
        notes.append(f"{count} rows for {kind} in {path}{mixed}")
    return notes


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    count = 0
    with replaced(path) as unfinished, unfinished.open("wb") as file:
        for row in rows:
            file.write(write_json(row) + b"\n")
            count += 1
    return count


def _chosen(group: Group, min_score: float | None, best: int | None) -> list[Rollout]:
    """Return the `best` rollouts with at least `min_score` that are trained on, in the order of the group."""
    rollouts = [
        rollout
        for rollout in _trained(group)
        if min_score is None or (rollout.score is not None and rollout.score >= min_score)
    ]
    if best is None or len(rollouts) <= best:
        return rollouts
    # Of equal ones the first: a sort keeps their order.
    chosen = sorted((each for each in rollouts if each.score is not None), key=_score, reverse=True)[:best]
    return sorted(chosen, key=lambda rollout: rollout.key.index)


def _trained(group: Group) -> list[Rollout]:
    return [rollout for rollout in group.rollouts if not rollout.masked and rollout.result is not None]


def seats_of(lines: Sequence[Line]) -> list[list[Line]]:
    """Return the records of a group's members for each trained seat if several agents share the group; else all."""
    seats = zip(*((line, *line.get("others", ())) for line in lines), strict=True)
    trained = [seat for seat in seats if "seat" not in seat[0] or seat[0]["seat"]["trained"]]
    return [[{**line, "others": ()} for line in seat] for seat in trained]


def group_of(name: str, lines: Sequence[Line], masks: Callable[[StopReason], bool]) -> Group:
    """Return a group from the records of its members; `masks` tells which stop reasons are not trained on.

    Only the record of the first rollout contains the row and the tools.
    """
    row = Row(key=lines[0]["row_key"], columns=lines[0].get("row") or {}, index=0, digest="")
    tools = next((line["tools"] for line in lines if line.get("tools")), ())
    rollouts = []
    for line in lines:
        episode, seat = group_of_episode(line), other_seat(line)
        key = RolloutKey(row, episode, line["index"], len(lines), line["attempt"], seat=seat)
        rollout = rollout_of(line, replace(key, mark=line["id"].removeprefix(key.id)))
        rollout.masked = masks(rollout.stop_reason) or rollout.state is RolloutState.RETRIES_EXHAUSTED
        if rollout.result is not None:
            rollout.result.tool_schemas = list(tools)
        rollouts.append(rollout)
    return Group(name, row, rollouts)


def _messages(rollout: Rollout) -> list[dict[str, Any]]:
    return [_message(for_template(message)) for message in history_named(messages_of(rollout))]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message as templates accept it; a call that could not be parsed becomes its original text."""
    calls: list[dict[str, Any]] = []
    content = message["content"] or ""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        if isinstance(function["arguments"], dict):
            calls.append({"id": call.get("id"), "type": "function", "function": dict(function)})
        else:
            content = "\n".join(filter(None, (content, function["arguments"])))
    fields = {key: message[key] for key in _KEPT if message.get(key)}
    return {**fields, "content": content, **({"tool_calls": calls} if calls else {})}


def _pair(group: Group) -> Iterator[tuple[Rollout, Rollout]]:
    """Yield the best and the worst rollout; nothing if they are equal."""
    scored = [rollout for rollout in _trained(group) if rollout.score is not None]
    if scored:
        best, worst = max(scored, key=_score), min(scored, key=_score)
        if _score(best) > _score(worst):
            yield best, worst


def _pair_fields(best: Rollout, worst: Rollout) -> dict[str, Any]:
    scores = {"chosen_score": best.score, "rejected_score": worst.score}
    return {**scores, "group": best.key.group, **of_row(best.key.row)}


def _parts(rollout: Rollout) -> tuple[array[int], array[int]] | None:
    """Return the ids of the prompt and of all tokens after it, if they are one sequence."""
    line = rollout.sequence
    if line is None or not line.spans:
        return None
    start = line.spans[0].start
    return line.ids[:start], line.ids[start:]


def _tools(rollout: Rollout) -> str | None:
    """Return the tools as text, since their schemas have varying keys, or None if there are none.

    Templates test for None.
    """
    assert rollout.result is not None
    return json.dumps(list(rollout.result.tool_schemas), ensure_ascii=False) if rollout.result.tool_schemas else None


def _score(rollout: Rollout) -> float:
    assert rollout.score is not None
    return rollout.score


# ------------- The records of a group: the form of a group of rollouts in `groups.jsonl` and on the way to a trainer
# `group_lines` creates them for all writers and senders. A record is a ScoredDataGroup with the keys that atroposlib
# 0.4.0 knows (`atroposlib.envs.base.ScoredDataGroup`), and `group`, `row_key`, `run` and `provenance`, which join it
# to the rollouts and prove its tokens.
#
# A trajectory API stores a group whose size differs from the registered size forever, so a rollout of several sequences
# cannot make a group larger. Record *b* holds sequence *b* of each rollout and has exactly as many entries as the
# group; a rollout without such a sequence gets a filler: one masked token, with the rollout's own score, and an
# override that sets its advantage to zero. A member whose retries were exhausted
# (`on_stop.retries_exhausted: worst`) gets a filler too, with the score of the worst member: a trainer that compares
# the scores counts it, and does not train on it.

FILLER_OVERRIDE = {"set_advantage_to_zero": True}
OF_TEACHER: Mapping[str, Any] = {"ref_logprobs": MASKED_LOGPROB, "distill_token_ids": [], "distill_logprobs": []}
"""Fields with the teacher's values for each token, and their values for the one token of a filler."""
GROUP_KEYS = ("group", "scores")
"""Keys that a record of groups.jsonl must have to be resumed."""


def group_lines(
    group: Group, generation_params: Mapping[str, Any], run: str = "", of: str | None = None
) -> list[dict[str, Any]]:
    """Return the records of a group: one if each rollout has one sequence, else one for each sequence of the longest.

    `tokens` and `masks` are None if the tokens of any rollout are unknown; tokens are never invented.
    `inference_logprobs` is an empty list if the server returned none, since trainers read its length. `ref_logprobs`,
    `distill_token_ids` and `distill_logprobs` are present if a teacher was asked about every rollout. Only the first
    record has the messages and the images of the prompts. `run` is the fingerprint of the run. `of` is the group of
    episodes that this group is a part of: its records then name the `seats` of their entries, and the part
    (`comparison`).
    """
    layers = _token_layers(group)
    keys: dict[str, Any] = {"group": of or group.id, "row_key": group.row.key, "run": run}
    if of is not None:
        keys |= {"comparison": group.id, "seats": [rollout.seat.name for rollout in group.rollouts]}
    if group.provenance is not None:
        keys["provenance"] = group.provenance.record()
    messages = [messages_of(rollout) for rollout in group.rollouts]
    seen = [_images(rollout) for rollout in group.rollouts]
    images = seen if any(seen) else None
    return [
        {
            **layer,
            "scores": group.scores,
            "messages": messages if number == 0 else None,
            "generation_params": dict(generation_params),
            "group_overrides": {},  # BaseEnv looks into it
            "images": images if number == 0 else None,
            **keys,
            **({"layer": number, "layers": len(layers)} if len(layers) > 1 else {}),
        }
        for number, layer in enumerate(layers)
    ]


def messages_of(rollout: Rollout) -> list[dict[str, Any]]:
    """Return the conversation; run-api refuses a message without a `content` key."""
    messages = rollout.result.messages if rollout.result else []
    return [{**message, "content": message.get("content")} for message in messages]


def _images(rollout: Rollout) -> list[str]:
    """Return the images of the prompt in order, each an address or a data URL."""
    prompt = rollout.messages[: rollout.result.prompt_length] if rollout.result is not None else []
    parts = [part for message in prompt if isinstance(message["content"], list) for part in message["content"]]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def _token_layers(group: Group) -> list[dict[str, Any]]:
    """Return the token fields of each layer; one layer without tokens if the tokens of any rollout are unknown."""
    known = [rollout.sequences for rollout in group.rollouts if not _lost(rollout)]
    if None in known or not any(known):
        overrides = _overrides([(rollout, rollout.masked or _lost(rollout)) for rollout in group.rollouts])
        empty = {"tokens": None, "masks": None, "inference_logprobs": [], "advantages": None, "overrides": overrides}
        return [{**empty, **_UNTAUGHT}]
    turns = group.turn_advantages()
    sequences = [[] if _lost(rollout) else rollout.sequences or [] for rollout in group.rollouts]
    return [_layer(group.rollouts, turns, sequences, number) for number in range(max(map(len, sequences)))]


def _layer(
    rollouts: Sequence[Rollout], turns: list[list[float]] | None, sequences: list[list[TokenSequence]], number: int
) -> dict[str, Any]:
    at = [own[number] if number < len(own) else None for own in sequences]
    first = next(sequence for own in sequences for sequence in own)
    lines = [_line(rollout, sequence, first) for rollout, sequence in zip(rollouts, at, strict=True)]
    logprobs = [line["logprobs"] for line in lines]
    advantages = None
    if turns is not None:
        pairs = zip(at, turns, strict=True)
        advantages = [
            [0.0] if sequence is None else of_tokens(sequence.spans, own, len(sequence)) for sequence, own in pairs
        ]
    return {
        "tokens": [line["tokens"] for line in lines],
        "masks": [line["masks"] for line in lines],
        "inference_logprobs": logprobs if all(line is not None for line in logprobs) else [],
        "advantages": advantages,  # None: the trainer normalises the scores within the group
        "overrides": _overrides([(rollout, own is None) for rollout, own in zip(rollouts, at, strict=True)]),
        **_taught(rollouts, number),
    }


_UNTAUGHT: Mapping[str, None] = dict.fromkeys(OF_TEACHER)
_OF_A_FILLER = TokenLogprobs(numbers(), 0, ids(), numbers())


def _taught(rollouts: Sequence[Rollout], number: int) -> Mapping[str, list[Any] | None]:
    """Return the teacher's values for each entry, one list per token; a part that was not requested is None."""
    if any(rollout.teacher is None and not _lost(rollout) for rollout in rollouts):
        return _UNTAUGHT
    teachers = [[] if _lost(rollout) else rollout.teacher or [] for rollout in rollouts]
    entries = [entry[number] if number < len(entry) else _OF_A_FILLER for entry in teachers]
    top = any(entry.top_k for entry in entries)
    return {
        "ref_logprobs": [entry.reference for entry in entries],
        "distill_token_ids": [entry.distill_ids for entry in entries] if top else None,
        "distill_logprobs": [entry.distill_logprobs for entry in entries] if top else None,
    }


def _overrides(entries: Sequence[tuple[Rollout, bool]]) -> list[dict[str, Any]] | None:
    """Return the trainer's overrides for each entry (rollout, is_filler), or None if there are none."""
    each = [{**rollout.overrides, **(FILLER_OVERRIDE if untaught else {})} for rollout, untaught in entries]
    return each if any(each) else None


def _lost(rollout: Rollout) -> bool:
    return rollout.state is RolloutState.RETRIES_EXHAUSTED


def _line(rollout: Rollout, sequence: TokenSequence | None, first: TokenSequence) -> dict[str, Any]:
    """Return tokens, masks and log-probabilities of one entry; `first` is a sequence of the group, for a filler's
    token.
    """
    if sequence is None:
        own = first if _lost(rollout) else (rollout.sequences or [first])[0]
        return {"tokens": own.tokens[:1], "masks": [MASKED], "logprobs": [MASKED_LOGPROB]}
    if rollout.masked:
        logprobs = [MASKED_LOGPROB] * len(sequence) if sequence.sampled is not None else None
        return {"tokens": sequence.tokens, "masks": [MASKED] * len(sequence), "logprobs": logprobs}
    return {"tokens": sequence.tokens, "masks": sequence.masks, "logprobs": sequence.logprobs}


# -------------------------------------------------------------------------------- Their JSON

COMPRESS_FROM = 1024
"""Size in bytes from which a body is compressed."""


async def encoded(value: Any) -> bytes:
    """Return the JSON of a value, encoded in a thread: a group of long rollouts would block the event loop.

    Raises `ValueError` for values that JSON does not have (NaN).
    """
    return await run_exclusively(_json, value)


async def body_of(value: Any) -> tuple[bytes, dict[str, str]]:
    """Return a request's body and its headers; compressed if that saves enough."""
    body = await encoded(value)
    headers = {"Content-Type": "application/json"}
    if len(body) < COMPRESS_FROM:
        return body, headers
    return await asyncio.to_thread(gzip.compress, body, 1), {**headers, "Content-Encoding": "gzip"}


def _json(value: Any) -> bytes:
    """Return the JSON of a value; yield to other threads between two items of an object, or of a list of lists."""
    if isinstance(value, Mapping):
        return b"{%b}" % b",".join(write_message(str(key)) + b":" + _json(item) for key, item in value.items())
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        return b"[%b]" % b",".join(map(_json, value))
    data = write_message(value, _plain)
    if b"null" in data and not isinstance(value, str):
        json.dumps(value, default=_plain, allow_nan=False)  # NaN must fail here: it is not a missing number
    return data


def _plain(value: Any) -> Any:
    """Return numbers of numpy and similar libraries, which hand-written environments may send, as Python numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


# -------------------------------------------------------------------------------- The file


@dataclass(frozen=True)
class GroupsFile:
    """Groups of the run with the fingerprint `run`; `moved`: the file is outside the run directory.

    The file is built from the store: a group that is missing in it, or differs from its rollouts, is written from them.
    """

    journal: Journal
    run: str
    moved: bool = False

    def check(self, group_size: int) -> None:
        """Raise UserError if the file contains groups of another run, or of another size than the new groups."""
        for line in self.journal.read(*GROUP_KEYS):
            if line.get("run", None if self.moved else self.run) != self.run:
                raise UserError(
                    f"{self.journal.path} holds groups of another run ({line.get('run')}; this one is {self.run}): "
                    "move it, or choose another place"
                )
            size = _members(line)
            if size not in (None, group_size):
                raise UserError(
                    f"{self.journal.path} holds groups of {size}, and process.group_size is {group_size}: set it to "
                    f"{size} to go on, or use --fresh to start beside it"
                )

    def groups(self) -> set[str]:
        """Return the ids of all groups in the file."""
        return {line["group"] for line in self.journal.read(*GROUP_KEYS)}

    def reconcile(self, store: RolloutStore, changed: Set[str] = frozenset(), *, compare: bool = True) -> set[str]:
        """Return the groups whose records match their rollouts; the others, and the `changed` groups, are removed.

        Without `compare`, scores may differ from the scores of the rollouts: an environment's user code made them.
        Raises `UserError` if a file elsewhere holds groups whose rollouts are missing here.
        """
        layers: dict[str, set[int]] = {}
        totals: dict[str, int] = {}
        wrong: set[str] = set()
        extra = False
        for line in self.journal.read(*GROUP_KEYS):
            group, layer = line["group"], line.get("layer", 0)
            if self.moved and group not in store.groups:
                raise UserError(
                    f"{self.journal.path} holds groups of a run in another directory than {store.path} (such as "
                    f"{group}): move it, or choose another place"
                )
            seen = layers.setdefault(group, set())
            extra = extra or layer in seen
            seen.add(layer)
            if group in changed or (compare and "seats" not in line and line["scores"] != store.scores(group)):
                wrong.add(group)
            totals[group] = line.get("layers", 1)
        right = {group for group, seen in layers.items() if group not in wrong and seen == set(range(totals[group]))}
        if extra or len(right) < len(layers):
            self._take_out({(group, layer) for group in right for layer in layers[group]})
        return right

    def _take_out(self, right: set[tuple[str, int]]) -> None:
        left = set(right)

        def first(line: dict[str, Any]) -> bool:
            place = line["group"], line.get("layer", 0)
            present = place in left
            left.discard(place)
            return present

        self.journal.keep(line for line in self.journal.read() if first(line))

    async def encoded(self, lines: list[dict[str, Any]]) -> list[bytes]:
        """Return the encoded records of a group; their JSON is made off the event loop."""
        return [await encoded(line) for line in lines]

    def write(self, lines: list[bytes]) -> None:
        """Write the lines of a group, together."""
        self.journal.append_lines(lines)

    def close(self) -> None:
        """Close the file."""
        self.journal.close()


def _members(line: Mapping[str, Any]) -> int | None:
    """Return how many members the group of a record has, or None if it compares the seats of one member."""
    if not isinstance(line["scores"], list):
        return 0
    if "seats" not in line:
        return len(line["scores"])
    return None if line["comparison"].endswith("@episode") else line["seats"].count(line["seats"][0])
