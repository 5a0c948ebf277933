"""Dialect of NeMo Gym: POST /run runs one rollout of a row, POST /aggregate_metrics aggregates the responses of /run.

The last item of each turn contains the tokens of that model call; each prompt starts with everything that came before
it, as NeMo RL requires. A rollout that must not be used for training has no tokens, and `_ng_failure_class` contains
the reason: NeMo Gym handles such rows separately, and never counts their reward.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean, pstdev
from typing import Any

from hermes_rl import Group, Policy, Rollout
from hermes_rl.errors import UserError
from hermes_rl.service.bodies import GymRunRequest
from hermes_rl.service.refusals import Refused, wrong
from hermes_rl.service.state import INEXACT, Service, unproven
from hermes_rl.values import is_number, read_json, write_json

FAILURE = "_ng_failure_class"
TASK = "_ng_task_index"
_SETTINGS = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
"""Allowed keys of a row's `responses_create_params`, and the corresponding setting of `agent`."""


async def played(service: Service, request: GymRunRequest, policy: Policy) -> Group:
    """Run the rollout that a request names; raises `Refused` if the request is wrong."""
    spec = service.env.spec
    if spec.agents and (len(spec.trained_seats) != 1 or spec.other_policies):
        reason = (
            "a row here is one rollout of `policy`, and other seats are trained, or none: POST /v1/rollouts has all"
        )
        raise wrong("several_agents", "agents", reason)
    key, split = request.verifier_metadata.get("row_key"), request.verifier_metadata.get("split", "train")
    if not isinstance(key, str) or split not in ("train", "eval"):
        raise wrong("row", "verifier_metadata", "`row_key` is a key of GET /v1/rows, and `split` train or eval")
    (row,) = service.require_rows([key], split, "verifier_metadata.row_key")
    params = request.responses_create_params
    sampling = {
        setting_name: params[theirs] for theirs, setting_name in _SETTINGS.items() if params.get(theirs) is not None
    }
    try:
        return await service.env.run_group(row, 1, policy, split=split, sampling=sampling)
    except UserError as error:
        raise wrong("request", "responses_create_params", str(error)) from error


def answer(request: GymRunRequest, group: Group, *, allow_inexact: bool) -> tuple[dict[str, Any], str | None]:
    """Return the row with its result, in the form of `/run`, and the reason if it must not be used for training."""
    rollout = group.rollouts[0] if group.rollouts else None
    failure = _failure_of(group, rollout, allow_inexact=allow_inexact)
    row = request.model_dump()
    if rollout is None or failure is not None:
        cause, detail = failure or ("no_rollout", group.detail)
        # NeMo Gym's rows have a number here; the class keeps it from being counted.
        response = _response_object(request, group.id, list(_items(rollout)) if rollout is not None else [])
        return {**row, "response": response, "reward": 0.0, FAILURE: cause, "error": detail}, cause
    rewards = {name: value.value for name, value in rollout.rewards.items() if name not in row}
    items = list(_items(rollout, _token_fields(rollout)))
    return {**row, **rewards, "response": _response_object(request, rollout.id, items), "reward": rollout.score}, None


def _failure_of(group: Group, rollout: Rollout | None, *, allow_inexact: bool) -> tuple[str, str | None] | None:
    """Return why a rollout must not be used for training, or None."""
    if group.dropped is not None or rollout is None or rollout.score is None:
        return str(group.dropped or "no_score"), group.detail
    if rollout.masked:
        return (
            "masked",
            f"the spec's `on_stop` keeps {rollout.stop_reason} from being trained on, and a row here has no mask",
        )
    if len(rollout.sequences or ()) > 1:
        return "several_sequences", (
            f"the policy did not see all of it in one context, and a row has one: {rollout.one_context}"
        )
    if rollout.credit or rollout.overrides:
        return (
            "credit",
            "rewards give credit to its turns, or overrides, and a row has one score: see POST /v1/rollouts",
        )
    problem = None if allow_inexact else unproven(group)
    if problem is not None:
        return INEXACT, problem
    return None


