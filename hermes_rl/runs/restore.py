"""A line of `rollouts.jsonl` as the rollout that it was."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hermes_rl.agent.result import AgentResult, Timings, ToolCall, Usage, reasoning_of
from hermes_rl.endings import Ending
from hermes_rl.errors import UserError
from hermes_rl.rollouts.rollout import Rollout, RolloutKey
from hermes_rl.runs.records import WrittenCall, written_calls
from hermes_rl.scoring.value import RewardValue
from hermes_rl.servers.base import ChatReply, Sampled
from hermes_rl.tokens.packing import unpacked
from hermes_rl.tokens.transcript import Weights
from hermes_rl.tools.errors import ToolError


def rollout_of(line: Mapping[str, Any], key: RolloutKey, seed: int, *, masked: bool = False) -> Rollout:
    """The rollout of a key, as its line has it; `masked` is up to the spec's `endings`, not to the line.

    Raises:
        UserError: the line lacks something.
    """
    try:
        return Rollout(
            replace(key, attempt=attempt_of(line)),
            seed,
            Ending(line["ending"]),
            result_of(line),
            rewards={name: reward_of(value) for name, value in line["rewards"].items()},
            score=line["score"],
            error=line["error"],
            masked=masked,
            timings=dict(line.get("timings") or {}),
            artifacts=dict(line.get("artifacts") or {}),
            image=line.get("image"),
            sequences=None if line.get("sequences") is None else [unpacked(one) for one in line["sequences"]],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"rollout {line.get('id')} of rollouts.jsonl cannot be read ({error}); use --fresh") from error


def attempt_of(line: Mapping[str, Any]) -> int:
    """Which attempt at its key a line is, from its id (see `RolloutKey.id`)."""
    tail = str(line["id"]).rpartition("-")[2].partition("r")[2]
    return int(tail) if tail.isdecimal() else 0


def result_of(line: Mapping[str, Any]) -> AgentResult:
    """What rewards see of a rollout; of the server's replies, what its record says of the policy."""
    messages = list(line["messages"])
    said = messages[line.get("prompt_length", 0) :]
    written = written_calls(said)
    policy = line.get("policy") or {}
    ending = Ending(line["ending"])
    return AgentResult(
        messages=messages,
        turns_used=line.get("turns", 0),
        finished_naturally=ending.finished_naturally,
        reasoning_per_turn=[reasoning_of(message) for message in said if message["role"] == "assistant"],
        tool_errors=[ToolError(**error) for error in line.get("tool_errors") or ()],
        ending=ending,
        tool_calls=[_call(call, written) for call in line.get("tool_calls") or ()],
        usage=Usage(**(line.get("usage") or {})),
        timings=Timings(**{k: v for k, v in (line.get("timings") or {}).items() if k in _TIMINGS}),
        replies=list(_replies(line, said)) if policy else [],
        prompt_length=line.get("prompt_length", 0),
        tool_schemas=list(line.get("tools") or ()),
    )


def _replies(line: Mapping[str, Any], said: list[dict[str, Any]]) -> Iterator[ChatReply]:
    """The server's answers as far as they are recorded: what was sampled, else only who answered."""
    model, kind = line["policy"].get("model") or "", line["policy"].get("type") or ""
    sampling = line["policy"].get("sampling")
    messages = [message for message in said if message["role"] == "assistant"]
    if not line.get("sampled"):
        yield ChatReply({}, None, {}, model, kind, sampling=sampling)
        return
    for message, (count, digest, prompt, check, before, after) in zip(messages, line["sampled"], strict=True):
        sampled = Sampled(count, bytes.fromhex(digest), prompt, check, Weights(before, after))
        yield ChatReply(message, None, {}, model, kind, sampled=sampled, sampling=sampling)


def _call(record: Mapping[str, Any], written: Mapping[tuple[int, str], WrittenCall]) -> ToolCall:
    known = written.get((record["turn"], record["id"]), WrittenCall(None))
    arguments = json.loads(record["arguments"]) if "arguments" in record else known.arguments
    return ToolCall(**{**record, "arguments": arguments, "result": known.result})


_TIMINGS = ("generation", "tools", "queue")


def reward_of(record: Mapping[str, Any]) -> RewardValue:
    """A reward's value, as a line has it."""
    per_turn = record.get("per_turn")
    return RewardValue(
        record["value"],
        record.get("reason"),
        dict(record.get("metrics") or {}),
        None if per_turn is None else tuple(per_turn),
    )
