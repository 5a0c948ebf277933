"""Grade external trajectories in ATIF with the rewards of a spec; no rollout is run.

Owns reading the format (the parts that rewards can see are checked, the rest may be anything), the row of a trajectory,
and the selection of rewards that can judge from messages alone. Source of names and rules: ATIF-v1.0 to v1.8 as in the
models of Harbor 0.25.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hermes_rl.agent.result import AgentResult, Message, text_of
from hermes_rl.data.load import Split, load_rows
from hermes_rl.data.rows import Row
from hermes_rl.errors import Failure, UserError
from hermes_rl.others_files import read_regular
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.runs.regrading import regrade_obstacle
from hermes_rl.runs.store import result_of
from hermes_rl.scoring.grader import GradedReward
from hermes_rl.scoring.reward_value import RewardValue
from hermes_rl.spec.findings import locating
from hermes_rl.spec.model import Spec
from hermes_rl.stop_reasons import StopReason
from hermes_rl.values import read_json

# ------------------------------------------------------------------------------------------------------- The format


class _Read(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Source(_Read):
    path: str


class _Content(_Read):
    type: Literal["text", "image", "audio"]
    text: str | None = None
    source: _Source | None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> _Content:
        if (self.text is None) == (self.type == "text") or (self.source is None) != (self.type == "text"):
            raise ValueError("a content part of type text needs `text` alone; any other part needs `source` alone")
        return self


class _Call(_Read):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class _Answer(_Read):
    source_call_id: str | None = None
    content: str | list[_Content] | None = None


class _Observation(_Read):
    results: list[_Answer]


class _Turn(_Read):
    step_id: int
    source: Literal["system", "user", "agent"]
    message: str | list[_Content]
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    observation: _Observation | None = None
    is_copied_context: bool | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> _Turn:
        if self.source != "agent" and (self.tool_calls is not None or self.reasoning_content is not None):
            raise ValueError("only an agent calls tools and reasons")
        calls = {call.tool_call_id for call in self.tool_calls or ()}
        for answer in self.observation.results if self.observation is not None else ():
            if answer.source_call_id is not None and answer.source_call_id not in calls:
                raise ValueError(f"it answers the call {answer.source_call_id!r}, which this step does not make")
        return self


class _Totals(_Read):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cost_usd: float | None = None


class _Agent(_Read):
    name: str
    version: str
    tool_definitions: list[dict[str, Any]] | None = None


class _Trajectory(_Read):
    schema_version: str = Field("ATIF-v1.8", pattern=r"^ATIF-v1\.[0-8]$")
    agent: _Agent
    steps: list[_Turn] = Field(min_length=1)
    final_metrics: _Totals | None = None
    extra: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_in_order(self) -> _Trajectory:
        if [step.step_id for step in self.steps] != list(range(1, len(self.steps) + 1)):
            raise ValueError("`step_id` counts the steps from 1")
        return self


def read_atif(file: Path) -> tuple[AgentResult, Mapping[str, Any]]:
    """Return the part of a trajectory that rewards see, which counts as finished, and its `extra`.

    The steps before the agent's first step that is not copied are the prompt. An observation without a call is a tool
    result without a tool name. Raises `UserError` if the file cannot be read, or is not a trajectory.
    """
    try:
        trajectory = _Trajectory.model_validate(read_json(read_regular(file)))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        location = ".".join(map(str, first["loc"])) or "the trajectory"
        raise UserError(f"{file}: this is not a trajectory in ATIF: {location}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    turn_flags = [step.source == "agent" and not step.is_copied_context for step in trajectory.steps]
    first_turn = turn_flags.index(True) if True in turn_flags else len(turn_flags)
    prompt = [message for step in trajectory.steps[:first_turn] for message in _turn_messages(step)]
    spoken = [message for step in trajectory.steps[first_turn:] for message in _turn_messages(step)]
    totals = trajectory.final_metrics or _Totals()
    turns = [message for message in spoken if message["role"] == "assistant"]
    calls = [
        {"turn": turn, "id": call["id"], "name": call["function"]["name"]}
        for turn, message in enumerate(turns, 1)
        for call in message.get("tool_calls", ())
    ]
    usage = {"prompt_tokens": totals.total_prompt_tokens or 0, "completion_tokens": totals.total_completion_tokens or 0}
    line = {
        **{"messages": [*prompt, *spoken], "prompt_length": len(prompt), "turns": len(turns), "tool_calls": calls},
        **{"stop_reason": str(StopReason.FINISHED), "usage": usage | {"cost": totals.total_cost_usd}},
        "tools": trajectory.agent.tool_definitions,
    }
    return result_of(line), trajectory.extra or {}


def _turn_messages(step: _Turn) -> Iterator[Message]:
    """Yield a step's messages in OpenAI's form."""
    message: Message = {
        "role": "assistant" if step.source == "agent" else step.source,
        "content": _content(step.message),
    }
    if step.reasoning_content is not None:
        message["reasoning_content"] = step.reasoning_content
    if step.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.tool_call_id,
                "type": "function",
                "function": {"name": call.function_name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in step.tool_calls
        ]
    yield message
    for answer in step.observation.results if step.observation is not None else ():
        yield {"role": "tool", "tool_call_id": answer.source_call_id or "", "content": _content(answer.content or "")}


def _content(content: str | Sequence[_Content]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part.text or f"({part.type})"}
        if part.type != "image" or part.source is None
        else {"type": "image_url", "image_url": {"url": part.source.path}}
        for part in content
    ]


# ------------------------------------------------------------------------------------------------------ The grading


@dataclass(frozen=True)
class GradedTrajectory:
    """Result of the rewards for a trajectory; `score` is None if `error` gives a reason."""

    file: str
    row: str
    rewards: Mapping[str, RewardValue]
    score: float | None
    error: str | None = None

    def record(self) -> dict[str, Any]:
        """Return the JSON form."""
        rewards = {name: value.record() for name, value in self.rewards.items()}
        return {"file": self.file, "row_key": self.row, "rewards": rewards, "score": self.score, "error": self.error}


async def grade_atif(compiled: CompiledSpec, files: Sequence[Path], row: str | None = None) -> list[GradedTrajectory]:
    """Grade trajectories of the rows of a spec.

    Args:
        row: the key of the row of all trajectories; None: each names its row (`extra.row_key`, as an export does), or
            its first user message equals the question of the row's prompt.

    Raises:
        UserError: a file is not a trajectory, its row is unknown, or a reward cannot judge from messages alone.
    """
    _require_judgeable(compiled)
    spec = compiled.spec
    rows = await asyncio.to_thread(_load_all_rows, spec)
    by_question: dict[str, list[Row]] = {}
    for each in rows if row is None else ():
        by_question.setdefault(_last_question(compiled.prompt(each)), []).append(each)
    graded = []
    for file in files:
        result, extra = read_atif(file)
        key = row if row is not None else extra.get("row_key")
        question = _last_question(result.messages[: result.prompt_length])
        matching_rows = [each for each in rows if each.key == key] if key is not None else by_question.get(question, [])
        if len(matching_rows) != 1:
            count_text = f"{len(matching_rows)} rows" if matching_rows else "no row"
            which = f"with the key {key!r}" if key is not None else "whose prompt is its first user message"
            raise UserError(f"{file}: there is {count_text} {which}; pass the row's key with --row KEY")
        graded.append(await _grade_one(compiled, str(file), matching_rows[0], result))
    return graded


def _load_all_rows(spec: Spec) -> list[Row]:
    """Return the rows for training and for evaluation."""
    rule = spec.dataset.eval
    splits: list[Split] = ["train"] if rule is None else ["eval"] if rule.only else ["train", "eval"]
    return [row for split in splits for row in load_rows(spec, split, notify=lambda _: None)]


async def _grade_one(compiled: CompiledSpec, file: str, row: Row, result: AgentResult) -> GradedTrajectory:
    values: dict[str, RewardValue] = {}
    try:
        with locating(compiled.spec, row.key):
            await compiled.grader.grade_rollout(dict(row.columns), result, None, None, values)
        return GradedTrajectory(file, row.key, values, compiled.grader.score(values))
    except Failure as failure:
        return GradedTrajectory(file, row.key, values, None, failure.detail)


def _last_question(messages: Sequence[Message]) -> str:
    """Return the last user message in a prompt."""
    questions = [message for message in messages if message["role"] == "user"]
    return text_of(questions[-1]["content"]).strip() if questions else ""


def _require_judgeable(compiled: CompiledSpec) -> None:
    """Raise UserError with a line for each reward that needs more than messages."""
    whys = {reward.name: _judging_obstacle(reward) for reward in compiled.grader.rewards}
    lines = [
        f"rewards.{name} cannot judge a trajectory: {obstacle_text}; leave it out: --set rewards.{name}=null"
        for name, obstacle_text in whys.items()
        if obstacle_text is not None
    ]
    if lines:
        raise UserError("\n".join(lines))


def _judging_obstacle(reward: GradedReward) -> str | None:
    if reward.group_level:
        return "it compares the rollouts of a group"
    if reward.function.uses_context:
        return "it looks into a sandbox (ctx), and a trajectory has none"
    return regrade_obstacle(reward)
