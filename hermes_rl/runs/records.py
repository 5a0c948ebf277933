"""How a rollout looks in a file, and the way back.

A line of `rollouts.jsonl` holds all that is needed to score the rollout again and to make the lines of its group
(`hermes_rl.runs.group_lines`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hermes_rl.agent.result import AgentResult, Timings, ToolCall, Usage, reasoning_of
from hermes_rl.endings import Ending
from hermes_rl.errors import UserError
from hermes_rl.rollouts.rollout import Rollout, RolloutKey, RolloutState
from hermes_rl.scoring.value import RewardValue
from hermes_rl.servers.base import ChatReply, LedgerEntry
from hermes_rl.tokens.sequence import packed, unpacked
from hermes_rl.tokens.transcript import WeightVersions
from hermes_rl.tools.errors import ToolError

DIGITS = 16
"""Of the hash of a row's content, enough to see that it is another."""
ROLLOUT_KEYS = (
    "id", "row_key", "group", "epoch", "index", "attempt", "state", "rewards", "score", "ending", "error",
)  # fmt: skip
"""What a line of rollouts.jsonl has to have, to go on from it."""


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """The JSON form of a finished rollout; times in seconds, rounded to the microsecond."""
    result = rollout.result
    return {
        "id": rollout.id,
        "row_key": rollout.key.row.key,
        "group": rollout.key.group,
        "epoch": rollout.key.epoch,
        "index": rollout.key.index,
        "attempt": rollout.key.attempt,
        "state": str(rollout.state),
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
        for one in rollout.ledger
    ]


def rollout_of(line: Mapping[str, Any], key: RolloutKey) -> Rollout:
    """The rollout at a place, as its line has it; its seed, and whether it is masked, are up to the environment.

    Raises:
        UserError: the line lacks something.
    """
    try:
        return Rollout(
            replace(key, attempt=line["attempt"], epoch=line["epoch"]),
            0,
            Ending(line["ending"]),
            result_of(line),
            state=RolloutState(line["state"]),
            rewards={name: reward_of(value) for name, value in line["rewards"].items()},
            score=line["score"],
            error=line["error"],
            timings=dict(line.get("timings") or {}),
            artifacts=dict(line.get("artifacts") or {}),
            image=line.get("image"),
            sequences=None if line.get("sequences") is None else [unpacked(one) for one in line["sequences"]],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"rollout {line.get('id')} of rollouts.jsonl cannot be read ({error}); use --fresh") from error


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
        tool_calls=[_recorded_call(call, written) for call in line.get("tool_calls") or ()],
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
        sampled = LedgerEntry(count, bytes.fromhex(digest), prompt, check, WeightVersions(before, after))
        yield ChatReply(message, None, {}, model, kind, sampled=sampled, sampling=sampling)


def _recorded_call(record: Mapping[str, Any], written: Mapping[tuple[int, str], WrittenCall]) -> ToolCall:
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
        overrides=dict(record.get("overrides") or {}),
    )
