"""`groups.jsonl`: the records of it that belong to this run and match the run's rollouts."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.rollouts.advantages import of_tokens
from hermes_rl.rollouts.rollout import Group, Rollout, RolloutState
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.store import RolloutStore
from hermes_rl.threads import run_exclusively
from hermes_rl.tokens.transcript import MASKED, MASKED_LOGPROB, TokenLogprobs, TokenSequence, ids, numbers
from hermes_rl.values import write_message

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
# the scores counts it, and does not train on it. Entries of masked members have the same override.

FILLER_OVERRIDE = {"set_advantage_to_zero": True}
OF_TEACHER: Mapping[str, Any] = {"ref_logprobs": MASKED_LOGPROB, "distill_token_ids": [], "distill_logprobs": []}
"""Fields with the teacher's values for each token, and their values for the one token of a filler."""
GROUP_KEYS = ("group", "scores")
"""Keys that a record of groups.jsonl must have to be resumed."""


def group_lines(
    group: Group, generation_params: Mapping[str, Any], run: str = "", episode_group: str | None = None
) -> list[dict[str, Any]]:
    """Return the records of a group: one if each rollout has one sequence, else one for each sequence of the longest.

    `tokens` and `masks` are None if the tokens of any rollout are unknown; tokens are never invented.
    `inference_logprobs` is an empty list if the server returned none, since trainers read its length. `ref_logprobs`,
    `distill_token_ids` and `distill_logprobs` are present if a teacher was asked about every rollout. Only the first
    record has the messages and the images of the prompts. `run` is the fingerprint of the run. `episode_group` is the
    group of episodes that this group is a part of: its records then name the `seats` of their entries, and the part
    (`comparison`).
    """
    layers = _token_layers(group)
    keys: dict[str, Any] = {"group": episode_group or group.id, "row_key": group.row.key, "run": run}
    if episode_group is not None:
        keys |= {"comparison": group.id, "seats": [rollout.seat.name for rollout in group.rollouts]}
    if group.provenance is not None:
        keys["provenance"] = group.provenance.record()
    messages = [messages_of(rollout) for rollout in group.rollouts]
    image_lists = [_prompt_images(rollout) for rollout in group.rollouts]
    images = image_lists if any(image_lists) else None
    return [
        {
            **layer,
            "scores": group.scores,
            "messages": messages if index == 0 else None,
            "generation_params": dict(generation_params),
            "group_overrides": {},  # BaseEnv looks into it
            "images": images if index == 0 else None,
            **keys,
            **({"layer": index, "layers": len(layers)} if len(layers) > 1 else {}),
        }
        for index, layer in enumerate(layers)
    ]


def messages_of(rollout: Rollout) -> list[dict[str, Any]]:
    """Return the conversation; run-api refuses a message without a `content` key."""
    messages = rollout.result.messages if rollout.result else []
    return [{**message, "content": message.get("content")} for message in messages]


def _prompt_images(rollout: Rollout) -> list[str]:
    """Return the images of the prompt in order, each an address or a data URL."""
    prompt = rollout.messages[: rollout.result.prompt_length] if rollout.result is not None else []
    parts = [part for message in prompt if isinstance(message["content"], list) for part in message["content"]]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def _token_layers(group: Group) -> list[dict[str, Any]]:
    """Return the token fields of each layer; one layer without tokens if the tokens of any rollout are unknown."""
    member_sequences = [rollout.sequences for rollout in group.rollouts if not _has_exhausted_retries(rollout)]
    if None in member_sequences or not any(member_sequences):
        overrides = _entry_overrides([(rollout, False) for rollout in group.rollouts])
        empty = {"tokens": None, "masks": None, "inference_logprobs": [], "advantages": None, "overrides": overrides}
        return [{**empty, **_UNTAUGHT}]
    turns = group.turn_advantages()
    sequences = [
        [] if _has_exhausted_retries(rollout) else rollout.trained_sequences or [] for rollout in group.rollouts
    ]
    return [
        _batch_layer(group.rollouts, turns, sequences, layer_index) for layer_index in range(max(map(len, sequences)))
    ]


def _batch_layer(
    rollouts: Sequence[Rollout], turns: list[list[float]] | None, sequences: list[list[TokenSequence]], layer_index: int
) -> dict[str, Any]:
    layer_sequences = [
        member_data[layer_index] if layer_index < len(member_data) else None for member_data in sequences
    ]
    first = next(sequence for member_data in sequences for sequence in member_data)
    lines = [
        _entry_fields(rollout, sequence, first) for rollout, sequence in zip(rollouts, layer_sequences, strict=True)
    ]
    logprobs = [line["logprobs"] for line in lines]
    advantages = None
    if turns is not None:
        pairs = zip(layer_sequences, turns, strict=True)
        advantages = [
            [0.0] if sequence is None else of_tokens(sequence.spans, member_data, len(sequence))
            for sequence, member_data in pairs
        ]
    return {
        "tokens": [line["tokens"] for line in lines],
        "masks": [line["masks"] for line in lines],
        "inference_logprobs": logprobs if all(line is not None for line in logprobs) else [],
        "advantages": advantages,  # None: the trainer normalises the scores within the group
        "overrides": _entry_overrides(
            [(rollout, member_data is None) for rollout, member_data in zip(rollouts, layer_sequences, strict=True)]
        ),
        **_teacher_values(rollouts, layer_index),
    }


