"""What a trainer can use: a group leaves whole, finite, proven and within the trainer's length, or not at all."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.endings import Ending
from hermes_rl.trainers.base import GroupRefused
from hermes_rl.trainers.too_long import TooLong

logger = logging.getLogger(__name__)


@dataclass
class Checks:
    """What holds for every group that is sent.

    Attributes:
        group_size: members of a group, where its `group_overrides` do not say otherwise.
        exact: only groups whose certificate proves that their tokens are those that were sampled.
        uniform: groups whose scores are all the same are sent too.
        longest: tokens of the longest sequence that may be sent; None: no bound.
        max_staleness: versions that the oldest weights of a group may be behind when it is sent; None: no bound.
        keep_stale: what is older is sent all the same, and counted.
        too_long: what becomes of a sequence that is too long.
        counts: what was sent although something was wrong with it, by cause.
    """

    group_size: int
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
        fitting = self.too_long.applied([_completed(line) for line in lines], self.longest)
        if any("layer" in line for line in fitting):
            for line in fitting:  # a part of a rollout is not trained on without the rest
                self._require_usable(line, version)
            return fitting
        # An environment's own code may give several groups at once: one that is of no use holds up no other.
        found, refused = [], None
        for line in fitting:
            try:
                self._require_usable(line, version)
                found.append(line)
            except GroupRefused as error:
                refused = error
        if not found and refused is not None:
            raise refused
        return found

    def _require_usable(self, line: dict[str, Any], version: int | None) -> None:
        size = line["group_overrides"].get("group_size", self.group_size)
        for cause, detail in _faults(line, size, self.longest, exact=self.exact):
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


def _faults(group: dict[str, Any], size: int, longest: int | None, *, exact: bool) -> Iterator[tuple[str, str]]:
    """Why a trainer could not use the group: a cause to count, and words."""
    if group.get("tokens") is None or group.get("masks") is None:
        yield "no_tokens", "the tokens of its rollouts cannot be known"
        return
    sizes = {name: len(group[name]) for name in ("tokens", "masks", "scores")}
    if set(sizes.values()) != {size}:
        yield "wrong_size", f"it has {sizes} instead of {size} members"
    if not all(math.isfinite(score) for score in group["scores"]):
        yield "not_finite", f"its scores are {group['scores']}"
    length = max(map(len, group["tokens"]), default=0)
    if longest is not None and length > longest:
        yield "too_long", f"a sequence has {length} tokens, and the trainer takes up to {longest}"
    if exact:
        certificate = group.get("certificate") or {"problems": ["it has no certificate"]}
        for problem in certificate["problems"][:1]:
            yield "uncertified", problem
