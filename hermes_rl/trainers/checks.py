"""What a trainer can use: a group leaves whole, finite, proven and within the trainer's length, or not at all.

What an environment's own code has made is checked here in every mode, before it is written or sent.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.endings import Ending
from hermes_rl.trainers.base import GroupRefused
from hermes_rl.trainers.too_long import PER_TOKEN, TooLong

PER_MEMBER = (*PER_TOKEN, "scores", "messages", "overrides", "images")
"""Fields of a group with one entry for each member."""
logger = logging.getLogger(__name__)


@dataclass
class Checks:
    """What holds for every group that is sent.

    Attributes:
        group_size: members of a group, where its `group_overrides` do not say otherwise.
        tokens: groups without tokens are refused.
        exact: only groups whose certificate proves that their tokens are those that were sampled.
        uniform: groups whose scores are all the same are sent too.
        longest: tokens of the longest sequence that may be sent; None: no bound.
        max_staleness: versions that the oldest weights of a group may be behind when it is sent; None: no bound.
        keep_stale: what is older is sent all the same, and counted.
        too_long: what becomes of a sequence that is too long.
        counts: what was sent although something was wrong with it, by cause.
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
        """Return the lines of a group as a trainer can use them.

        Args:
            lines: all lines of one group.
            version: of the newest weights; None where nobody tells it.

        Raises:
            GroupRefused: why the group is not to be sent.
        """
        usable: list[dict[str, Any]] = []
        refused = None
        for line in lines:
            try:
                self._require_shape(line)
                (fitting,) = self.too_long.applied([_completed(line)], self.longest)
                self._require_usable(fitting, version)
                usable.append(fitting)
            except GroupRefused as error:
                if any("layer" in line for line in lines if isinstance(line, Mapping)):
                    raise  # a part of a rollout is not trained on without the rest
                # An environment's own code may give several groups at once: one that is of no use holds up no other.
                refused = error
        if not usable and refused is not None:
            raise refused
        return usable

    def _require_shape(self, line: Any) -> None:
        if not isinstance(line, Mapping):
            raise GroupRefused("malformed", f"it is a {type(line).__name__}")
        size = (line.get("group_overrides") or {}).get("group_size", self.group_size)
        for cause, detail in _malformed(line, size, tokens=self.tokens):
            raise GroupRefused(cause, detail)

    def _require_usable(self, line: dict[str, Any], version: int | None) -> None:
        for cause, detail in _faults(line, self.longest, exact=self.exact):
            raise GroupRefused(cause, detail)
        if not self.uniform and len(line["scores"]) > 1 and len(set(line["scores"])) == 1:
            raise GroupRefused("uniform", f"all of its scores are the same, {line['scores'][0]}")
        self._require_fresh(line, version)

    def _require_fresh(self, line: dict[str, Any], version: int | None) -> None:
        if self.max_staleness is None:
            return
        oldest = (line.get("certificate") or {}).get("oldest")
        if oldest is None or version is None:
            words = "the version of the weights is not known; see weights_path of the server"
        elif version - oldest <= self.max_staleness:
            return
        else:
            words = f"its oldest weights are {version - oldest} versions behind, {self.max_staleness} are allowed"
        if not self.keep_stale:
            raise GroupRefused(str(Ending.STALE), words)
        self.counts[str(Ending.STALE)] += 1
        logger.warning("a group was sent all the same (stale): %s", words)


def _completed(line: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with what trajectory APIs and trainers take for granted, `content` in every message included."""
    made = {
        **line,
        "group_overrides": line.get("group_overrides") or {},
        "inference_logprobs": line.get("inference_logprobs") or [],
    }
    if made.get("messages"):
        made["messages"] = [
            [{**message, "content": message.get("content")} for message in conversation]
            for conversation in made["messages"]
        ]
    return made


def _malformed(group: Mapping[str, Any], size: int, *, tokens: bool) -> Iterator[tuple[str, str]]:
    """Why a group is none, whoever takes it: a cause to count, and words."""
    given = {name: group[name] for name in PER_MEMBER if group.get(name) is not None}
    known = {"tokens", "masks"} & set(given)
    if tokens and not known:
        yield "no_tokens", "the tokens of its rollouts cannot be known"
    required = {"scores", "tokens", "masks"} if known else {"scores"}
    if missing := sorted(required - set(given)):
        yield "malformed", f"it has {', '.join(sorted(required - set(missing)))}, and no {missing[0]}"
    for name, value in given.items():
        if not isinstance(value, Sized) or isinstance(value, str):
            yield "malformed", f"its {name} are a {type(value).__name__}"
    yield from _wrong_lengths(given, {name: len(given[name]) for name in sorted(required, reverse=True)}, size)
    for score in given["scores"]:
        try:
            finite = math.isfinite(score)
        except (TypeError, ValueError, ArithmeticError, RuntimeError):  # a text, a tensor of several values, 10**400
            yield "malformed", f"a score is {score!r}"
        if not finite:
            yield "not_finite", f"its scores are {group['scores']}"


def _wrong_lengths(given: Mapping[str, Any], members: Mapping[str, int], size: int) -> Iterator[tuple[str, str]]:
    """Which lists have not one entry for each member, or not one value for each token."""
    if set(members.values()) != {size}:
        yield "wrong_size", f"it has {dict(members)} instead of {size} members"
    for name, entries in given.items():
        if len(entries) not in (0, size):
            yield "wrong_size", f"its {name} are {len(entries)} instead of {size}"
        for place, entry in enumerate(entries if name in PER_TOKEN and "tokens" in members else ()):
            length = len(given["tokens"][place])
            if isinstance(entry, Sized) and len(entry) != length:
                yield "malformed", f"entry {place} of {name} has {len(entry)} values for {length} tokens"


def _faults(group: dict[str, Any], longest: int | None, *, exact: bool) -> Iterator[tuple[str, str]]:
    """Why a trainer could not use the group: a cause to count, and words."""
    tokens = group.get("tokens")
    length = max(map(len, tokens), default=0) if tokens is not None else 0
    if longest is not None and length > longest:
        yield "too_long", f"a sequence has {length} tokens, and the trainer takes up to {longest}"
    if exact:
        certificate = group.get("certificate") or {"problems": ["it has no certificate"]}
        for problem in certificate["problems"][:1]:
            yield "uncertified", problem