_UNTAUGHT: Mapping[str, None] = dict.fromkeys(OF_TEACHER)
_OF_A_FILLER = TokenLogprobs(numbers(), 0, ids(), numbers())


def _teacher_values(rollouts: Sequence[Rollout], layer_index: int) -> Mapping[str, list[Any] | None]:
    """Return the teacher's values for each entry, one list per token; a part that was not requested is None."""
    if any(rollout.teacher is None and not _has_exhausted_retries(rollout) for rollout in rollouts):
        return _UNTAUGHT
    teachers = [[] if _has_exhausted_retries(rollout) else rollout.teacher or [] for rollout in rollouts]
    entries = [entry[layer_index] if layer_index < len(entry) else _OF_A_FILLER for entry in teachers]
    top = any(entry.top_k for entry in entries)
    return {
        "ref_logprobs": [entry.reference for entry in entries],
        "distill_token_ids": [entry.distill_ids for entry in entries] if top else None,
        "distill_logprobs": [entry.distill_logprobs for entry in entries] if top else None,
    }


def _entry_overrides(entries: Sequence[tuple[Rollout, bool]]) -> list[dict[str, Any]] | None:
    """Return the trainer's overrides for each entry (rollout, is_filler), or None if there are none."""
    each = [
        {**rollout.overrides, **(FILLER_OVERRIDE if is_filler or not rollout.trainable else {})}
        for rollout, is_filler in entries
    ]
    return each if any(each) else None


def _has_exhausted_retries(rollout: Rollout) -> bool:
    return rollout.state is RolloutState.RETRIES_EXHAUSTED


def _entry_fields(rollout: Rollout, sequence: TokenSequence | None, first: TokenSequence) -> dict[str, Any]:
    """Return tokens, masks and log-probabilities of one entry; `first` is a sequence of the group, for a filler's
    token.
    """
    if sequence is None:
        filler_source = first if _has_exhausted_retries(rollout) else (rollout.sequences or [first])[0]
        return {"tokens": filler_source.tokens[:1], "masks": [MASKED], "logprobs": [MASKED_LOGPROB]}
    return {"tokens": sequence.tokens, "masks": sequence.masks, "logprobs": sequence.logprobs}


# -------------------------------------------------------------------------------- Their JSON

COMPRESS_FROM = 1024
"""Size in bytes from which a body is compressed."""


async def encoded(value: Any) -> bytes:
    """Return the JSON of a value, encoded in a thread: a group of long rollouts would block the event loop.

    Raises `ValueError` for values that JSON does not have (NaN).
    """
    return await run_exclusively(to_json, value)


async def body_of(value: Any) -> tuple[bytes, dict[str, str]]:
    """Return a request's body and its headers; compressed if that saves enough."""
    body = await encoded(value)
    headers = {"Content-Type": "application/json"}
    if len(body) < COMPRESS_FROM:
        return body, headers
    return await asyncio.to_thread(gzip.compress, body, 1), {**headers, "Content-Encoding": "gzip"}


def to_json(value: Any) -> bytes:
    """Return the JSON of a value; yield to other threads between two items of an object, or of a list of lists."""
    if isinstance(value, Mapping):
        return b"{%b}" % b",".join(write_message(str(key)) + b":" + to_json(item) for key, item in value.items())
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        return b"[%b]" % b",".join(map(to_json, value))
    data = write_message(value, _to_builtin)
    if b"null" in data and not isinstance(value, str):
        json.dumps(value, default=_to_builtin, allow_nan=False)  # NaN must fail here: it is not a missing number
    return data


def _to_builtin(value: Any) -> Any:
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
                    f"{self.journal.path} contains groups of another run ({line.get('run')}; this one is {self.run}): "
                    "move it, or choose another path"
                )
            size = _member_count(line)
            if size not in (None, group_size):
                raise UserError(
                    f"{self.journal.path} contains groups of {size}, but process.group_size is {group_size}: set it to "
                    f"{size} to resume, or use --fresh to start a new run next to it"
                )

    def groups(self) -> list[str]:
        """Return the ids of all groups in the file, in its order."""
        return list(dict.fromkeys(line["group"] for line in self.journal.read(*GROUP_KEYS)))

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
                    f"{self.journal.path} contains groups of a run in another directory than {store.path} (such as "
                    f"{group}): move it, or choose another path"
                )
            group_layers = layers.setdefault(group, set())
            extra = extra or layer in group_layers
            group_layers.add(layer)
            if group in changed or (compare and "seats" not in line and line["scores"] != store.scores(group)):
                wrong.add(group)
            totals[group] = line.get("layers", 1)
        right = {
            group
            for group, group_layers in layers.items()
            if group not in wrong and group_layers == set(range(totals[group]))
        }
        if extra or len(right) < len(layers):
            self._take_out({(group, layer) for group in right for layer in layers[group]})
        return right

    def _take_out(self, right: set[tuple[str, int]]) -> None:
        remaining = set(right)

        def first(line: dict[str, Any]) -> bool:
            key = line["group"], line.get("layer", 0)
            present = key in remaining
            remaining.discard(key)
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


def _member_count(line: Mapping[str, Any]) -> int | None:
    """Return how many members the group of a record has, or None if it compares the seats of one member."""
    if not isinstance(line["scores"], list):
        return 0
    if "seats" not in line:
        return len(line["scores"])
    return None if line["comparison"].endswith("@episode") else line["seats"].count(line["seats"][0])
