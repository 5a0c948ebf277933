"""How rollouts and groups look in files; the way back is `hermes_rl.runs.restore`.

A line of `rollouts.jsonl` is ours; it holds all that is needed to score the rollout anew and to make its group's line.
A line of `groups.jsonl` is a ScoredDataGroup with the keys that atroposlib 0.4.0 writes
(`atroposlib.envs.base.ScoredDataGroup`), and `group`, `row_key` and `run`, which join it to the rollouts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hermes_rl.agent.result import AgentResult, ToolCall
from hermes_rl.errors import UserError
from hermes_rl.rollouts.certificate import sampled_of
from hermes_rl.rollouts.rollout import Group, Rollout
from hermes_rl.runs.layers import token_layers
from hermes_rl.tokens.packing import packed

UNTRAINED = -100
"""The mask of a position that is not trained on."""
DIGITS = 16
"""Of the hash of a row's content, enough to see that it is another."""
ROLLOUT_KEYS = ("id", "row_key", "group", "rewards", "score", "ending", "error")
"""What a line of rollouts.jsonl has to have, to go on from it."""
GROUP_KEYS = ("group", "scores")
"""What a line of groups.jsonl has to have, to go on from it."""


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """The JSON form of a finished rollout; times in seconds, rounded to the microsecond."""
    result = rollout.result
    return {
        "id": rollout.id,
        "row_key": rollout.key.row.key,
        "group": rollout.key.group,
        "messages": result.messages if result else [],
        "rewards": {name: value.record() for name, value in rollout.rewards.items()},
        "score": rollout.score,
        "ending": str(rollout.ending),
        "turns": result.turns_used if result else 0,
        "usage": result.usage.record() if result else {},
        "tool_errors": [asdict(error) for error in result.tool_errors] if result else [],
        "timings": {name: round(seconds, 6) for name, seconds in rollout.timings.items()},
        "policy": rollout.policy,
        "error": rollout.error,
        "played": str(result.ending) if result else None,
        "row_digest": rollout.key.row.digest[:DIGITS],
        "prompt_length": result.prompt_length if result else 0,
        "tool_calls": _calls(result) if result else [],
        "sequences": None if rollout.sequences is None else [packed(one) for one in rollout.sequences],
        "sampled": _sampled(rollout),
        "tools": list(result.tool_schemas) if result and rollout.key.index == 0 else None,
        **({"artifacts": rollout.artifacts} if rollout.artifacts else {}),
        **({"image": rollout.image} if rollout.image else {}),
    }


def _calls(result: AgentResult) -> list[dict[str, Any]]:
    """The calls without their results, which are in the messages; so are arguments that ran as they were written."""
    written = written_calls(result.messages[result.prompt_length :])
    return [_call(call, written.get((call.turn, call.id))) for call in result.tool_calls]


def _call(call: ToolCall, written: WrittenCall | None) -> dict[str, Any]:
    record = {"turn": call.turn, "id": call.id, "name": call.name, "seconds": round(call.seconds, 6)}
    if written is None or call.arguments != written.arguments:
        # As text: what a tool was given may hold numbers that JSON does not have.
        record["arguments"] = json.dumps(call.arguments, ensure_ascii=False, default=str)
    return record if call.error is None else {**record, "error": call.error}


@dataclass
class WrittenCall:
    """What the messages say of a call: its arguments, parsed where they can be, and what the model was told."""

    arguments: Any
    result: str = ""


def written_calls(messages: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], WrittenCall]:
    """The calls of a conversation without its prompt, by turn and id; an id may come again in a later turn."""
    found: dict[tuple[int, str], WrittenCall] = {}
    turn = 0
    for message in messages:
        if message["role"] == "assistant":
            turn += 1
            for call in message.get("tool_calls") or ():
                found[turn, call["id"]] = WrittenCall(_parsed(call["function"]["arguments"]))
        elif message["role"] == "tool" and (turn, message["tool_call_id"]) in found:
            found[turn, message["tool_call_id"]].result = str(message.get("content") or "")
    return found


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _sampled(rollout: Rollout) -> list[list[Any]]:
    """What the servers said of each call: count, digest, length and check of the prompt, versions of the weights."""
    return [
        [one.count, one.digest.hex(), one.prompt, one.prompt_check, one.weights.before, one.weights.after]
        for one in sampled_of(rollout)
    ]


def scored_data_group(
    group: Group, generation_params: Mapping[str, Any], *, with_messages: bool = True
) -> dict[str, Any]:
    """A whole group as Atropos' ScoredDataGroup: its first layer, which is all of it where rollouts have one sequence.

    `tokens` and `masks` are None where the tokens of any rollout cannot be known; nothing is invented.
    `inference_logprobs` is an empty list where the server gave none: trainers take its length.
    """
    return scored_data_groups(group, generation_params, with_messages=with_messages)[0]


def scored_data_groups(
    group: Group, generation_params: Mapping[str, Any], *, with_messages: bool = True
) -> list[dict[str, Any]]:
    """One ScoredDataGroup per layer (see `layers`); only the first has the messages."""
    messages = [atropos_messages(rollout) for rollout in group.rollouts] if with_messages else None
    return [
        {
            "tokens": layer["tokens"],
            "masks": layer["masks"],
            "scores": group.scores,
            "advantages": layer["advantages"],  # None: the trainer normalises the scores within the group
            "ref_logprobs": None,
            "messages": messages if number == 0 else None,
            "generation_params": dict(generation_params),
            "inference_logprobs": layer["inference_logprobs"],
            "overrides": layer["overrides"],
            "group_overrides": {},  # BaseEnv looks into it
            "images": None,
            "distill_token_ids": None,
            "distill_logprobs": None,
        }
        for number, layer in enumerate(token_layers(group))
    ]


def member_of(line: Mapping[str, Any]) -> int:
    """Which member of its group a line of rollouts.jsonl is, from its id (see `RolloutKey.id`).

    Raises:
        UserError: the id is not of the line's group.
    """
    index = str(line["id"]).removeprefix(f"{line['group']}-").partition("r")[0]
    if not index.isdecimal():
        raise UserError(f"rollouts.jsonl: {line['id']!r} is no rollout of group {line['group']!r}; use --fresh")
    return int(index)


def group_records(group: Group, generation_params: Mapping[str, Any], run: str = "") -> list[dict[str, Any]]:
    """What `groups.jsonl` holds of a group, one record per layer; `run` is the fingerprint of the run."""
    layers = scored_data_groups(group, generation_params)
    keys: dict[str, Any] = {"group": group.id, "row_key": group.row.key, "run": run}
    if group.certificate is not None:
        keys["certificate"] = group.certificate.record()
    numbered = [{"layer": number, "layers": len(layers)} if len(layers) > 1 else {} for number in range(len(layers))]
    return [{**layer, **keys, **number} for layer, number in zip(layers, numbered, strict=True)]


def atropos_messages(rollout: Rollout) -> list[dict[str, Any]]:
    """The conversation; run-api refuses a message without a `content` key."""
    messages = rollout.result.messages if rollout.result else []
    return [{**message, "content": message.get("content")} for message in messages]
