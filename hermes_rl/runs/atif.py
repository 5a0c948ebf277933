"""Rollouts as trajectories in ATIF, the format in which Harbor and others exchange what agents did.

Source of names and rules: ATIF-v1.7 as in the models of Harbor 0.25. Fields that ATIF does not have are in `extra`.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hermes_rl import __version__
from hermes_rl.agent.result import reasoning_of, text_of
from hermes_rl.errors import UserError
from hermes_rl.runs.journal import write_atomically
from hermes_rl.runs.store import Line
from hermes_rl.values import read_bounded, safe_name, write_json

VERSION = "ATIF-v1.7"
IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")


def write_trajectories(
    folder: Path,
    groups: Iterable[Sequence[Line]],
    chosen: Callable[[Sequence[float | None]], Sequence[int]],
    trained: Callable[[Sequence[Line]], Container[str]],
) -> int:
    """Write a file for each rollout with a conversation, named by its id; return the number of files.

    `chosen` returns the indexes of the members of a group that are written, by their scores; `trained` the ids of the
    members that are trained on. Files of others, which an earlier export wrote, are removed. Raises `UserError` if the
    directory contains other files, or cannot be written.
    """
    count = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(path.suffix != ".json" for path in folder.iterdir()):
            raise UserError(f"{folder} contains other files; choose a new directory or one of an earlier export")
        for members in groups:
            chosen_indexes, trained_ids = chosen([line["score"] for line in members]), trained(members)
            for index, line in enumerate(members):
                path = folder / f"{safe_name(line['id'])}.json"
                if index in chosen_indexes and line["messages"]:
                    write_atomically(path, write_json(trajectory(line, masked=line["id"] not in trained_ids)))
                    count += 1
                else:
                    path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written to: {error.strerror}") from error
    return count


def trajectory(line: Line, *, masked: bool) -> dict[str, Any]:
    """Return the trajectory of a rollout from its record in `rollouts.jsonl`; `masked`: it is not trained on."""
    steps = [{"step_id": step_id, **step} for step_id, step in enumerate(_atif_steps(line), 1)]
    usage, policy = line.get("usage") or {}, line.get("policy") or {}
    metrics = {
        "total_prompt_tokens": usage.get("prompt_tokens"),
        "total_completion_tokens": usage.get("completion_tokens"),
        "total_cost_usd": usage.get("cost"),
        "total_steps": len(steps),
    }
    agent = {
        "name": "hermes-rl",
        "version": __version__,
        "model_name": policy.get("model"),
        "tool_definitions": line.get("tools") or None,
    }
    kept = ("row_key", "group", "index", "state", "score", "stop_reason", "error", "rewards")
    extra = {**{key: line.get(key) for key in kept}, "masked": masked}
    return {
        "schema_version": VERSION,
        "session_id": line["id"],
        "trajectory_id": line["id"],
        "agent": _drop_none(agent),
        "steps": steps,
        "final_metrics": _drop_none(metrics),
        "extra": _drop_none(extra),
    }


def _atif_steps(line: Line) -> Iterator[dict[str, Any]]:
    """Yield the steps: one per message, with the tool results in the message that called the tools."""
    messages: Sequence[Mapping[str, Any]] = line["messages"]
    prompt, index = line.get("prompt_length") or 0, 0
    while index < len(messages):
        message, start = messages[index], index
        index += 1
        answers = []
        while index < len(messages) and messages[index]["role"] == "tool":
            answers.append(messages[index])
            index += 1
        if message["role"] == "assistant":
            is_copied = start < prompt or message.get("context")
            copied = {"is_copied_context": True} if is_copied else {"llm_call_count": 1}
            yield {**_agent_step(message, answers), **copied}
            continue
        source = "user" if message["role"] == "user" else "system"
        yield _drop_none(
            {
                "source": source,
                "message": _atif_content(message.get("content")),
                "observation": _build_observation(answers, ()),
            }
        )


def _agent_step(message: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    calls = [_atif_call(call) for call in message.get("tool_calls") or ()]
    return _drop_none(
        {
            "source": "agent",
            "message": _atif_content(message.get("content")),
            "reasoning_content": reasoning_of(message),
            "tool_calls": calls or None,
            "observation": _build_observation(answers, {call["tool_call_id"] for call in calls}),
        }
    )


def _atif_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call; arguments that are not a JSON object are added unchanged as text."""
    written = call["function"]["arguments"]
    entry = {"tool_call_id": call.get("id") or "", "function_name": call["function"]["name"]}
    try:
        arguments = read_bounded(written)
    except ValueError:
        arguments = None
    if isinstance(arguments, dict):
        return {**entry, "arguments": arguments}
    return {**entry, "arguments": {}, "extra": {"arguments": written}}


def _build_observation(answers: Sequence[Mapping[str, Any]], calls: Any) -> dict[str, Any] | None:
    """Return the tool results; each names its call, if the call belongs to this step."""
    if not answers:
        return None
    results = [
        _drop_none(
            {
                "source_call_id": answer.get("tool_call_id") if answer.get("tool_call_id") in calls else None,
                "content": _atif_content(answer.get("content")),
            }
        )
        for answer in answers
    ]
    return {"results": results}


def _atif_content(content: Any) -> str | list[dict[str, Any]]:
    parts = content if isinstance(content, list) else []
    if not any(part.get("type") == "image_url" for part in parts if isinstance(part, dict)):
        return text_of(content)
    return [_atif_part(part) for part in parts if part.get("type") in ("text", "image_url")]


def _atif_part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    url = part["image_url"]["url"]
    kind = url[5:].partition(";")[0] if url.startswith("data:") else mimetypes.guess_type(url)[0]
    return {"type": "image", "source": {"media_type": kind if kind in IMAGES else IMAGES[0], "path": url}}


def _drop_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}
