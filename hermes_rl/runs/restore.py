"""A line of `rollouts.jsonl` as the rollout that it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hermes_rl.agent.result import AgentResult, Timings, ToolCall, Usage, reasoning_of
from hermes_rl.endings import Ending
from hermes_rl.errors import UserError
from hermes_rl.rollouts.rollout import Rollout, Seat
from hermes_rl.runs.records import WrittenCall, written_calls
from hermes_rl.scoring.value import RewardValue
from hermes_rl.servers.base import ChatReply
from hermes_rl.tokens.chat import Sequence as TokenSequence
from hermes_rl.tools.errors import ToolError


def rollout_of(line: Mapping[str, Any], seat: Seat, seed: int, *, masked: bool = False) -> Rollout:
    """The rollout of a seat, as its line has it; `masked` is up to the spec's `endings`, not to the line.

    Raises:
        UserError: the line lacks something.
    """
    try:
        return Rollout(
            replace(seat, attempt=attempt_of(line)),
            seed,
            Ending(line["ending"]),
            result_of(line),
            rewards={name: reward_of(value) for name, value in line["rewards"].items()},
            score=line["score"],
            error=line["error"],
            masked=masked,
            timings=dict(line.get("timings") or {}),
            sequence=_sequence(line.get("sequence")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"rollout {line.get('id')} of rollouts.jsonl cannot be read ({error}); use --fresh") from error


def attempt_of(line: Mapping[str, Any]) -> int:
    """Which attempt at its seat a line is, from its id (see `Seat.id`)."""
    tail = str(line["id"]).rpartition("-")[2].partition("r")[2]
    return int(tail) if tail.isdecimal() else 0


def result_of(line: Mapping[str, Any]) -> AgentResult:
    """What rewards see of a rollout; of the server's replies, what its record says of the policy."""
    messages = list(line["messages"])
    said = messages[line.get("prompt_length", 0) :]
    written = written_calls(said)
    policy = line.get("policy") or {}
    reply = ChatReply({}, None, {}, policy.get("model") or "", policy.get("type") or "")
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
        replies=[reply] if policy else [],
        prompt_length=line.get("prompt_length", 0),
    )


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


def _sequence(record: Mapping[str, Any] | None) -> TokenSequence | None:
    return None if record is None else TokenSequence(record["tokens"], record["masks"], record["logprobs"])