def _token_fields(rollout: Rollout) -> list[dict[str, Any]]:
    """Return the token fields of each turn."""
    tokens = []
    for sequence in rollout.sequences or ():
        ids, before = sequence.ids.tolist(), 0
        if sequence.sampled is None:
            continue
        for span in sequence.spans:
            count = span.stop - span.start
            tokens.append(
                {
                    "prompt_token_ids": ids[: span.start],
                    "generation_token_ids": ids[span.start : span.stop],
                    "generation_log_probs": sequence.sampled[before : before + count].tolist(),
                }
            )
            before += count
    return tokens


def _items(rollout: Rollout, tokens: list[dict[str, Any]] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the items of a Responses output: the messages of the policy, and the results of its tools and its user."""
    start = rollout.result.prompt_length if rollout.result is not None else 0
    turn = 0
    for message in rollout.messages[start:]:
        if message["role"] == "assistant":
            items = list(_output_items(message, turn))
            if tokens is not None and turn < len(tokens):
                items[-1] |= tokens[turn]
            turn += 1
            yield from items
        elif message["role"] == "tool":
            yield {
                "type": "function_call_output",
                "call_id": message["tool_call_id"],
                "output": _text_of(message.get("content")),
                "status": "completed",
            }
        else:
            yield {"type": "message", "role": message["role"], "content": _text_of(message.get("content"))}


def _output_items(message: Mapping[str, Any], turn: int) -> Iterator[dict[str, Any]]:
    calls = message.get("tool_calls") or ()
    if thought := message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": _text_of(thought)}]
        yield {"id": f"rs_{turn}", "type": "reasoning", "summary": summary}
    if message.get("content") or not calls:
        text = {"type": "output_text", "text": _text_of(message.get("content")), "annotations": []}
        yield {"id": f"msg_{turn}", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
    for call in calls:
        function = call["function"]
        yield {
            "id": call["id"],
            "type": "function_call",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": function["arguments"],
            "status": "completed",
        }


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def _response_object(request: GymRunRequest, rollout: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"resp_{rollout}",
        "created_at": time.time(),
        "model": str(request.responses_create_params.get("model") or "policy"),
        "object": "response",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": request.responses_create_params.get("tools") or [],
    }


# ------------------------------------------------------------------------------------------- /aggregate_metrics


MEMORY = 4 << 30
"""Maximum bytes of the process that parses a large body."""


def aggregation(body: bytes) -> tuple[int, bytes]:
    """Return the status and text of the response to a body."""
    try:
        return 200, write_json(aggregated(read_json(body)))
    except ValueError as error:
        refused = wrong("not_json", "body", f"the body is not JSON: {error}")
    except Refused as error:
        refused = error
    return refused.status, write_json(refused.body)


def aggregated(body: Any) -> dict[str, Any]:
    """Return the means of the responses of `/run`; failed rows are counted and excluded from the means.

    Raises `Refused` if the body is not a list of rows.
    """
    rows = body.get("verify_responses") if isinstance(body, Mapping) else None
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise wrong("aggregate", "verify_responses", "give a list of the answers of /run")
    counted = [row for row in rows if row.get(FAILURE) is None]
    tasks: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for row in counted:
        task = row.get(TASK)
        tasks[task if isinstance(task, int) else 0].append(row)
    means = _mean_metrics(counted)
    agent = {**means, "rollouts": len(counted), "failures": len(rows) - len(counted)}
    return {
        "agent_metrics": agent,
        "key_metrics": {name: value for name, value in agent.items() if name in ("mean/reward", "failures")},
        "group_level_metrics": [
            {TASK: task, **_mean_metrics(rows_of_task)} for task, rows_of_task in sorted(tasks.items())
        ],
    }


def _mean_metrics(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    numbers: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            if not name.startswith("_") and is_number(value):
                numbers[name].append(value)
    means = {f"mean/{name}": fmean(values) for name, values in numbers.items()}
    return means | {f"std/{name}": pstdev(values) for name, values in numbers.items() if name == "reward"}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    answered, response_body = aggregation(sys.stdin.buffer.read())
    sys.stdout.buffer.write(b"%d\n" % answered + response_body)
