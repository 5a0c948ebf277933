"""What becomes of a sequence that is longer than a trainer takes: a stated policy, counted, never silence.

``drop`` leaves the whole group out; ``truncate`` cuts the end of the sequence; ``mask`` puts a filler in its place, so
that the rollout stays for its group's baseline and is not trained on.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from hermes_rl.runs.groups import FILLER_OVERRIDE, OF_TEACHER
from hermes_rl.tokens.transcript import MASKED, MASKED_LOGPROB

logger = logging.getLogger(__name__)

Policy = Literal["drop", "truncate", "mask"]
_FILLER = {"masks": MASKED, "inference_logprobs": MASKED_LOGPROB, "advantages": 0.0, **OF_TEACHER}
PER_TOKEN = ("tokens", *_FILLER)
"""Fields of a group with one value for each token of each member."""


@dataclass
class TooLong:
    """The policy; `counts` are sequences that were cut or masked."""

    policy: Policy
    counts: Counter[str]

    def applied(self, groups: list[dict[str, Any]], longest: int | None) -> list[dict[str, Any]]:
        """Return the groups with every sequence within `longest` tokens; with ``drop`` as they are, to be left out."""
        if longest is None or self.policy == "drop":
            return groups
        return [self._shortened(group, longest) for group in groups]

    def _shortened(self, group: dict[str, Any], longest: int) -> dict[str, Any]:
        places = [i for i, tokens in enumerate(group.get("tokens") or []) if len(tokens) > longest]
        if not places:
            return group
        changed = {key: list(group[key]) for key in PER_TOKEN if group.get(key)}
        for place in places:
            size = len(group["tokens"][place])
            logger.warning("a sequence of %d tokens is %s: the trainer takes up to %d", size, self._words(), longest)
            for key, lines in changed.items():
                lines[place] = self._line(key, lines[place], longest)
        self.counts["truncated" if self.policy == "truncate" else "masked"] += len(places)
        return {**group, **changed, "overrides": self._overrides(group, places)}

    def _line(self, key: str, line: list[Any], longest: int) -> list[Any]:
        if self.policy == "truncate":
            return line[:longest]
        return line[:1] if key == "tokens" else [_FILLER[key]]

    def _overrides(self, group: dict[str, Any], places: list[int]) -> Any:
        if self.policy == "truncate":
            return group.get("overrides")
        given = list(group.get("overrides") or [{} for _ in group["tokens"]])
        for place in places:
            given[place] = {**given[place], **FILLER_OVERRIDE}
        return given

    def _words(self) -> str:
        return "cut" if self.policy == "truncate" else "not trained on"
