"""Check groups before they are sent: a group is sent complete, finite, proven and within the trainer's length, or not.

Groups of an environment's own code are checked here in every mode, before they are written or sent.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, Literal

from hermes_rl.runs.groups import FILLER_OVERRIDE, OF_TEACHER
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tokens.transcript import MASKED, MASKED_LOGPROB
from hermes_rl.trainers.base import GroupRefused

_FILLER = {"masks": MASKED, "inference_logprobs": MASKED_LOGPROB, "advantages": 0.0, **OF_TEACHER}
PER_TOKEN = ("tokens", *_FILLER)
"""Fields of a group with one value for each token of each member."""


PER_MEMBER = (*PER_TOKEN, "scores", "messages", "overrides", "images")
"""Fields of a group with one entry for each member."""
NO_PROVENANCE = {"problems": ["it has no token provenance"]}
logger = logging.getLogger(__name__)


@dataclass
class TooLong:
    """Handling of sequences that are longer than a trainer accepts; `counts` are the cut or masked ones.

    ``drop`` excludes the whole group; ``truncate`` cuts the end of the sequence; ``mask`` replaces it by a filler, so
    that the rollout counts for its group's baseline and is not trained on.
    """

    policy: Literal["drop", "truncate", "mask"]
    counts: Counter[str]

    def enforce_max_length(self, group: dict[str, Any], longest: int | None) -> dict[str, Any]:
        """Return the group with every sequence within `longest` tokens; unchanged with ``drop``, which excludes it."""
        if longest is None or self.policy == "drop":
            return group
        indices = [index for index, tokens in enumerate(group.get("tokens") or []) if len(tokens) > longest]
        if not indices:
            return group
        cut = self.policy == "truncate"
        changed = {key: list(group[key]) for key in PER_TOKEN if group.get(key)}
        overrides = list(group.get("overrides") or [{} for _ in group["tokens"]])
        for index in indices:
            size, action = len(group["tokens"][index]), "cut" if cut else "not trained on"
            logger.warning("a sequence of %d tokens is %s: the trainer takes up to %d", size, action, longest)
            for key, lines in changed.items():
                filler = lines[index][:1] if key == "tokens" else [_FILLER.get(key)]
                lines[index] = lines[index][:longest] if cut else filler
            overrides[index] = {**overrides[index], **FILLER_OVERRIDE}
        self.counts["truncated" if cut else "masked"] += len(indices)
        return {**group, **changed, "overrides": group.get("overrides") if cut else overrides}


@dataclass
class Checks:
    """Conditions for every group that is sent.

    Attributes:
        group_size: members of a group, unless its `group_overrides` differ.
        tokens: refuse groups without tokens.
        exact: send only groups whose token provenance proves that their tokens were sampled.
        uniform: send groups with equal scores too.
        longest: maximum tokens of a sequence; None: no limit.
        max_staleness: maximum age of a group's oldest weights, in versions, when it is sent; None: no limit.
        keep_stale: send stale groups too, and count them.
        too_long: handling of sequences that are too long.
        counts: number of groups sent despite a problem, by cause.
    """

    group_size: int
    tokens: bool = True
    exact: bool = False
    uniform: bool = True
    longest: int | None = None
    max_staleness: int | None = None
    keep_stale: bool = False
    too_long: TooLong = field(default_factory=lambda: TooLong("drop", Counter()))
    counts: Counter[str] = field(default_factory=Counter)

    def usable(self, lines: list[dict[str, Any]], version: int | None) -> list[dict[str, Any]]:
        """Return the records of one group as a trainer can use them. Raises GroupRefused.

        Args:
            version: version of the newest weights, or None if unknown.
        """
        usable: list[dict[str, Any]] = []
        refused = None
        for line in lines:
            try:
                try:
                    usable.append(self._fitting(line, version))
                except (TypeError, ValueError, LookupError, AttributeError) as error:  # values of any type
                    raise GroupRefused("malformed", f"{type(error).__name__}: {error}") from error
            except GroupRefused as error:
                if any("layer" in line for line in lines if isinstance(line, Mapping)):
                    raise  # a part of a rollout is not trained on without the rest
                # An environment's own code may return several groups at once: an unusable one does not block the
                # others.
                refused = error
        if not usable and refused is not None:
            raise refused
        return usable

    def _fitting(self, line: Any, version: int | None) -> dict[str, Any]:
        if not isinstance(line, Mapping):
            raise GroupRefused("malformed", f"it is a {type(line).__name__}")
        size = (line.get("group_overrides") or {}).get("group_size", self.group_size)
        _require_shape(line, size, tokens=self.tokens)
        fitting = self.too_long.enforce_max_length(completed(dict(line)), self.longest)
        tokens, scores = fitting.get("tokens"), fitting["scores"]
        length = max(map(len, tokens), default=0) if tokens is not None else 0
        if self.longest is not None and length > self.longest:
            raise GroupRefused(
                "too_long", f"a sequence has {length} tokens, and the trainer takes up to {self.longest}"
            )
        if self.exact and (problems := (fitting.get("provenance") or NO_PROVENANCE)["problems"]):
            raise GroupRefused("unproven", problems[0])
        if not self.uniform and len(scores) > 1 and len(set(scores)) == 1:
            raise GroupRefused("uniform", f"all of its scores are the same, {scores[0]}")
        self._require_fresh(fitting, version)
        return fitting

    def _require_fresh(self, line: dict[str, Any], version: int | None) -> None:
        if self.max_staleness is None:
            return
        oldest = (line.get("provenance") or {}).get("oldest")
        if oldest is None or version is None:
            reason = "the version of the weights is not known; see weights_path of the server"
        elif version - oldest <= self.max_staleness:
            return
        else:
            reason = f"its oldest weights are {version - oldest} versions old, {self.max_staleness} are allowed"
        if not self.keep_stale:
            raise GroupRefused(str(StopReason.STALE), reason)
        self.counts[str(StopReason.STALE)] += 1
        logger.warning("a group was sent all the same (stale): %s", reason)


def completed(line: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with the fields that trajectory APIs and trainers expect, including `content` in every message."""
    group = {
        **line,
        "group_overrides": line.get("group_overrides") or {},
        "inference_logprobs": line.get("inference_logprobs") or [],
    }
    if group.get("messages"):
        group["messages"] = [
            [{**message, "content": message.get("content")} for message in conversation]
            for conversation in group["messages"]
        ]
    return group


