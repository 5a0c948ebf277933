"""Run directories as a run writes them, made without playing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hermes_rl.agent.result import AgentResult, ProgramRun, ToolCall
from hermes_rl.data.rows import Row
from hermes_rl.errors import SandboxFailure
from hermes_rl.rollouts.rollout import Rollout, RolloutKey, RolloutState
from hermes_rl.runs.store import rollout_record
from hermes_rl.scoring.reward_value import RewardValue
from hermes_rl.servers.usage import Usage
from hermes_rl.stop_reasons import StopReason


def recorded(
    row: str, index: int = 0, score: float | None = 1.0, *, size: int = 1, text: str = "It is done.", attempt: int = 0
) -> dict[str, Any]:
    """Return the line of a rollout with one tool call; without a score its sandbox has failed."""
    key = RolloutKey(
        Row(row, {"question": f"What is {row}?", "answer": row}, 0, "d" * 64), f"{row}:0", index, size, attempt
    )
    call = {"id": "c1", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "ls"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"What is {row}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"], \\"turns\\": 7": 1}'},
        {"role": "assistant", "content": text},
    ]
    result = AgentResult(
        messages=messages, turns_used=2, finished_naturally=True, reasoning_per_turn=[None, None], tool_errors=[],
        stop_reason=StopReason.FINISHED, prompt_length=1, usage=Usage(120, 12, 1, unpriced=1),
        tool_calls=[ToolCall(turn=1, id="c1", name="terminal", arguments={"command": "ls"}, result="", seconds=0.25)],
        tool_schemas=[{"type": "function", "function": {"name": "terminal", "parameters": {"a": [], "turns": 1}}}],
    )  # fmt: skip
    played = Rollout(key, 0, StopReason.FINISHED, result, timings={"total": 1.5, "generation": 1.0})
    if score is None:
        played.fail(SandboxFailure("there was no room"))
    else:
        played.state, played.score = RolloutState.SCORED, score
        played.rewards = {"right": RewardValue(score, "as expected" if score == 1 else "it is another")}
    return rollout_record(played)


def programmed(row: str, calls: Iterable[tuple[str, int | None, int, bool]]) -> dict[str, Any]:
    """Return the line of a rollout that a program has played; its calls have a kind, what they continue, tokens, and
    whether they are trained."""
    names = ("kind", "continues", "tokens", "trained")
    made = [{**dict(zip(names, call, strict=True)), "preview": f"answer {n}"} for n, call in enumerate(calls, 1)]
    run = ProgramRun(
        0, "working <b>\x1b[31m\n", len(made) + 1, 1, made, {"side_calls": 9}, {"temperature": 0.2}, "`n` must be 1"
    )
    return {**recorded(row), "program": asdict(run)}


def write_run(folder: Path, lines: Iterable[dict[str, Any]], **described: Any) -> Path:
    """Write a run directory with these rollouts; `described` goes into run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {"format": 2, "name": "asking", "mode": "evaluate", "fingerprint": "01234567", **described}
    (folder / "run.json").write_text(json.dumps(said))
    (folder / "spec.yaml").write_text("name: asking\nagent: {temperature: 0.5}\n")
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
