"""Putting the rollouts of a group together for Atropos: whole, aligned, or not at all.

atroposlib's own `collect_trajectories` drops the logprobs and misaligns optional lists; this keeps every list either
as long as the group or None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_rl.runs.groups import FILLER_OVERRIDE, OF_TEACHER
from hermes_rl.tokens.transcript import MASKED, MASKED_LOGPROB

FURTHER = "further"
"""Key of an item under which its rollout's other sequences lie, as items."""
_OPTIONAL = ("advantages", "ref_logprobs", "messages", "inference_logprobs", "overrides", "images",
             "distill_token_ids", "distill_logprobs")  # fmt: skip


def assemble(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """ScoredDataItems of `collect_trajectory` as one ScoredDataGroup.

    An optional field is kept where every item has it.
    """
    group: dict[str, Any] = {
        "tokens": [item["tokens"] for item in items],
        "masks": [item["masks"] for item in items],
        "scores": [float(item["scores"]) for item in items],
    }
    for name in _OPTIONAL:
        values = [item.get(name) for item in items]
        group[name] = values if all(value is not None for value in values) else None
    if group["inference_logprobs"] is None:
        group["inference_logprobs"] = []  # trainers take its length
    overrides = [item["group_overrides"] for item in items if item.get("group_overrides")]
    group["group_overrides"] = {key: value for part in overrides for key, value in part.items()}
    if any("layer" in item for item in items):
        group["layer"] = max(item.get("layer", 0) for item in items)
    group["generation_params"] = next((i["generation_params"] for i in items if i.get("generation_params")), None)
    return with_content(group)


def layered(items: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The items of each layer, as many as there are members; a member without a further sequence gets a filler."""
    deepest = max(len(item.get(FURTHER) or ()) for item in items)
    further = [[_further(item, number) for item in items] for number in range(deepest)]
    return [list(items), *further]


def _further(item: dict[str, Any], number: int) -> dict[str, Any]:
    given = item.get(FURTHER) or ()
    if number < len(given):
        return {"overrides": {}, **given[number], "layer": number + 1}
    filler = {"tokens": item["tokens"][:1], "masks": [MASKED], "inference_logprobs": [MASKED_LOGPROB]}
    filler |= {name: [value] for name, value in OF_TEACHER.items() if item.get(name) is not None}
    return {**filler, "scores": item["scores"], "overrides": dict(FILLER_OVERRIDE), "layer": number + 1}


def with_content(group: dict[str, Any]) -> dict[str, Any]:
    """The group with a `content` key in every message; run-api refuses a group without, and drops it."""
    if group.get("messages"):
        group["messages"] = [
            [{**message, "content": message.get("content")} for message in conversation]
            for conversation in group["messages"]
        ]
    return group


def checked(item: Mapping[str, Any]) -> dict[str, Any]:
    """The item, if it can be part of a group.

    Raises:
        ValueError: it lacks tokens, masks or a score; or its score is not finite, which makes a whole batch fail.
    """
    missing = [name for name in ("tokens", "masks", "scores") if item.get(name) is None]
    if missing:
        raise ValueError(f"collect_trajectory returned an item without {missing[0]!r}")
    if not math.isfinite(float(item["scores"])):
        raise ValueError(f"collect_trajectory returned the score {item['scores']}, which is not finite")
    return dict(item)