def _require_shape(group: Mapping[str, Any], size: int, *, tokens: bool) -> None:
    """Raise GroupRefused if a group has a form that no trainer accepts."""
    columns = {name: group[name] for name in PER_MEMBER if group.get(name) is not None}
    token_columns = {"tokens", "masks"} & set(columns)
    if tokens and not token_columns:
        raise GroupRefused("no_tokens", "the tokens of its rollouts cannot be known")
    required = {"scores", "tokens", "masks"} if token_columns else {"scores"}
    if missing := sorted(required - set(columns)):
        raise GroupRefused("malformed", f"it has {', '.join(sorted(required - set(missing)))}, and no {missing[0]}")
    for name, value in columns.items():
        if not isinstance(value, Sized) or isinstance(value, str):
            raise GroupRefused("malformed", f"its {name} are a {type(value).__name__}")
    _require_lengths(columns, {name: len(columns[name]) for name in sorted(required, reverse=True)}, size)
    for score in columns["scores"]:
        try:
            finite = math.isfinite(score)
        except (TypeError, ValueError, ArithmeticError, RuntimeError):  # a text, a tensor of several values, 10**400
            raise GroupRefused("malformed", f"a score is {score!r}") from None
        if not finite:
            raise GroupRefused("not_finite", f"its scores are {group['scores']}")


def _require_lengths(columns: Mapping[str, Any], members: Mapping[str, int], size: int) -> None:
    """Raise GroupRefused if a list has not one entry for each member, or not one value for each token."""
    if set(members.values()) != {size}:
        raise GroupRefused("wrong_size", f"it has {dict(members)} instead of {size} members")
    for name, entries in columns.items():
        if len(entries) not in (0, size):
            raise GroupRefused("wrong_size", f"its {name} are {len(entries)} instead of {size}")
        for index, entry in enumerate(entries if name in PER_TOKEN and "tokens" in members else ()):
            length = len(columns["tokens"][index])
            if isinstance(entry, Sized) and len(entry) != length:
                raise GroupRefused("malformed", f"entry {index} of {name} has {len(entry)} values for {length} tokens")
